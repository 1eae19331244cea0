"""Facts about the machine and the software that a figure depends on. Nothing that names the machine."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("weightswap", "torch", "safetensors", "blake3", "numpy")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def facts() -> dict[str, str | int | float]:
    """Memory in GB, the date in UTC."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "unknown",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
