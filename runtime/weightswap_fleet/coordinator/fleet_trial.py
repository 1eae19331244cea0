"""A trial of weights on all nodes of a fleet, before the fleet serves them: canary, shadow, and rollout by steps.

Nothing is written to the place: all nodes stage and verify, and let the weights answer some of their requests. The
leader of the trial renews its lease on each node, collects the measures, and judges all of them together. Without a
leader, the nodes end the trial; until then the next leader finds it in them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weightswap_fleet.documents import TrialOrder, TrialReport
from weightswap_fleet.errors import FleetRefused
from weightswap_runtime.errors import StageClosed, Unsupported
from weightswap_server.canary.judging import Judgement, Measured

from .agreement import Nodes, prepare_all, renewing

_ANSWER = 5.0  # seconds


class Verdict(NamedTuple):
    """A verdict on a trial: "promote", "abort", or "ended" if no node has it any more. why: in words."""

    what: str
    why: str


class FleetTrial:
    """The leader's side of a trial. Not thread-safe."""

    def __init__(self, order: TrialOrder, nodes: Nodes, now: Callable[[], float] = time.time) -> None:
        """now: returns seconds since the epoch."""
        self.order = order
        self._nodes, self._now = nodes, now
        self._judgement = Judgement(order.plan.judged)
        self.shares: dict[str, float] = {}

    @classmethod
    def find(cls, nodes: Nodes) -> FleetTrial | None:
        """Return the latest trial of a former leader, with measures begun anew, and end earlier ones."""
        answers = nodes.ask(nodes.names(), "trial", timeout=_ANSWER)
        orders = {name: order for name, order in answers.items() if isinstance(order, TrialOrder)}
        if not orders:
            return None
        latest = max(orders.values(), key=lambda order: order.weights.since)
        for name, order in orders.items():
            if order.id != latest.id:
                nodes.ask([name], "end_trial", order.id, timeout=_ANSWER)
        trial = cls(latest, nodes)
        trial.shares = {name: 0.0 for name, order in orders.items() if order.id == latest.id}
        return trial

    def begin(self, timeout: float) -> None:
        """Let all nodes stage and verify, and start the trial. Raises FleetRefused, and Unsupported for a share of the
        nodes that would be all of them. Then no node has the trial."""
        self._check_shares(self._nodes.names())
        with renewing(self._nodes, self.order):
            ready = prepare_all(self._nodes, "prepare_trial", self.order, "end_trial", timeout)
        self.shares = dict.fromkeys(ready, 0.0)
        if (verdict := self.look()) is not None and verdict.what == "ended":
            raise FleetRefused(self.order.source, dict.fromkeys(ready, StageClosed(verdict.why)))

    def _check_shares(self, names: Sequence[str]) -> None:
        plan = self.order.plan
        for share in plan.steps or (plan.share,):
            if plan.of == "nodes" and share < 1 and all(shares(names, share, by_nodes=True).values()):
                raise Unsupported(f"share={share:g} of {len(names)} nodes would be all; give a share of the requests")

    def look(self) -> Verdict | None:
        """Renew the trial on all nodes, collect the measures, and judge them.

        Nodes that have lost the trial, or joined later, serve the desired weights alone until the promotion.
        """
        plan, elapsed = self.order.plan, self._now() - self.order.weights.since
        share_of = shares(sorted(self.shares), plan.share_at(elapsed), by_nodes=plan.of == "nodes")
        for share in sorted(set(share_of.values())):
            self._renew([name for name in share_of if share_of[name] == share], share)
        if not self.shares:
            return Verdict("ended", "no node has it any more")
        if (verdict := self._judgement.verdict()) is not None:
            return Verdict(*verdict)
        if plan.is_through(elapsed):
            return Verdict("promote", f"{len(plan.steps)} steps of {plan.step_seconds:g} s")
        return None

    def _renew(self, names: Sequence[str], share: float) -> None:
        for name, answer in self._nodes.ask(names, "go_on", self.order.id, share, timeout=_ANSWER).items():
            if isinstance(answer, Measured):
                self.shares[name] = share
                self._judgement.add(answer)
            elif isinstance(answer, StageClosed) or name not in self._nodes.names():
                del self.shares[name]

    def end(self) -> None:
        """End the trial on all nodes."""
        self._nodes.ask(list(self.shares), "end_trial", self.order.id, timeout=_ANSWER)

    def report(self, outcome: str = "", reason: str = "") -> TrialReport:
        """Return the report of the trial. outcome, reason: empty while it goes on."""
        weights = self.order.weights
        judged = self._judgement.report()
        return TrialReport(
            weights_id=weights.weights_id,
            source=weights.source,
            by=weights.by,
            why=weights.why,
            since=weights.since,
            plan=self.order.plan,
            shares=dict(self.shares),
            values=judged["values"],
            promote_held=judged["promote_held"],
            skipped=judged["skipped"],
            outcome=outcome,
            reason=reason,
        )


def shares(names: Sequence[str], share: float, *, by_nodes: bool) -> dict[str, float]:
    """Return each node's share of its requests: the same for all, or `by_nodes`, 1 for the first and 0 for others."""
    if not by_nodes:
        return dict.fromkeys(names, share)
    first = math.ceil(share * len(names) - 1e-9)
    return {name: float(index < first) for index, name in enumerate(names)}
