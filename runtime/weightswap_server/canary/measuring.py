"""Measures of the answers of a canary and of the served weights, and the differences between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

import msgspec
import numpy as np

from weightswap_runtime.tensors.content import TensorBytes, as_array
from weightswap_runtime.tensors.dtypes import has_fractions, same_type

LAST = 10_000  # the latest answers of each side, which values are computed from
Outputs = Sequence[tuple[str, TensorBytes]]
MEASURED = frozenset(
    {
        *(f"{side}{name}" for side in ("", "served_") for name in ("requests", "errors", "nonfinite", "p50", "p99")),
        *("p50_ratio", "p99_ratio", "compared", "differing", "max_abs", "max_rel"),
    }
)


class Answers(msgspec.Struct, frozen=True):
    """The measures of one side since the last `take`."""

    requests: int
    errors: int
    seconds: list[float]
    failed: list[bool]
    nonfinite: list[bool]


class Compared(msgspec.Struct, frozen=True):
    """The differences since the last `take`."""

    compared: int
    skipped: int
    max_abs: float
    max_rel: float
    differing: list[bool]


class Side:
    """Measures of one set of weights. Latencies are in seconds, from a request's arrival to its answer."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self.requests = self.errors = 0
        self._seconds: deque[float] = deque(maxlen=LAST)
        self._failed: deque[bool] = deque(maxlen=LAST)
        self._nonfinite: deque[bool] = deque(maxlen=LAST)

    def answered(self, seconds: float) -> None:
        with self._lock:
            self.requests += 1
            self._seconds.append(seconds)
            self._failed.append(False)

    def failed(self) -> None:
        with self._lock:
            self.requests += 1
            self.errors += 1
            self._failed.append(True)

    def examined(self, nonfinite: bool) -> None:
        """Count an answer that was examined for NaN and infinities."""
        with self._lock:
            self._nonfinite.append(nonfinite)

    def take(self) -> Answers:
        """Return the measures, and begin anew."""
        with self._lock:
            seconds, failed, nonfinite = list(self._seconds), list(self._failed), list(self._nonfinite)
            answers = Answers(self.requests, self.errors, seconds, failed, nonfinite)
            self._begin()
        return answers

    def add(self, answers: Answers) -> None:
        """Add the measures of another process."""
        with self._lock:
            self.requests += answers.requests
            self.errors += answers.errors
            self._seconds.extend(answers.seconds)
            self._failed.extend(answers.failed)
            self._nonfinite.extend(answers.nonfinite)

    def values(self, prefix: str) -> dict[str, float | None]:
        """Return rates and latencies; a latency is None before the first answer."""
        with self._lock:
            seconds, failed, nonfinite = sorted(self._seconds), list(self._failed), list(self._nonfinite)
        return {
            f"{prefix}requests": self.requests,
            f"{prefix}errors": _rate(failed),
            f"{prefix}nonfinite": _rate(nonfinite),
            f"{prefix}p50": _quantile(seconds, 0.5),
            f"{prefix}p99": _quantile(seconds, 0.99),
        }


class Differences:
    """Differences between the answers of two sets of weights to the same requests.

    max_rel: the largest difference, relative to the largest number of the served output. differing: the share of
    answers in which that exceeds `tolerance`, or in which integers or shapes differ.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self.compared = self.skipped = 0
        self.max_abs = self.max_rel = 0.0
        self._differing: deque[bool] = deque(maxlen=LAST)

    def compare(self, served: Outputs, canary: Outputs) -> bool:
        """Compare the answers to one request. Returns True if they differ."""
        pairs = [_difference(one, other) for (_, one), (_, other) in zip(served, canary, strict=True)]
        largest = max((absolute for absolute, _ in pairs), default=0.0)
        relative = max((relative for _, relative in pairs), default=0.0)
        differs = relative > self._tolerance
        with self._lock:
            self.compared += 1
            self.max_abs, self.max_rel = max(self.max_abs, largest), max(self.max_rel, relative)
            self._differing.append(differs)
        return differs

    def skip(self) -> None:
        """Count an answer that was not examined."""
        with self._lock:
            self.skipped += 1

    def take(self) -> Compared:
        """Return the differences, and begin anew."""
        with self._lock:
            compared = Compared(self.compared, self.skipped, self.max_abs, self.max_rel, list(self._differing))
            self._begin()
        return compared

    def add(self, compared: Compared) -> None:
        """Add the differences of another process."""
        with self._lock:
            self.compared += compared.compared
            self.skipped += compared.skipped
            self.max_abs, self.max_rel = max(self.max_abs, compared.max_abs), max(self.max_rel, compared.max_rel)
            self._differing.extend(compared.differing)

    def values(self) -> dict[str, float | None]:
        with self._lock:
            any_yet = self.compared > 0
            return {
                "compared": self.compared,
                "differing": _rate(self._differing) if any_yet else None,
                "max_abs": self.max_abs if any_yet else None,
                "max_rel": self.max_rel if any_yet else None,
            }


def has_nonfinite(outputs: Outputs) -> bool:
    """Return True if an output has NaN or an infinity."""
    return any(not np.isfinite(_floats(content)).all() for _, content in outputs if has_fractions(content.dtype))


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _rate(outcomes: Sequence[bool]) -> float:
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


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
