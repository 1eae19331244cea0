"""`python -m tests.fuzzing INPUTS`: mutated files against the readers. See docs/fuzzing.md."""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzzing.subjects import Readers, Subject
from tests.support.varied import small_blocks
from weightswap_runtime import WeightswapError

SECONDS = 1.0  # of the processor, for one input
TRACED = 20.0  # the same while lines are traced
MEMORY = 200 << 20  # bytes that the readers may take beside what the process has
CHECK_EVERY = 1000
PACKAGE = str(Path(sys.modules["weightswap_runtime"].__path__[0]))


class Hang(BaseException):
    """An input took too long."""


class Coverage:
    """Which lines of the runtime follow which, in the calling thread."""

    def __init__(self) -> None:
        self._seen: set[tuple[CodeType, int, int]] = set()
        self._last: dict[FrameType, int] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def new(self, call: Callable[[], None]) -> bool:
        """Call; whether a step was taken that no call before has taken."""
        before = len(self._seen)
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)
            self._last.clear()
        return len(self._seen) > before

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._seen.add((frame.f_code, self._last.get(frame, 0), frame.f_lineno))
        self._last[frame] = frame.f_lineno
        return self._step


class Run:
    """Feeds inputs to the subjects in turn, and keeps what must not happen."""

    def __init__(self, readers: Readers, seed: int, coverage: Coverage | None, keep: Path) -> None:
        self._readers = readers
        self._choose = random.Random(seed)
        self._coverage = coverage
        self._keep = keep
        self._corpus = {subject.name: list(subject.seeds) for subject in readers.subjects}
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.findings = 0
        self.slowest = 0.0

    def seeds(self) -> None:
        """What is mutated is accepted as it is."""
        for subject in self._readers.subjects:
            subject.read(subject.seeds[0])

    def inputs(self, count: int) -> None:
        for number in range(count):
            subject = self._readers.subjects[number % len(self._readers.subjects)]
            corpus = self._corpus[subject.name]
            raw = subject.mutated(self._choose, corpus)
            if self._coverage is None:
                self._one(subject, raw)
            elif self._coverage.new(lambda subject=subject, raw=raw: self._one(subject, raw)):  # type: ignore[misc]
                corpus.append(raw)
            if number % CHECK_EVERY == 0 or number == count - 1:
                assert self._readers.whole(), "a model has changed"

    def _one(self, subject: Subject, raw: bytes) -> None:
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS if self._coverage is None else TRACED)
        try:
            subject.read(raw)
            outcome = "accepted"
        except WeightswapError as error:
            outcome = type(error).__name__
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = f"FINDING {type(error).__name__}"
            self._found(subject, raw)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.outcomes[subject.name, outcome] += 1
        self.slowest = max(self.slowest, time.process_time() - start)

    def _found(self, subject: Subject, raw: bytes) -> None:
        self.findings += 1
        if self.findings <= 10:
            path = self._keep / f"{subject.name}-{self.findings}"
            path.write_bytes(raw)
            print(f"{path}:", file=sys.stderr)
            traceback.print_exc()

    def report(self, seconds: float) -> None:
        for (subject, outcome), count in sorted(self.outcomes.items()):
            print(f"{subject:12} {outcome:24} {count:>9,}")
        total = sum(self.outcomes.values())
        print(f"{total:,} inputs in {seconds:.0f} s; the slowest took {self.slowest * 1e3:.0f} ms")
        if self._coverage is not None:
            kept = sum(map(len, self._corpus.values()))
            begun = sum(len(subject.seeds) for subject in self._readers.subjects)
            print(f"{len(self._coverage):,} steps between lines covered, {kept - begun} inputs joined {begun}")
        print(f"{self.findings} findings")


def limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def ring(number: int, frame: FrameType | None) -> None:
    raise Hang("too much time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true", help="keep inputs that reach new code, and mutate those, too")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()), help="where findings are written")
    options = parser.parse_args()
    signal.signal(signal.SIGPROF, ring)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is off in the background
    with tempfile.TemporaryDirectory() as folder, small_blocks(16):
        run = Run(Readers(Path(folder)), options.seed, Coverage() if options.guided else None, options.keep)
        run.seeds()
        limit_memory(MEMORY)
        start = time.perf_counter()
        with suppress(KeyboardInterrupt):
            run.inputs(options.inputs)
        run.report(time.perf_counter() - start)
    return 1 if run.findings else 0


if __name__ == "__main__":
    sys.exit(main())
