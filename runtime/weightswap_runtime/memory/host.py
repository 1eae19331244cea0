"""Where sets of weights are kept: those that serve, those that are staged, and those that can come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .arena import Arena, ArenaLayout, HostArena
from .patch import HostPatch, Patch


class StagedIn(NamedTuple):
    """Where a set of weights waits for its commit, and why there. kind: "in place", "device" or "host"."""

    kind: str
    reason: str


@contextmanager
def advising(text: str) -> Iterator[None]:
    """A block whose OutOfMemory says what to do about it."""
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(f"{error} {text}") from error


class Memory(Protocol):
    """The memory of one device, and what of the host's belongs to it. Everything raises OutOfMemory."""

    stages_on_host: bool  # whether weights for another device may wait there for their commit

    def arena(self, layout: ArenaLayout) -> Arena:
        """One that serves."""
        ...

    def staging(self, layout: ArenaLayout) -> tuple[Arena, StagedIn]:
        """One whose weights are copied to the arena that serves, by a commit that is as short as it can be."""
        ...

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        """A patch of an arena that serves, in memory from which it is quickly written."""
        ...


FOR_TWO = 'Free memory, or load with residency="single", which holds one set of weights instead of two.'
FOR_ONE = "Free memory: it serves from one set, and holds no other."
FOR_STAGING = "Free memory, or swap a delta or a part (only=...), which takes memory for what changes alone."
FOR_PREVIOUS = "Free memory, or load without keep_previous, which takes it for the previous weights."
IN_PLACE = StagedIn("in place", "the arena itself serves after the commit")
ON_THE_HOST = StagedIn("host", "the weights serve there")


class HostMemory:
    """The memory of this process."""

    stages_on_host = False

    def arena(self, layout: ArenaLayout) -> HostArena:
        return HostArena(layout)

    def staging(self, layout: ArenaLayout) -> tuple[HostArena, StagedIn]:
        return HostArena(layout), ON_THE_HOST

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        return patch, ON_THE_HOST
