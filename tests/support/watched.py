"""Watched directory, into which weight files are renamed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.damage import damaged
from tests.support.tiny import TinyArtifact
from weightswap_runtime import Model, Watcher

SOON = 0.01


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(SOON)
    return True


def somebody_swaps(model: Model) -> bool:
    """Return True if another thread has the turn to swap."""
    lock = model._store.turns._swap_lock
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return not is_free


class Directory:
    def __init__(self, tiny: TinyArtifact, path: Path) -> None:
        self.tiny = tiny
        self.path = path
        path.mkdir()

    def write(self, seed: int) -> Path:
        return self.tiny.write(self.path / f"v{seed}.safetensors", self.tiny.values(seed))

    def damaged(self, seed: int) -> Path:
        path = self.tiny.write(self.path / "hidden", self.tiny.values(seed))
        return damaged(path).rename(self.path / f"v{seed}.safetensors")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def mark(watcher: Watcher) -> str | None:
    taken = watcher._queue._last_applied
    return taken.entry.name if taken else None
