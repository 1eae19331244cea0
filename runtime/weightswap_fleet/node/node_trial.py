"""A trial on one node: its replicas answer some requests with staged weights, and send their measures."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weightswap_fleet.documents import Order, TrialOrder
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.keeper import begin_trial
from weightswap_server.canary.judging import Judgement, Measured
from weightswap_server.workers.trials import read_measures


class Lease:
    """A lease that is over so many seconds after its last renewal."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self.renew()

    def renew(self) -> None:
        self._until = self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until


class NodeTrial:
    """Staged weights that replicas call from `go_on` on, until `end` or their commit. is_ready: they are staged."""

    def __init__(self, order: TrialOrder, staged: Staged, control: Control, clock: Callable[[], float]) -> None:
        self.order, self.staged = order, staged
        self._control, self.lease = control, Lease(order.lease, clock)
        self._judgement = Judgement(order.plan.judged)
        self._share: float | None = None
        self._word = 0
        self.is_ready = False

    def is_of(self, order: Order) -> bool:
        """True if an order is of the weights on trial, from the same source, which will be the desired one."""
        return (self.order.weights.weights_id, self.order.source) == (order.weights.weights_id, order.source)

    def go_on(self, share: float) -> Measured:
        """Continue with a share of the requests, and return the replicas' measures since the last call.

        Raises StageClosed if the weights were committed or discarded.
        """
        if share != self._share:
            terms = self.order.plan.judged._replace(share=share, promote_if="", abort_if="")  # the leader alone judges
            self._word = begin_trial(self._control, self.staged, msgspec.msgpack.encode(terms))
            self._share = share
        self.lease.renew()
        return self.measured()

    def measured(self) -> Measured:
        """Return the replicas' measures since the last call."""
        return self._judgement.take()

    def add(self, text: str) -> None:
        """Add a replica's measures. Those of an earlier trial are ignored."""
        measures = read_measures(text)
        if measures.trial == self._word:
            self._judgement.add(measures.measured)

    def end(self) -> None:
        """End the calls of the weights, and discard them."""
        self._control.end_trial()
        self.staged.discard()
