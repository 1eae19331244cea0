"""How much memory there is: the system kills somebody instead of refusing what a memfd takes beyond it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.memory.host import FOR_TWO


def allocate_shared(descriptor: int) -> None:
    """Take all memory of a memfd that it has not yet. Raises OutOfMemory."""
    status = os.fstat(descriptor)
    wanted = status.st_size - status.st_blocks * 512
    if wanted <= 0:
        return
    if (there := available()) is not None and wanted > there:
        raise OutOfMemory(f"{wanted} bytes of shared memory for a set of weights, and {there} are free. {_ADVICE}")
    try:
        os.posix_fallocate(descriptor, 0, status.st_size)
    except OSError as error:
        raise OutOfMemory(f"{wanted} bytes of shared memory cannot be had ({error}). {_ADVICE}") from error


_ADVICE = FOR_TWO.partition(",")[0] + ": all workers of the machine hold two sets together."


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that may be taken, by the machine and by the limits of this process's control groups; None: unknown."""
    found = [left for group in _groups(proc, cgroups) if (left := _left(group)) is not None]
    with suppress(OSError, ValueError):
        rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        found += [int(rows["MemAvailable"].split()[0]) << 10] if "MemAvailable" in rows else []
    return min(found, default=None)


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """This process's group and those around it, of version 2."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = Path(line[3:].lstrip("/"))
                return [cgroups / each for each in (own, *own.parents)]
    return []


def _left(group: Path) -> int | None:
    """What a group may still take: files in the page cache give way."""
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(rows["inactive_file"]))
    return None
