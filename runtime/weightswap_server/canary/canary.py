"""One canary: its share of the requests, and the examination of its answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING

from weightswap_runtime.errors import StageClosed
from weightswap_runtime.live.variants.resident import VariantNames
from weightswap_server.errors import log
from weightswap_server.methods import Flat, ServedMethod
from weightswap_server.protocol.tensors_on_the_wire import Answer

from .judging import CanaryPlan, Judgement
from .measuring import has_nonfinite

if TYPE_CHECKING:
    from weightswap_runtime.live.staged import Staged
    from weightswap_runtime.shared.worker import Trial

HEADER = "x-weightswap-canary"
_MOST_WAITING = 8  # answers that wait to be examined; more are skipped


class Canary(Judgement):
    """Staged weights that answer some requests. If they fail, the served weights answer instead."""

    def __init__(self, staged: Staged | Trial, plan: CanaryPlan, count: Callable[[str, str], None]) -> None:
        """staged: in a worker, the trial of the weights that its keeper has staged.

        count: called with "errors", "compared" or "differing" and the weights id, for metrics. Raises Unsupported.
        """
        super().__init__(plan)
        self.staged = staged
        self.weights_id = staged.weights_id
        self.since = time.time()
        self._count = count
        self._owed = 0.0
        self._counting = Lock()
        self._waiting: deque[tuple[ServedMethod, Flat, VariantNames, Answer, bool]] = deque()
        self._changed = Condition()
        self._closed = False
        Thread(target=self._examine_waiting, name="weightswap-canary", daemon=True).start()

    def answers_next(self, wish: str) -> bool:
        """True if the canary answers the next request. wish: "1" asks for the canary, "0" for the served weights."""
        if self._closed or wish in ("0", "1"):
            return wish == "1" and not self._closed
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
        (self.canary if by_canary else self.served).answered(seconds)
        with self._changed:
            if len(self._waiting) >= _MOST_WAITING:
                self.differences.skip()
            elif not self._closed:
                self._waiting.append((method, flat, variants, answer, by_canary))
                self._changed.notify()

    def failed(self, error: BaseException, requests: int = 1) -> None:
        """Count requests that the canary has failed to answer, unless it has just ended."""
        if not isinstance(error, StageClosed):
            for _ in range(requests):
                self.canary.failed()
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
            except Exception as error:
                self.failed(error)
            del work  # or its tensors would stay alive while the queue is empty

    def _examine(
        self, method: ServedMethod, flat: Flat, variants: VariantNames, answer: Answer, by_canary: bool
    ) -> None:
        (self.canary if by_canary else self.served).examined(has_nonfinite(answer.outputs))
        if by_canary or not self.plan.shadow:
            return
        began = time.perf_counter()
        outputs = method.call(self.staged, flat, variants)
        if not self.plan.share:  # it has no other answers to measure
            self.canary.answered(time.perf_counter() - began)
        self.canary.examined(has_nonfinite(outputs))
        self._count("compared", self.weights_id)
        if self.differences.compare(answer.outputs, outputs):
            self._count("differing", self.weights_id)
