"""Weights on trial on one node: its replicas answer some requests with them, and say what they measure."""

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
    """So many seconds from its last renewal."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self.renew()

    def renew(self) -> None:
        self._until = self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        """Whether nobody has renewed it in time."""
        return self._clock() >= self._until


class NodeTrial:
    """Staged weights that replicas may call, once `go_on` has said how often; until `end`, or a commit of them.

    is_ready: whether they are staged.
    """

    def __init__(self, order: TrialOrder, staged: Staged, control: Control, clock: Callable[[], float]) -> None:
        self.order, self.staged = order, staged
        self._control, self.lease = control, Lease(order.lease, clock)
        self._judged = Judgement(order.plan.judged)
        self._share: float | None = None
        self._word = 0
        self.is_ready = False

    def is_of(self, order: Order) -> bool:
        """Whether an order wants what is on trial: the same weights, from the same place, where all will look for them
        from then on."""
        mine = self.order
        return (mine.weights.weights_id, mine.source) == (order.weights.weights_id, order.source)

    def go_on(self, share: float) -> Measured:
        """Go on, with a share of the requests. What replicas have measured since the last time.

        Raises StageClosed where its weights were committed or given up.
        """
        if share != self._share:
            terms = self.order.plan.judged._replace(share=share, promote_if="", abort_if="")  # rules are not theirs
            self._word = begin_trial(self._control, self.staged, msgspec.msgpack.encode(terms))
            self._share = share
        self.lease.renew()
        return self.measured()

    def measured(self) -> Measured:
        """What replicas have measured since the last time."""
        return self._judged.take()

    def heard(self, text: str) -> None:
        """A replica has said what it has measured. What is of an earlier trial is nobody's."""
        measures = read_measures(text)
        if measures.trial == self._word:
            self._judged.add(measures.measured)

    def end(self) -> None:
        """Nobody calls its weights from now on, and they are given up."""
        self._control.end_trial()
        self.staged.discard()
