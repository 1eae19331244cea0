"""Steps as processes, started together and ended at their time limits, with their results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from steps import Step

ROOT = Path(__file__).parents[2]
GRACE = 10.0  # seconds from the first signal to the second
TICK = 0.1
COUNTS = re.compile(
    r"^(?:=+ )?((?:\d+ \w+, )*\d+ (?:passed|failed|skipped|deselected|errors?)\b.* in [\d.]+s.*?)(?: =+)?$"
)


@dataclass
class Result:
    """State of a step. `state` begins with a word: waiting, running, passed, failed, ended, skipped."""

    step: Step
    log: Path
    state: str = "waiting"
    detail: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.state == "passed"

    def tail(self, lines: int = 40) -> str:
        """Return the last lines of the output."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Run:
    """Run of every step of a plan until `end` (of time.monotonic). The callback `changed` is called at each change."""

    groups: Sequence[Sequence[Step]]
    logs: Path
    end: float
    changed: Callable[[], None] = lambda: None
    every: float = 15.0  # seconds between two calls of `changed` while nothing ends
    results: list[Result] = field(init=False)

    def __post_init__(self) -> None:
        steps = [step for group in self.groups for step in group]
        self.results = [Result(step, self.logs / f"{step.name.replace(' ', '-')}.txt") for step in steps]

    def go(self) -> None:
        """Run group after group. The steps' processes end with this one, unless it is killed by SIGKILL."""
        waiting = iter(self.results)
        for group in self.groups:
            started: list[_Process] = []
            try:
                for result in [next(waiting) for _ in group]:
                    started += _started(result, self.end)
                self._wait(started)
            except BaseException:
                for process in started:
                    process.end("interrupted")
                self.changed()
                raise

    def _wait(self, running: list[_Process]) -> None:
        self.changed()
        reported = time.monotonic()
        while running:
            remaining = [process for process in running if not process.ended()]
            if len(remaining) < len(running) or time.monotonic() > reported + self.every:
                self.changed()
                reported = time.monotonic()
            running = remaining
            time.sleep(TICK if running else 0)


def _started(result: Result, end: float) -> list[_Process]:
    """Start a step's process. Return none if the step is skipped."""
    step = result.step
    limit = min(step.limit, end - time.monotonic() - GRACE - step.leaves)
    lacks = [name for name in step.packages if not find_spec(name)]
    lacks += [name for name in step.files if not (ROOT / name).exists()]
    if limit < 1:
        lacks = ["time"]
    if lacks:
        result.state, result.detail = "skipped", f"missing here: {', '.join(lacks)}"
        return []
    result.state = "running"
    return [_Process(result, limit)]


class _Process:
    """A step that runs, in a process group of its own."""

    def __init__(self, result: Result, limit: float) -> None:
        self._result, self._limit = result, limit
        self._start, self._interrupted_at = time.monotonic(), 0.0
        with result.log.open("wb") as log:
            self._process = subprocess.Popen(
                result.step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def ended(self) -> bool:
        """Return whether the process has ended. Interrupt it at its limit, and kill it after `GRACE`."""
        now = time.monotonic()
        self._result.seconds = now - self._start
        code = self._process.poll()
        if code is not None:
            self._signal(signal.SIGKILL)  # ends remaining processes of its group
            self._judge(code)
            return True
        if not self._interrupted_at and now > self._start + self._limit:
            self._interrupted_at = now
            self._signal(signal.SIGINT)
        elif self._interrupted_at and now > self._interrupted_at + GRACE:
            self._signal(signal.SIGKILL)
        return False

    def end(self, why: str) -> None:
        """Kill the process if it is still running."""
        if self._result.state == "running":
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._result.state, self._result.detail = "ended", why

    def _judge(self, code: int) -> None:
        result = self._result
        result.detail = counts = _test_counts(result.tail()) if result.step.tests else ""
        if self._interrupted_at:
            result.state = f"ended after {self._limit:.0f} s"
        elif result.step.tests and code in (0, 5) and not re.search(r"\b\d+ passed", counts):
            result.state, result.detail = "skipped", f"no test ran: {counts or 'none was found'}"
        else:
            result.state = "passed" if code == 0 else f"failed ({code})"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _test_counts(text: str) -> str:
    """Return pytest's last line, with the number of tests that passed, failed and were skipped."""
    lines = [match[1] for line in text.splitlines() if (match := COUNTS.match(line))]
    return lines[-1] if lines else ""
