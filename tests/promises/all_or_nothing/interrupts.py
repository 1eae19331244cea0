"""Swaps, stagings, rollbacks and pins that are interrupted at random instructions while another thread calls the model.

`python -m tests.promises.all_or_nothing.interrupts FOLDER RESIDENCY SECONDS` exits with 0 if every answer was that of
a set of weights, and the model still works. It runs in a process of its own, as it has an alarm.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import torch

from tests.support.storm import content, found_in, storm
from tests.support.tiny import TinyArtifact, X, serves
from weightswap_runtime import Model, NothingToRollBack, load

SETS = 3


class Alarm:
    """Timer that raises KeyboardInterrupt in the main thread some time after `set`, unless it is cleared before."""

    def __init__(self) -> None:
        self._armed = False
        signal.signal(signal.SIGALRM, self._ring)

    def set(self, seconds: float) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def clear(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt


def pinned(model: Model, file: Path) -> None:
    model.swap(file, busy="wait")
    with model.pin() as session:
        session(X)


def in_the_background(model: Model, file: Path) -> None:
    with model.stage(file, background=True, busy="wait") as staged:
        staged.commit()


def discarded(model: Model, file: Path) -> None:
    model.stage(file, busy="wait").discard()


def rolled_back(model: Model, file: Path) -> None:
    with suppress(NothingToRollBack):
        model.rollback(busy="wait")


WORK: tuple[Callable[[Model, Path], None], ...] = (pinned, in_the_background, discarded, rolled_back)


def interrupted(alarm: Alarm, work: Callable[[], None], seconds: float) -> bool:
    """Do one round of work, and return True if it was interrupted."""
    try:
        alarm.set(seconds)
        work()
        alarm.clear()
    except KeyboardInterrupt:
        return True
    except RuntimeError as error:  # of a lock of the standard library that an interrupt has left in disorder
        alarm.clear()
        if "lock" not in str(error):
            raise
        return True
    return False


def main() -> None:
    folder, residency, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    tiny, random = TinyArtifact(folder / "tiny.artifact"), Random(1)
    files = [tiny.write(folder / f"v{seed}.safetensors", tiny.values(seed)) for seed in range(SETS)]
    answers = {content(TinyArtifact.eager(seed, X)): seed for seed in range(SETS)}
    model = load(tiny.path, files[0], residency=residency)  # type: ignore[arg-type]
    alarm = Alarm()
    end, rounds, interrupts = time.monotonic() + seconds, 0, 0
    with storm(lambda number: found_in(answers, model(X)), threads=1) as seen:
        while time.monotonic() < end:
            rounds += 1
            work, file = random.choice(WORK), random.choice(files)
            interrupts += interrupted(alarm, lambda: work(model, file), random.uniform(0.0001, 0.002))  # noqa: B023
    assert interrupts > 10, interrupts
    assert seen[0]
    assert torch.is_grad_enabled()
    for seed in range(SETS):
        model.swap(files[seed], timeout=5, busy="wait")
        assert serves(model, seed)


if __name__ == "__main__":
    main()
