"""Thread-safe counts of a model's calls and of the events of its weights."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from threading import RLock

from weightswap_runtime.errors import CallError
from weightswap_runtime.threads.forks import renew_in_children

from .events import Event

CALL_BUCKETS = tuple(value * 10.0**power for power in range(-5, 2) for value in (1, 2.5, 5))  # 10 us to 50 s
PAUSE_BUCKETS = tuple(value * 10.0**power for power in range(-7, 2) for value in (1, 2.5, 5))  # 100 ns to 50 s
_ENDINGS = {"committed": "committed", "rolled back": "committed", "cancelled": "cancelled", "discarded": "discarded"}


class Distribution:
    """A histogram of seconds. `bounds` are the inclusive upper ends of its buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs (upper end as a text, count of values up to it); the last is for +Inf."""
        ends = [*(f"{bound:.10g}" for bound in self.bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))


class Tallies:
    """Counters that `on_call` and `on_event` update. Readers hold `lock`, and may delay a call by that."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (method, outcome)
        self.latencies: dict[str, Distribution] = {}  # by method
        self.swaps: Counter[tuple[str, str]] = Counter()  # (operation, outcome)
        self.failures: Counter[str] = Counter()  # by error class
        self.skipped = 0
        self.staged_bytes = 0
        self.stagings = 0
        self.seconds_staged = 0.0
        self.seconds_verified = 0.0
        self.pauses = Distribution(PAUSE_BUCKETS)
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        self.lock = RLock()  # reentrant: a signal handler may call the model while this thread holds it

    def on_call(self, method: str, seconds: float, error: BaseException | None) -> None:
        outcome = "ok" if error is None else "refused" if isinstance(error, CallError) else "failed"
        with self.lock:
            self.calls[method, outcome] += 1
            if error is None:
                if method not in self.latencies:
                    self.latencies[method] = Distribution(CALL_BUCKETS)
                self.latencies[method].observe(seconds)

    def on_event(self, event: Event) -> None:
        outcome = _outcome(event)
        with self.lock:
            if outcome is not None:
                self.swaps[event.operation or "unknown", outcome] += 1
            if event.kind in ("refused", "failed", "unreachable"):
                self.failures[type(event.error).__name__] += 1
            if event.kind in ("staged", "refused", "cancelled"):
                self.staged_bytes += event.nbytes
            if event.kind == "staged":
                self._count_phases(event)
            if event.receipt is not None:
                self.pauses.observe(event.receipt.seconds_paused)
            self.skipped += event.kind == "skipped"

    def _count_phases(self, event: Event) -> None:
        self.stagings += 1
        self.seconds_staged += event.seconds_staged
        self.seconds_verified += event.seconds_verified


def _outcome(event: Event) -> str | None:
    """Return the outcome of the staging or rollback that this event ends. A refused commit does not end its staging."""
    if event.kind in ("refused", "failed"):
        is_end = event.phase != "committing" or event.operation == "rollback"
        return event.kind if is_end else None
    return _ENDINGS.get(event.kind)
