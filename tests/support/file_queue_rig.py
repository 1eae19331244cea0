"""Test rig of a file queue: a watched directory, a model, and a clock that tests advance."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.support.tiny import TinyArtifact
from weightswap_runtime import Model, StageCancelled, WeightFileError, load, write_delta
from weightswap_runtime.errors import reason_of
from weightswap_runtime.following.directory import Entry, open_directory
from weightswap_runtime.following.file_queue import FileQueue, Start
from weightswap_runtime.staging.request import BaseFile

INTERVAL = 5.0


def in_place(path: Path, content: bytes) -> None:
    """Rewrite a file in place, against the rules; size, inode and modification time stay the same."""
    status = path.stat()
    assert len(content) == status.st_size
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class FileQueueRig:
    """Directory, the model that serves its files, and a clock. Implements the file queue's target."""

    def __init__(self, tiny: TinyArtifact, folder: Path) -> None:
        self.tiny = tiny
        self.folder = folder
        self.model: Model = load(tiny.path)
        self.now = 1000.0
        self.listings = self.outages = 0
        self.attempts: list[str] = []
        self.committed: list[str] = []
        self.reports: list[tuple[str, str]] = []
        self.errors: dict[str, list[BaseException]] = {}  # raised instead of the next swaps of a file
        self.unlisted = False
        self.altered: Callable[[list[Entry]], list[Entry]] = lambda entries: entries  # of each listing
        self.stopped = False
        folder.mkdir()
        self.follow("newest")

    def follow(self, start: Start) -> None:
        self.file_queue = FileQueue(str(self.folder), self._list, INTERVAL, start, lambda: self.now)

    def _list(self) -> list[Entry]:
        self.listings += 1
        if self.unlisted:
            self.outages = 1
            raise WeightFileError("unreachable")
        return self.altered(list(open_directory(self.folder)()))

    def check(self) -> None:
        if self.stopped:
            raise StageCancelled("stopped")

    def serves(self, weights_id: str) -> bool:
        return self.model.weights_id == weights_id

    def swap(
        self, path: str | Path, weights_id: str | None, known: str | None = None, onto: tuple[BaseFile, ...] = ()
    ) -> str | None:
        name = Path(path).stem
        self.attempts.append(name)
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        with self.model.stage(path, onto=onto) as staged:
            if staged.weights_id != known:
                staged.commit()
                self.committed.append(name)
            return staged.weights_id

    def notify(self, kind: str, source: str, error: BaseException) -> None:
        self.reports.append((f"{kind} {Path(source).stem}", reason_of(error) or type(error).__name__))

    def poll(self, after: float = INTERVAL) -> float:
        self.now += after
        return self.file_queue.poll(self)

    def write(self, name: str, seed: int) -> Path:
        """Write a weight file and rename it into place, like weightswap does."""
        return self.tiny.write(self.folder / f"{name}.safetensors", self.tiny.values(seed))

    def delta(self, name: str, base: int, new: int) -> Path:
        files = [self.tiny.write(self.folder.parent / f"{seed}", self.tiny.values(seed)) for seed in (base, new)]
        out = self.folder / f"{name}.safetensors"
        write_delta(*files, out)
        return out
