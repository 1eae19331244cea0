"""How much memory there is on the host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


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
