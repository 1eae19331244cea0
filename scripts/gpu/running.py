"""Steps as processes: started in groups, ended at their time limits, judged by their exit codes and tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import outcomes
from steps import NO_GPU, Step

ROOT = Path(__file__).parents[2]
GRACE = 10.0  # seconds from the first signal to the second: pytest needs some to end a test that waits for the device
TICK = 0.1
MORTAL = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()  # it ends with a run that is killed
LEAST = 1.0  # seconds between two reports
NOT_REACHED, LEFT_OUT = "not reached", "left out"


@dataclass
class Result:
    """State of a step, and why: not reached, running, passed, failed, ended, skipped or left out."""

    step: Step
    log: Path
    state: str = NOT_REACHED
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.state in ("passed", LEFT_OUT)

    @property
    def outcomes_file(self) -> Path:
        return self.log.with_suffix(".outcomes")

    @property
    def outcomes(self) -> outcomes.Outcomes:
        return outcomes.read(self.outcomes_file)

    def tail(self, lines: int = 40) -> str:
        """Return the last lines of the output."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Run:
    """Run of every step of a plan until `end` (of time.monotonic). `report` is called whenever there is more to tell.

    The steps' output is in the folder `logs`, their figures are files in the folder `out`.
    """

    groups: Sequence[Sequence[Step]]
    logs: Path
    out: Path
    end: float
    report: Callable[[], None] = lambda: None
    results: list[Result] = field(init=False)

    def __post_init__(self) -> None:
        steps = [step for group in self.groups for step in group]
        self.results = [Result(step, self.logs / f"{step.name.replace(' ', '-')}.txt") for step in steps]
        self._reported, self._told = 0.0, ""

    def go(self) -> None:
        """Run group after group. The steps' processes end with this one."""
        waiting = iter(self.results)
        for group in self.groups:
            processes: list[_Process] = []
            try:
                for result in [next(waiting) for _ in group]:
                    processes += _started(result, self.end)
                self._wait(processes)
            except BaseException:
                for process in processes:
                    process.kill()
                raise
            if any(process.code == NO_GPU for process in processes):
                return

    def _wait(self, running: list[_Process]) -> None:
        while running := [process for process in running if not process.ended()]:
            self._tell()
            time.sleep(TICK)
        self.report()

    def _tell(self) -> None:
        """Report if anything has been written since the last report."""
        files = [path for result in self.results for path in (result.log, result.outcomes_file)]
        files += sorted(self.out.glob("*.json"))
        told = repr([(result.state, result.detail) for result in self.results] + [_stamp(path) for path in files])
        if told != self._told and time.monotonic() > self._reported + LEAST:
            self.report()
            self._told, self._reported = told, time.monotonic()


def _stamp(path: Path) -> tuple[int, int]:
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)


def _started(result: Result, end: float) -> list[_Process]:
    """Start a step's process. Return none if the step is not run."""
    step = result.step
    if lacks := list(_missing(step.only_with)):
        result.state, result.detail = LEFT_OUT, f"needs {', '.join(lacks)}"
        return []
    if lacks := list(_missing(step.needs)):
        result.state, result.detail = "skipped", f"missing here: {', '.join(lacks)}"
        return []
    limit = min(step.limit, end - time.monotonic() - GRACE)
    if limit < 1:
        result.detail = "no time was left"
        return []
    result.state = "running"
    return [_Process(result, limit)]


def _missing(needs: Iterable[str]) -> Iterable[str]:
    """Yield the files, and the distributions with their least versions, that are not here."""
    invalidate_caches()  # some are installed while this runs
    for need in needs:
        name, _, least = need.partition(">=")
        try:
            here = Path(name).exists() if "/" in name else _numbers(version(name)) >= _numbers(least or "0")
        except PackageNotFoundError:
            here = False
        if not here:
            yield need


def _numbers(text: str) -> list[int]:
    """Return the first two numbers of a version."""
    return [int(part) for part in text.split(".")[:2] if part.isdigit()]


class _Process:
    """A step that runs, in a process group of its own."""

    def __init__(self, result: Result, limit: float) -> None:
        self._result, self._limit = result, limit
        self._start, self._interrupted_at = time.monotonic(), 0.0
        environment = os.environ | {"OUTCOMES": str(result.outcomes_file)}
        with result.log.open("wb") as log:
            self._process = subprocess.Popen(
                (*MORTAL, *result.step.command),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def ended(self) -> bool:
        """Return whether the process has ended. Interrupt it at its limit, and kill it after `GRACE`."""
        now = time.monotonic()
        self._result.seconds = now - self._start
        if self.code is not None:
            self._signal(signal.SIGKILL)  # ends remaining processes of its group
            self._judge(self.code)
            return True
        if not self._interrupted_at and now > self._start + self._limit:
            self._interrupted_at = now
            self._signal(signal.SIGINT)
        elif self._interrupted_at and now > self._interrupted_at + GRACE:
            self._signal(signal.SIGKILL)
        return False

    def kill(self) -> None:
        """End the process if it is still running."""
        if self._result.state == "running":
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._result.state, self._result.detail = "ended", "with the run"

    def _judge(self, code: int) -> None:
        """Judge what was proven before the time that it took: a process that hangs at its end has passed its tests."""
        result, found = self._result, self._result.outcomes
        late = f"after {self._limit:.0f} s" if self._interrupted_at else ""
        proven = bool(found.passed) and not found.failed and not found.missing
        if result.step.tests and code in (0, 5) and not found.passed:
            result.state, result.detail = "skipped", "no test ran"
        elif code == 0 or (late and result.step.tests and proven):
            result.state, result.detail = "passed", late and f"its process was ended {late}"
        elif late:
            result.state, result.detail = "ended", late
        else:
            result.state, result.detail = "failed", f"exit code {code}"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
