"""Weights on trial on all nodes of a fleet, before the fleet serves them: canary, shadow, and rolling by steps.

Nothing is decided, and nothing is written: all nodes stage and verify, and let some of their requests be answered.
Whoever leads the trial renews it at each node, takes what was measured there, and judges all of it together. Where
nobody does, the nodes give it up by themselves; whoever leads next finds it in them.
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
    """What becomes of a trial: "promote", "abort", or "ended" where no node has it any more. why: in words."""

    what: str
    why: str


class FleetTrial:
    """A trial, as its leader sees it. One thread at a time."""

    def __init__(self, order: TrialOrder, nodes: Nodes, now: Callable[[], float] = time.time) -> None:
        """now: seconds since the epoch."""
        self.order = order
        self._nodes, self._now = nodes, now
        self._judged = Judgement(order.plan.judged)
        self.shares: dict[str, float] = {}

    @classmethod
    def find(cls, nodes: Nodes) -> FleetTrial | None:
        """The latest that another has begun, and nobody leads any more; earlier ones are given up.

        What it had measured begins anew.
        """
        found = nodes.ask(nodes.names(), "trial", timeout=_ANSWER)
        orders = {name: order for name, order in found.items() if isinstance(order, TrialOrder)}
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
        """Have all nodes stage and verify, and begin. Raises FleetRefused, and Unsupported for a share of the nodes
        that would be all of them; then no node has it."""
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
        """Renew it at all nodes, take what was measured, and judge it.

        A node that has lost it serves what is desired; so does one that has come since, until it is promoted.
        """
        plan, elapsed = self.order.plan, self._now() - self.order.weights.since
        wanted = shares(sorted(self.shares), plan.share_at(elapsed), by_nodes=plan.of == "nodes")
        for share in sorted(set(wanted.values())):
            self._renew([name for name, each in wanted.items() if each == share], share)
        if not self.shares:
            return Verdict("ended", "no node has it any more")
        if (said := self._judged.verdict()) is not None:
            return Verdict(*said)
        if plan.is_through(elapsed):
            return Verdict("promote", f"{len(plan.steps)} steps of {plan.step_seconds:g} s")
        return None

    def _renew(self, names: Sequence[str], share: float) -> None:
        for name, answer in self._nodes.ask(names, "go_on", self.order.id, share, timeout=_ANSWER).items():
            if isinstance(answer, Measured):
                self.shares[name] = share
                self._judged.add(answer)
            elif isinstance(answer, StageClosed) or name not in self._nodes.names():
                del self.shares[name]

    def end(self) -> None:
        """Give it up on all nodes."""
        self._nodes.ask(list(self.shares), "end_trial", self.order.id, timeout=_ANSWER)

    def report(self, outcome: str = "", reason: str = "") -> TrialReport:
        """How it stands, or has ended."""
        weights = self.order.weights
        judged = self._judged.report()
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
    """Which share of its requests each node has: the same, or all on the first of them, and none on the others."""
    if not by_nodes:
        return dict.fromkeys(names, share)
    first = math.ceil(share * len(names) - 1e-9)
    return {name: float(index < first) for index, name in enumerate(names)}
