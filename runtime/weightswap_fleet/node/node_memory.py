"""The memory of a node: a segment, and the board that says which revision lies in which arena.

It has no name in any file system, and goes with the last process that has a descriptor of it. Such a process is found
by the name that the system shows: so a keeper that was killed finds again what its replicas serve.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.shared.segment import PARTS, Segment, memfd

_BOARD = "board"
_REVISIONS, _READ = (0, 8), 16  # where they are, in words of 8 bytes


class NodeMemory:
    """Descriptors of a node's memory, until `close`. The order of `descriptors` is that of `from_process`."""

    def __init__(self, segment: Segment, board: int) -> None:
        self.segment, self._board = segment, board
        self.board = Board(board)

    @classmethod
    def create(cls, weights: tuple[NamedTensor, ...], replicas: int, name: str) -> Self:
        """Room for two sets of weights and so many replicas. Raises OutOfMemory."""
        return cls(Segment.create(weights, replicas, name), memfd(mmap.PAGESIZE, f"{name}.{_BOARD}"))

    @classmethod
    def adopt(cls, name: str) -> Self | None:
        """That of a name which another process has; None where no other has it whole."""
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and int(process.name) != os.getpid():
                with suppress(OSError):  # it ends meanwhile, or is somebody else's
                    if found := _descriptors(process, name):
                        return cls.from_process(int(process.name), found)
        return None

    @classmethod
    def from_process(cls, pid: int | str, descriptors: tuple[int, ...], read_only: bool = False) -> Self:
        """That of another process. read_only: its arenas cannot be written. Raises OSError where it is not there."""
        opened: list[int] = []
        try:
            for number, descriptor in enumerate(descriptors):
                is_arena = number in (1, 2)
                flags = os.O_RDONLY if read_only and is_arena else os.O_RDWR
                opened.append(os.open(f"/proc/{pid}/fd/{descriptor}", flags | os.O_CLOEXEC))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        control, first, second, board = opened
        return cls(Segment(control, (first, second)), board)

    @staticmethod
    def is_held_by(pid: int, name: str) -> bool:
        """Whether a process has the memory of a name."""
        try:
            return _descriptors(Path(f"/proc/{pid}"), name) is not None
        except OSError:
            return False

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.segment.descriptors, self._board)

    def close(self) -> None:
        """Give the descriptors back."""
        self.segment.close()
        os.close(self._board)


def _descriptors(process: Path, name: str) -> tuple[int, ...] | None:
    wanted = {f"/memfd:{name}.{part} (deleted)": index for index, part in enumerate((*PARTS, _BOARD))}
    descriptors: dict[int, int] = {}
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            if (index := wanted.get(str(descriptor.readlink()))) is not None:
                descriptors[index] = int(descriptor.name)
    return tuple(descriptors[index] for index in range(len(wanted))) if len(descriptors) == len(wanted) else None


class Board:
    """Which revision of the place each arena has. The keeper writes it before its commit, and replicas read it."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, 0)).cast("Q")

    def revision(self, generation: int | None) -> int:
        """The revision that a generation has, or that one which has taken its arena since; 0 before the first."""
        return int(self._words[_REVISIONS[generation % 2]]) if generation is not None else 0

    def set_revision(self, generation: int, revision: int) -> None:
        self._words[_REVISIONS[generation % 2]] = revision

    @property
    def read(self) -> int:
        """The revision of the place when the keeper last read it."""
        return int(self._words[_READ])

    @read.setter
    def read(self, revision: int) -> None:
        self._words[_READ] = revision
