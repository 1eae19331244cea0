"""Swaps, calls and pins that are interrupted at random instructions, hundreds of times, in a separate process.

`python -m tests.promises.all_or_nothing.interrupts FOLDER RESIDENCY` exits with 0 if the model still works.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch

from tests.support.tiny import TinyArtifact, X, serves
from weightswap_runtime import Model, load

SECONDS = 2.0
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


def work(model: Model, file: Path) -> None:
    model.swap(file)
    with model.pin() as session:
        session(X)


def interrupted(alarm: Alarm, model: Model, file: Path, seconds: float) -> bool:
    """Do one round of work, and return True if it was interrupted."""
    try:
        alarm.set(seconds)
        work(model, file)
        alarm.clear()
    except KeyboardInterrupt:
        return True
    return False


def main() -> None:
    folder, residency = Path(sys.argv[1]), sys.argv[2]
    tiny = TinyArtifact(folder / "tiny.artifact")
    files = [tiny.write(folder / f"v{seed}.safetensors", tiny.values(seed)) for seed in range(SETS)]
    model = load(tiny.path, files[0], residency=residency)  # type: ignore[arg-type]
    alarm = Alarm()
    end, rounds, interrupts = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end:
        rounds += 1
        interrupts += interrupted(alarm, model, files[rounds % SETS], 0.0001 + (rounds % 17) * 0.00005)
    assert interrupts > 10, interrupts
    assert torch.is_grad_enabled()
    for seed in range(SETS):
        model.swap(files[seed], timeout=5)
        assert serves(model, seed)


if __name__ == "__main__":
    main()
