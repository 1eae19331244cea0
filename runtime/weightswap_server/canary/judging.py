"""Rules over what is measured of weights on trial, in one process or in several."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import msgspec

from weightswap_runtime.errors import Unsupported

from .measuring import MEASURED, Answers, Compared, Differences, Side, ratio
from .rule import Rule

DEFAULT_ABORT = "errors > served_errors + 0.01 or nonfinite > served_nonfinite + 0.01"


class CanaryPlan(NamedTuple):
    """share: of the requests that the canary answers; others may ask for it. shadow: call it beside each request that
    it does not answer, and compare. tolerance: which relative difference makes answers differ. Rules may be empty."""

    share: float = 0.0
    shadow: bool = False
    tolerance: float = 0.01
    promote_if: str = ""
    abort_if: str = DEFAULT_ABORT


def check_plan(plan: CanaryPlan) -> None:
    """Raise Unsupported for what cannot be meant."""
    if not 0 <= plan.share <= 1:
        raise Unsupported(f"share={plan.share}: expected 0 to 1")
    if not 0 <= plan.tolerance < math.inf:
        raise Unsupported(f"tolerance={plan.tolerance}: expected a relative difference, 0 or more")
    for rule in (plan.promote_if, plan.abort_if):
        if rule:
            Rule(rule, MEASURED)


class Measured(msgspec.Struct, frozen=True):
    """What one process has measured of a canary."""

    served: Answers
    canary: Answers
    differences: Compared


class Judgement:
    """What was measured of weights on trial, and of those that are served beside them."""

    def __init__(self, plan: CanaryPlan) -> None:
        """Raises Unsupported for a plan that cannot be meant."""
        check_plan(plan)
        self.plan = plan
        self.served, self.canary, self.differences = Side(), Side(), Differences(plan.tolerance)
        self.promote = Rule(plan.promote_if, MEASURED) if plan.promote_if else None
        self.abort = Rule(plan.abort_if, MEASURED) if plan.abort_if else None

    def take(self) -> Measured:
        """What was measured since the last time, for another process that judges the same weights."""
        return Measured(self.served.take(), self.canary.take(), self.differences.take())

    def add(self, taken: Measured) -> None:
        """Count what another process has measured."""
        self.served.add(taken.served)
        self.canary.add(taken.canary)
        self.differences.add(taken.differences)

    def values(self) -> dict[str, float | None]:
        """What rules are about."""
        found = self.canary.values("") | self.served.values("served_") | self.differences.values()
        found["p50_ratio"] = ratio(found["p50"], found["served_p50"])
        found["p99_ratio"] = ratio(found["p99"], found["served_p99"])
        return found

    def verdict(self) -> tuple[str, str] | None:
        """ "abort" or "promote", and the rule that says so."""
        values, now = self.values(), time.monotonic()
        for name, rule in (("abort", self.abort), ("promote", self.promote)):
            if rule is not None and rule.holds(values, now):
                return name, rule.text
        return None

    def report(self) -> dict[str, Any]:
        """What is to be known of it, as plain values."""
        return {
            **self.plan._asdict(),
            "promote_held": self.promote.held_for(time.monotonic()) if self.promote else 0.0,
            "skipped": self.differences.skipped,
            "values": self.values(),
        }
