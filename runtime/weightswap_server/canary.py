"""A canary: staged weights that answer a share of the requests, and are compared with those that are served.

Both sides are measured; rules over the measures say when the canary is promoted, or aborted. In several processes each
takes its measures and sends them to the one that judges.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from weightswap_runtime.errors import StageClosed, UnknownName, Unsupported, duration, percent
from weightswap_runtime.format.expressions import parse_rule
from weightswap_runtime.live.variants import Choice, VariantNames
from weightswap_runtime.tensors import TensorBytes, as_array, has_fractions, same_type

from .errors import NotInJson, log
from .methods import Flat, Outputs, ServedMethod
from .protocol import Answer, write_variants

if TYPE_CHECKING:
    from weightswap_runtime.live.staged import Staged
    from weightswap_runtime.shared.worker import Trial


HEADER = "x-weightswap-canary"  # of a request: "1" asks for the canary, "0" for the served weights
LAST = 10_000  # the latest answers of each side, which values are computed from
DEFAULT_ABORT = "errors > served_errors + 0.01 or nonfinite > served_nonfinite + 0.01"
MEASURED = frozenset(
    {
        *(f"{side}{name}" for side in ("", "served_") for name in ("requests", "errors", "nonfinite", "p50", "p99")),
        *("p50_ratio", "p99_ratio", "compared", "differing", "max_abs", "max_rel"),
    }
)
_RATES = frozenset({"errors", "nonfinite", "differing", "max_rel"})
_MOST_WAITING = 8  # answers that wait to be examined; more are skipped, as each keeps its tensors alive


class CanaryPlan(NamedTuple):
    """What a canary answers, and what is done with it."""

    share: float = 0.0  # the part of the requests that it answers; more may ask for it
    shadow: bool = False  # call it beside each request that it does not answer, and compare
    tolerance: float = 0.01  # the relative difference above which answers differ
    promote_if: str = ""  # a rule, or ""
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


class Rule:
    """A rule such as `errors < 0.001 and p99_ratio < 1.1 for 5 min`: it holds once the condition was true at each check
    for that long. A condition on a value that is not measured yet is false."""

    def __init__(self, text: str, known: frozenset[str]) -> None:
        """known: the names that it may use. Raises Unsupported."""
        self.text = text
        try:
            self._condition, self.seconds = parse_rule(text)
        except ValueError as error:
            raise Unsupported(f"the rule {text!r}: {error}; expected e.g. `errors < 0.001 for 5 min`") from error
        self._names = self._condition.names
        if unknown := sorted(self._names - known):
            raise Unsupported(f"the rule {text!r}: {unknown[0]} is not measured; there are: {', '.join(sorted(known))}")
        self._since: float | None = None

    def held_for(self, now: float) -> float:
        """Return the seconds for which the condition has been true at each check."""
        return 0.0 if self._since is None else now - self._since

    def holds(self, values: Mapping[str, float | None], now: float) -> bool:
        """Check the condition once. now: seconds of a monotonic clock."""
        measured = {name: value for name, value in values.items() if value is not None and name in self._names}
        if measured.keys() != self._names or not self._condition.holds(measured):
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.seconds


class CanaryAnalysis:
    """Measures of a canary and of the weights served beside it, with the rules over them."""

    def __init__(self, plan: CanaryPlan) -> None:
        """Raises as `check_plan`."""
        check_plan(plan)
        self.plan = plan
        self.promote = Rule(plan.promote_if, MEASURED) if plan.promote_if else None
        self.abort = Rule(plan.abort_if, MEASURED) if plan.abort_if else None
        self._measured, self._lock = Measured(), Lock()

    def drain(self) -> Measured:
        """Return the measures since the last call, for another process that judges the same weights."""
        with self._lock:
            drained, self._measured = self._measured, Measured()
        return drained

    def add(self, measured: Measured) -> None:
        """Add measures, which may be those of another process."""
        with self._lock:
            self._measured.served.add(measured.served)
            self._measured.canary.add(measured.canary)
            self._measured.differences.add(measured.differences)

    def values(self) -> dict[str, float | None]:
        """Return the measures by the names that rules use."""
        with self._lock:
            measured = self._measured
            values = measured.canary.values("") | measured.served.values("served_") | measured.differences.values()
        values["p50_ratio"] = _ratio(values["p50"], values["served_p50"])
        values["p99_ratio"] = _ratio(values["p99"], values["served_p99"])
        return values

    def verdict(self) -> tuple[str, str] | None:
        """Return "abort" or "promote" with the rule that holds, or None."""
        values, now = self.values(), time.monotonic()
        # what fails from the first request on has no rate of other answers, and is aborted nevertheless
        rates = {
            name: values[name] or 0.0 for name in values if name.removeprefix("served_") in ("errors", "nonfinite")
        }
        for name, rule, given in (("abort", self.abort, values | rates), ("promote", self.promote, values)):
            if rule is not None and rule.holds(given, now):
                return name, rule.text
        return None

    def report(self) -> dict[str, Any]:
        """Return the plan and the measures as plain values."""
        return {
            **self.plan._asdict(),
            "promote_held": self.promote.held_for(time.monotonic()) if self.promote else 0.0,
            "skipped": self._measured.differences.skipped,
            "values": self.values(),
        }


class Canary(CanaryAnalysis):
    """Staged weights that answer some requests. If they fail, the served weights answer instead."""

    def __init__(
        self,
        staged: Staged | Trial,
        plan: CanaryPlan,
        count: Callable[[str, str], None],
        choose: Callable[[VariantNames], Choice],
    ) -> None:
        """staged: in a worker, the trial of the weights that its owner has staged.

        count: called with "errors", "compared" or "differing" and the weights id, for metrics. choose: returns the
        variants that names choose now. Raises Unsupported.
        """
        super().__init__(plan)
        self.staged = staged
        self.weights_id = staged.weights_id
        self.since = time.time()
        self._count, self._choose = count, choose
        self._owed = 0.0
        self._counting = Lock()
        self._waiting: deque[tuple[ServedMethod, Flat, VariantNames, Answer, bool]] = deque()
        self._changed = Condition()
        self._closed = False
        Thread(target=self._examine_waiting, name="weightswap-canary", daemon=True).start()

    def answers_next(self, routing: str) -> bool:
        """True if the canary answers the next request. routing: "1" asks for the canary, "0" for the served weights."""
        if self._closed or routing in ("0", "1"):
            return routing == "1" and not self._closed
        with self._counting:
            self._owed += self.plan.share
            if self._owed < 1:
                return False
            self._owed -= 1
            return True

    def answered(
        self,
        method: ServedMethod,
        flat: Flat,
        variants: VariantNames,
        answer: Answer,
        seconds: float,
        *,
        by_canary: bool,
    ) -> None:
        """Count an answer of the canary or of the served weights, and queue it to be examined in another thread."""
        self.add(_of_side(by_canary, Side(requests=1, seconds=[seconds], failed=[False])))
        with self._changed:
            if len(self._waiting) >= _MOST_WAITING:
                self._skipped()
            elif not self._closed:
                self._waiting.append((method, flat, variants, answer, by_canary))
                self._changed.notify()

    def failed(self, error: BaseException, requests: int = 1) -> None:
        """Count requests that the canary has failed to answer, unless it has just ended."""
        if not isinstance(error, StageClosed):
            failed = failures(requests)
            failed.nonfinite = [True] * requests if isinstance(error, NotInJson) else []
            self.add(Measured(canary=failed))
            for _ in range(requests):
                self._count("errors", self.weights_id)
            log.warning("the canary %s failed, so the served weights answer: %s", self.weights_id[:12], error)

    def close(self) -> None:
        """Stop answering and comparing."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _examine_waiting(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                work = self._waiting.popleft()
            try:
                self._examine(*work)
            except StageClosed:
                return
            except UnknownName:  # of a variant that was removed since its request was answered
                self._skipped()
            except Exception as error:
                self.failed(error)
            del work  # or its tensors would stay alive while the queue is empty

    def _skipped(self) -> None:
        self.add(Measured(differences=Differences(skipped=1)))

    def _examine(
        self, method: ServedMethod, flat: Flat, variants: VariantNames, answer: Answer, by_canary: bool
    ) -> None:
        self.add(_of_side(by_canary, Side(nonfinite=[has_nonfinite(answer.outputs)])))
        if by_canary or not self.plan.shadow:
            return
        choice = self._choose(variants) if variants else None
        if choice is not None and write_variants(choice.ids) != answer.variant:
            self._skipped()  # another variant has got the name since the request was answered
            return
        began = time.perf_counter()
        outputs = method.call(self.staged, flat, choice)
        seconds = time.perf_counter() - began
        tried = Side(nonfinite=[has_nonfinite(outputs)])
        if not self.plan.share:  # it has no other answers to measure
            tried.add(Side(requests=1, seconds=[seconds], failed=[False]))
        differences = compare(answer.outputs, outputs, self.plan.tolerance)
        self.add(Measured(canary=tried, differences=differences))
        self._count("compared", self.weights_id)
        if any(differences.differing):
            self._count("differing", self.weights_id)


class Side(msgspec.Struct):
    """Measures of one set of weights. Latencies are in seconds, from a request's arrival to its answer."""

    requests: int = 0
    seconds: list[float] = []
    failed: list[bool] = []  # for each request
    nonfinite: list[bool] = []  # for each answer that was examined for NaN and infinities

    def add(self, other: Side) -> None:
        self.requests += other.requests
        _extend(self.seconds, other.seconds)
        _extend(self.failed, other.failed)
        _extend(self.nonfinite, other.nonfinite)

    def values(self, prefix: str) -> dict[str, float | None]:
        """Return rates and latencies; None before the first answer."""
        seconds = sorted(self.seconds)
        return {
            f"{prefix}requests": self.requests,
            f"{prefix}errors": _rate(self.failed),
            f"{prefix}nonfinite": _rate(self.nonfinite),
            f"{prefix}p50": _quantile(seconds, 0.5),
            f"{prefix}p99": _quantile(seconds, 0.99),
        }


class Differences(msgspec.Struct):
    """Differences between the answers of two sets of weights to the same requests."""

    compared: int = 0
    skipped: int = 0  # answers that were not examined
    max_abs: float = 0.0
    max_rel: float = 0.0  # the largest difference, relative to the largest number of the served output
    differing: list[bool] = []  # for each comparison: max_rel above the tolerance, or other integers or shapes

    def add(self, other: Differences) -> None:
        self.compared += other.compared
        self.skipped += other.skipped
        self.max_abs, self.max_rel = max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel)
        _extend(self.differing, other.differing)

    def values(self) -> dict[str, float | None]:
        return {
            "compared": self.compared,
            "differing": _rate(self.differing),
            "max_abs": self.max_abs if self.compared else None,
            "max_rel": self.max_rel if self.compared else None,
        }


class Measured(msgspec.Struct, frozen=True):
    """The measures of a canary in one process."""

    served: Side = msgspec.field(default_factory=Side)
    canary: Side = msgspec.field(default_factory=Side)
    differences: Differences = msgspec.field(default_factory=Differences)


def failures(requests: int) -> Side:
    """Return the measures of requests that were not answered."""
    return Side(requests=requests, failed=[True] * requests)


def compare(served: Outputs, canary: Outputs, tolerance: float) -> Differences:
    """Compare the answers to one request. tolerance: of the relative difference."""
    pairs = [_difference(one, other) for (_, one), (_, other) in zip(served, canary, strict=True)]
    largest = max((absolute for absolute, _ in pairs), default=0.0)
    relative = max((relative for _, relative in pairs), default=0.0)
    return Differences(compared=1, max_abs=largest, max_rel=relative, differing=[relative > tolerance])


def has_nonfinite(outputs: Outputs) -> bool:
    """Return True if an output has NaN or an infinity."""
    return any(not np.isfinite(_floats(content)).all() for _, content in outputs if has_fractions(content.dtype))


def measure_text(name: str, value: float) -> str:
    """Return a measure as text, by the name that rules use: rates in per cent, times with their unit."""
    measure = name.removeprefix("served_")
    if measure in _RATES:
        return percent(value)
    return duration(value) if measure in ("p50", "p99") else f"{value:.4g}"


def _of_side(by_canary: bool, side: Side) -> Measured:
    return Measured(canary=side) if by_canary else Measured(served=side)


def _extend(kept: list[Any], more: list[Any]) -> None:
    kept += more
    del kept[:-LAST]


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _rate(outcomes: Sequence[bool]) -> float | None:
    return sum(outcomes) / len(outcomes) if outcomes else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _floats(content: TensorBytes) -> np.ndarray:
    array = as_array(content)
    return array if array.dtype.itemsize >= 4 else array.astype(np.float32)


def _difference(one: TensorBytes, other: TensorBytes) -> tuple[float, float]:
    """Return the largest difference, absolute and relative to the largest number of `one`; inf if not comparable."""
    if not same_type(one, other):
        return float("inf"), float("inf")
    first, second = as_array(one), as_array(other)
    if not has_fractions(one.dtype):
        return (0.0, 0.0) if np.array_equal(first, second) else (1.0, float("inf"))
    first, second = _floats(one).astype(np.float64), _floats(other).astype(np.float64)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(first - second))
    largest = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
    scale = float(np.abs(first, where=np.isfinite(first), out=np.zeros_like(first)).max(initial=0.0))
    return largest, 0.0 if largest == 0 else largest / scale if scale else float("inf")
