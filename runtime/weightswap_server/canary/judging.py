"""The judgement of a canary: rules over its measures, from one process or several."""

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
    """share: the part of the requests that the canary answers; more may ask for it. shadow: call it beside each request
    that it does not answer, and compare. tolerance: the relative difference above which answers differ. promote_if,
    abort_if: rules, or ""."""

    share: float = 0.0
    shadow: bool = False
    tolerance: float = 0.01
    promote_if: str = ""
    abort_if: str = DEFAULT_ABORT


def check_plan(plan: CanaryPlan) -> None:
    """Raise Unsupported for values out of range, and for wrong rules."""
    if not 0 <= plan.share <= 1:
        raise Unsupported(f"share={plan.share}: expected a number from 0 to 1")
    if not 0 <= plan.tolerance < math.inf:
        raise Unsupported(f"tolerance={plan.tolerance}: expected a relative difference, 0 or more")
    for rule in (plan.promote_if, plan.abort_if):
        if rule:
            Rule(rule, MEASURED)


class Measured(msgspec.Struct, frozen=True):
    """The measures of a canary in one process."""

    served: Answers
    canary: Answers
    differences: Compared


class Judgement:
    """Measures of a canary and of the weights served beside it, with the rules over them."""

    def __init__(self, plan: CanaryPlan) -> None:
        """Raises as `check_plan`."""
        check_plan(plan)
        self.plan = plan
        self.served, self.canary, self.differences = Side(), Side(), Differences(plan.tolerance)
        self.promote = Rule(plan.promote_if, MEASURED) if plan.promote_if else None
        self.abort = Rule(plan.abort_if, MEASURED) if plan.abort_if else None

    def take(self) -> Measured:
        """Return the measures since the last call, for another process that judges the same weights."""
        return Measured(self.served.take(), self.canary.take(), self.differences.take())

    def add(self, measured: Measured) -> None:
        """Add the measures of another process."""
        self.served.add(measured.served)
        self.canary.add(measured.canary)
        self.differences.add(measured.differences)

    def values(self) -> dict[str, float | None]:
        """Return the measures by the names that rules use."""
        values = self.canary.values("") | self.served.values("served_") | self.differences.values()
        values["p50_ratio"] = ratio(values["p50"], values["served_p50"])
        values["p99_ratio"] = ratio(values["p99"], values["served_p99"])
        return values

    def verdict(self) -> tuple[str, str] | None:
        """Return "abort" or "promote" with the rule that holds, or None."""
        values, now = self.values(), time.monotonic()
        for name, rule in (("abort", self.abort), ("promote", self.promote)):
            if rule is not None and rule.holds(values, now):
                return name, rule.text
        return None

    def report(self) -> dict[str, Any]:
        """Return the plan and the measures as plain values."""
        return {
            **self.plan._asdict(),
            "promote_held": self.promote.held_for(time.monotonic()) if self.promote else 0.0,
            "skipped": self.differences.skipped,
            "values": self.values(),
        }
