"""The memory that is available on the host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


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
