"""The memory that the replicas of a node share, and their slots.

Each process that has it keeps it alive. So replicas go on without an agent, and the next agent finds the memory in
them, by its name in /proc.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll
from threading import Lock
from typing import Self

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import PARTS, Segment, memfd

_REVISION_PAGE = "revision_page"
_REVISIONS = (0, 8)  # their offsets, in words of 8 bytes


class NodeMemory:
    """The file descriptors of a node's memory, until `close`. `from_process` takes those of `descriptors`."""

    def __init__(self, segment: Segment, revision_page: int) -> None:
        self.segment, self._revision_page = segment, revision_page
        self.revision_page = RevisionPage(revision_page)

    @classmethod
    def create(cls, weights: tuple[NamedTensor, ...], replicas: int, name: str) -> Self:
        """Create memory for two sets of weights and so many replicas. Raises OutOfMemory."""
        return cls(Segment.create(weights, replicas, name), memfd(mmap.PAGESIZE, f"{name}.{_REVISION_PAGE}"))

    @classmethod
    def adopt(cls, name: str) -> Self | None:
        """Open the memory of a name that another process has, or return None if no other has all of it."""
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and int(process.name) != os.getpid():
                with suppress(OSError):  # the process has ended, or belongs to another user
                    if descriptors := _descriptors(process, name):
                        return cls.from_process(int(process.name), descriptors)
        return None

    @classmethod
    def from_process(cls, pid: int | str, descriptors: tuple[int, ...], read_only: bool = False) -> Self:
        """Open another process's memory. read_only: its arenas cannot be written. Raises OSError if it has ended."""
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
        control, first, second, revision_page = opened
        return cls(Segment(control, (first, second)), revision_page)

    @staticmethod
    def is_held_by(pid: int, name: str) -> bool:
        """Return True if a process has the memory of a name."""
        try:
            return _descriptors(Path(f"/proc/{pid}"), name) is not None
        except OSError:
            return False

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.segment.descriptors, self._revision_page)

    def close(self) -> None:
        """Close the file descriptors."""
        self.segment.close()
        os.close(self._revision_page)


def _descriptors(process: Path, name: str) -> tuple[int, ...] | None:
    indexes = {f"/memfd:{name}.{part} (deleted)": index for index, part in enumerate((*PARTS, _REVISION_PAGE))}
    descriptors: dict[int, int] = {}
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            if (index := indexes.get(str(descriptor.readlink()))) is not None:
                descriptors[index] = int(descriptor.name)
    return tuple(descriptors[index] for index in range(len(indexes))) if len(descriptors) == len(indexes) else None


class RevisionPage:
    """The desired store's revision of each arena. The agent writes it before a commit, and replicas read it.

    Of two arenas, one is served, and only the other is written. So a revision by the parity of its generation stays
    right as long as its weights are served.
    """

    def __init__(self, descriptor: int = -1) -> None:
        """descriptor: of shared memory; -1: this process alone has the revision page."""
        self._words = memoryview(mmap.mmap(descriptor, 0 if descriptor >= 0 else mmap.PAGESIZE)).cast("Q")

    def revision(self, generation: int | None) -> int:
        """Return the revision of a generation, or of the later one in its arena; 0 before the first."""
        return int(self._words[_REVISIONS[generation % 2]]) if generation is not None else 0

    def set_revision(self, generation: int, revision: int) -> None:
        self._words[_REVISIONS[generation % 2]] = revision


class Slots:
    """Slots of replicas, with pidfds that show their ends, whoever has a pid next. Thread-safe."""

    def __init__(self, control: Control, belongs: Callable[[int], bool]) -> None:
        """Takes over the slots of living replicas, and empties those of dead ones, whose pid may be in use again.

        belongs: returns True if a process has this memory.
        """
        self._control = control
        self._lock = Lock()
        self._taken: dict[int, tuple[int, int]] = {}  # slot -> process, pidfd
        for slot, pid in enumerate(control.processes):
            if pid and not (belongs(pid) and self._watch(slot, pid)):
                control.empty_slot(slot)

    def assign(self, pid: int) -> int:
        """Give a process a slot. Raises Unsupported if all are taken."""
        self.sweep()
        with self._lock:
            free = next((slot for slot in range(self._control.workers) if slot not in self._taken), None)
            if free is None:
                raise Unsupported(f"at most {self._control.workers} replicas on one node can share weights")
            if not self._watch(free, pid):
                raise Unsupported(f"no process {pid} here; a replica and its node's agent must see each other")
            return free

    def _watch(self, slot: int, pid: int) -> bool:
        try:
            self._taken[slot] = pid, os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        return True

    def sweep(self) -> None:
        """Empty the slots of replicas that have ended."""
        with self._lock:
            for slot, (_, descriptor) in list(self._taken.items()):
                if _has_ended(descriptor):
                    self._control.empty_slot(slot)
                    del self._taken[slot]
                    os.close(descriptor)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of replicas, in the order of their slots."""
        with self._lock:
            return tuple(pid for _, (pid, _) in sorted(self._taken.items()))

    def close(self) -> None:
        with self._lock:
            for _, descriptor in self._taken.values():
                os.close(descriptor)
            self._taken.clear()


def _has_ended(descriptor: int) -> bool:
    watched = poll()
    watched.register(descriptor, POLLIN)
    return bool(watched.poll(0))
