"""Where sets of weights get their memory: what each device offers (`Memory`), and the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.threads import WorkerThreads

from .arena import Arena, ArenaLayout, HostArena, HostPatch, Patch

# What to do about an OutOfMemory, by what the memory was for
FOR_TWO = 'Free memory, or load with residency="single", which holds one set of weights instead of two.'
FOR_ONE = "Free memory: the model holds only one set of weights."
FOR_STAGING = "Free memory, or swap a delta, which takes memory only for what changes."
FOR_PREVIOUS = "Free memory, or load without keep_previous, which holds the previous weights in memory."


class Memory(Protocol):
    """The memory of one device, with the host memory that it uses. All methods raise OutOfMemory."""

    stages_on_host: bool  # whether weights for another device may wait there for their commit

    def arena(self, layout: ArenaLayout) -> Arena:
        """Allocate an arena that serves."""
        ...

    def staging(self, layout: ArenaLayout) -> tuple[Arena, StagedIn]:
        """Allocate an arena whose weights a commit can copy to the serving arena as fast as possible."""
        ...

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        """Return a patch of a serving arena, in memory from which it is written as fast as possible."""
        ...


class StagedIn(NamedTuple):
    """The place where a set of weights waits for its commit."""

    kind: str  # "in place", "device" or "host"
    reason: str


IN_PLACE = StagedIn("in place", "the arena itself serves after the commit")
_ON_THE_HOST = StagedIn("host", "the weights serve there")


class HostMemory:
    """The memory of this process."""

    stages_on_host = False

    def arena(self, layout: ArenaLayout) -> HostArena:
        return HostArena(layout)

    def staging(self, layout: ArenaLayout) -> tuple[HostArena, StagedIn]:
        return HostArena(layout), _ON_THE_HOST

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        return patch, _ON_THE_HOST


@contextmanager
def advising(text: str) -> Iterator[None]:
    """Append advice to an OutOfMemory that the block raises."""
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(f"{error} {text}") from error


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes available by the machine and by the limits of this process's control groups; None: unknown."""
    limits = [free for group in _groups(proc, cgroups) if (free := _free(group)) is not None]
    with suppress(OSError, ValueError):
        rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        limits += [int(rows["MemAvailable"].split()[0]) << 10] if "MemAvailable" in rows else []
    return min(limits, default=None)


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return this process's control group (version 2) and its ancestors."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = Path(line[3:].lstrip("/"))
                return [cgroups / path for path in (own, *own.parents)]
    return []


def _free(group: Path) -> int | None:
    """Return the bytes that a group may still take, counting its inactive page cache as free."""
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(rows["inactive_file"]))
    return None
