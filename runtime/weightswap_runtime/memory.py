"""Where sets of weights are kept: those that serve, those that are staged, and those that can come back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .arena import Arena, ArenaLayout, HostArena
from .patches import HostPatch, Patch


class StagedIn(NamedTuple):
    """Where a set of weights waits for its commit, and why there. kind: "in place", "device", "pinned" or "host"."""

    kind: str
    reason: str


class Memory(Protocol):
    """The memory of one device, and what of the host's belongs to it. Everything raises OutOfMemory."""

    @property
    def stages_on_host(self) -> bool:
        """Whether weights for another device may wait there for their commit."""
        ...

    def arena(self, layout: ArenaLayout) -> Arena:
        """One that serves."""
        ...

    def staging(self, layout: ArenaLayout) -> tuple[Arena, StagedIn]:
        """One whose weights are copied to the arena that serves, by a commit that is as short as it can be."""
        ...

    def staged_patch(self, patch: HostPatch) -> tuple[Patch, StagedIn]:
        """A patch of an arena that serves, in memory from which it is quickly written."""
        ...

    def kept(self, layout: ArenaLayout) -> Arena:
        """One in host memory, for weights that a rollback brings back."""
        ...


IN_PLACE = StagedIn("in place", "the arena itself serves after the commit")
ON_THE_HOST = StagedIn("host", "the weights serve there")


class HostMemory:
    """The memory of this process."""

    stages_on_host = False

    def arena(self, layout: ArenaLayout) -> HostArena:
        return HostArena(layout)

    def staging(self, layout: ArenaLayout) -> tuple[HostArena, StagedIn]:
        return HostArena(layout), ON_THE_HOST

    def staged_patch(self, patch: HostPatch) -> tuple[Patch, StagedIn]:
        return patch, ON_THE_HOST

    def kept(self, layout: ArenaLayout) -> HostArena:
        return HostArena(layout)
