"""One canary: which requests it answers, what is measured of it, and what its rules say."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weightswap_runtime.errors import StageClosed, Unsupported
from weightswap_server.errors import log
from weightswap_server.methods import Flat, Method
from weightswap_server.protocol.tensors_on_the_wire import Answer

from .measuring import MEASURED, Answers, Compared, Differences, Side, has_nonfinite, ratio
from .rule import Rule

if TYPE_CHECKING:
    from weightswap_runtime.live.staged import Staged
    from weightswap_runtime.shared.trial import Trial

HEADER = "x-weightswap-canary"
DEFAULT_ABORT = "errors > served_errors + 0.01 or nonfinite > served_nonfinite + 0.01"
_WAITING = 8  # answers that wait to be looked through, or compared; more are left out
_LOOK = 0.1


class Plan(NamedTuple):
    """share: of the requests that the canary answers; others may ask for it. shadow: call it beside each request that
    it does not answer, and compare. tolerance: which relative difference makes answers differ. Rules may be empty."""

    share: float = 0.0
    shadow: bool = False
    tolerance: float = 0.01
    promote_if: str = ""
    abort_if: str = DEFAULT_ABORT


def check_plan(plan: Plan) -> None:
    """Raise Unsupported for what cannot be meant."""
    if not 0 <= plan.share <= 1:
        raise Unsupported(f"share={plan.share}: expected 0 to 1")
    for rule in (plan.promote_if, plan.abort_if):
        if rule:
            Rule(rule, MEASURED)


class Measured(msgspec.Struct, frozen=True):
    """What one process has measured of a canary."""

    served: Answers
    canary: Answers
    differences: Compared


class Canary:
    """Staged weights that answer some requests. Its errors are nobody else's: the served weights answer, then."""

    def __init__(self, staged: Staged | Trial, plan: Plan, tell: Callable[[str, str], None]) -> None:
        """staged: in a worker, the trial of what its keeper has staged.

        tell: called with "errors", "compared" or "differing" and the weights id, for metrics. Raises Unsupported.
        """
        check_plan(plan)
        self.staged, self.plan = staged, plan
        self.weights_id = staged.weights_id
        self.since = time.time()
        self.served, self.canary, self.differences = Side(), Side(), Differences(plan.tolerance)
        self.promote = Rule(plan.promote_if, MEASURED) if plan.promote_if else None
        self.abort = Rule(plan.abort_if, MEASURED) if plan.abort_if else None
        self._tell = tell
        self._owed = 0.0
        self._counting = Lock()
        self._waiting: deque[tuple[Method, Flat, Answer, bool]] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._look_through, name="weightswap-canary", daemon=True)
        self._thread.start()

    def answers_next(self, wish: str) -> bool:
        """Whether a request is the canary's. wish: "1" where it asks for it, "0" where it does not want it."""
        if self._closed or wish in ("0", "1"):
            return wish == "1" and not self._closed
        with self._counting:
            self._owed += self.plan.share
            if self._owed < 1:
                return False
            self._owed -= 1
            return True

    def answered(self, method: Method, flat: Flat, answer: Answer, seconds: float, *, by_canary: bool) -> None:
        """Note an answer of the canary, or of the served weights. It takes no longer than a line of a log."""
        (self.canary if by_canary else self.served).answered(seconds)
        with self._changed:
            if len(self._waiting) >= _WAITING:
                self.differences.skip()
            elif not self._closed:
                self._waiting.append((method, flat, answer, by_canary))
                self._changed.notify()

    def failed(self, error: BaseException, requests: int = 1) -> None:
        """Note that the canary has not answered; where it has just ended, that is nothing."""
        if not isinstance(error, StageClosed):
            for _ in range(requests):
                self.canary.failed()
                self._tell("errors", self.weights_id)
            log.warning("the canary %s has failed, and the served weights answer: %s", self.weights_id[:12], error)

    def take(self) -> Measured:
        """What was measured since the last time, for another process's canary of the same weights."""
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

    def close(self) -> None:
        """Answer nothing, and compare nothing, from now on."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _look_through(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                work = self._waiting.popleft()
            try:
                self._look_at(*work)
            except StageClosed:
                return
            except Exception as error:
                self.failed(error)
            del work  # a queue that stays empty keeps no tensors

    def _look_at(self, method: Method, flat: Flat, answer: Answer, by_canary: bool) -> None:
        (self.canary if by_canary else self.served).looked_at(has_nonfinite(answer.outputs))
        if by_canary or not self.plan.shadow:
            return
        began = time.perf_counter()
        outputs = method.call(self.staged, flat)
        if not self.plan.share:  # its only answers
            self.canary.answered(time.perf_counter() - began)
        self.canary.looked_at(has_nonfinite(outputs))
        self._tell("compared", self.weights_id)
        if self.differences.compare(answer.outputs, outputs):
            self._tell("differing", self.weights_id)


def report(canary: Canary) -> dict[str, Any]:
    """What is to be known of it, as plain values."""
    now = time.monotonic()
    return {
        "weights_id": canary.weights_id,
        "since": canary.since,
        **canary.plan._asdict(),
        "promote_held": canary.promote.held_for(now) if canary.promote else 0.0,
        "skipped": canary.differences.skipped,
        "values": canary.values(),
    }
