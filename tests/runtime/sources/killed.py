"""Writers that are killed at random moments, many times, in a separate process.

`python -m tests.runtime.sources.killed FOLDER ROUNDS` exits with 0 if no half-written file was ever seen.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.support.varied import RichFiles
from weightswap_exporter import pack, publish
from weightswap_runtime import load, merge_deltas, write_delta
from weightswap_runtime.sources.writing import remove_abandoned

LONGEST = 0.03  # seconds before a kill, in the first rounds


def writers(files: RichFiles, folder: Path) -> dict[str, Callable[[], object]]:
    """Return writers that each replace their file repeatedly, with one of two contents."""
    steps = iter(range(10**9))
    chains = [[files.deltas[0, base], files.deltas[base, new]] for base, new in ((1, 2), (2, 1))]
    return {
        "pack": lambda: pack(files.models[next(steps) % 2], files.artifact, out=folder / "packed.safetensors"),
        "delta": lambda: write_delta(files.full[0], files.full[1 + next(steps) % 2], folder / "delta.safetensors"),
        "merge": lambda: merge_deltas(chains[next(steps) % 2], folder / "merged.safetensors"),
        "publish": lambda: publish(files.models[next(steps) % 2], folder, files.artifact, step=1).wait(),
    }


def killed(write: Callable[[], object], seconds: float) -> None:
    child = os.fork()
    if not child:
        try:
            while True:
                write()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def finished(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if not path.name.startswith("."))


def finished_kinds(folder: Path) -> list[str]:
    return sorted({path.name[:5] for path in finished(folder)})


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    (folder / "source").mkdir()
    (folder / "out").mkdir()
    files = RichFiles(folder / "source", 3)
    model = load(files.artifact, files.full[0])
    choose = random.Random(0)
    interrupted = 0
    kinds = ["delta", "merge", "packe", "step-"]
    for number in range(40 * rounds):
        if number >= rounds and finished_kinds(folder / "out") == kinds and interrupted >= rounds // 4:
            break  # a busy machine needs more rounds, and longer ones, until each writer has finished once
        for write in writers(files, folder / "out").values():
            killed(write, choose.random() * LONGEST * (1 + number // rounds))
            for path in finished(folder / "out"):
                model.swap(files.full[0])
                model.swap(path)
            interrupted += len(remove_abandoned(folder / "out", ""))
    assert finished_kinds(folder / "out") == kinds
    assert all(path in set(finished(folder / "out")) for path in (folder / "out").iterdir())
    assert interrupted >= rounds // 4, interrupted


if __name__ == "__main__":
    main()
