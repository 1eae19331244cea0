"""Facts about the machine and the software that figures depend on, without the machine's name."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("weightswap", "torch", "safetensors", "blake3", "numpy", "transformers")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def facts() -> dict[str, str | int | float]:
    """Return the facts; memory in GB, the date in UTC."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "unknown",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        **{name: _version(name) for name in PACKAGES},
        **_accelerator(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources, or not needed here
        return "not installed"


def _accelerator() -> dict[str, str | int | float]:
    """Return the accelerator's name, capability, memory in GB, and CUDA's version and driver."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    facts: dict[str, str | int | float] = {
        "accelerator": accelerator.type,
        "accelerators": torch.accelerator.device_count(),
    }
    if accelerator.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": str(torch.version.cuda),
            "driver": _driver(),
        }
    return facts


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().split("\n", 1)[0].split(":", 1)[-1].strip() if path.exists() else "unknown"


class Others:
    """Share of the processors used by other processes since this object was created."""

    def __init__(self) -> None:
        self._start = _cpu_seconds()

    def percent(self) -> float:
        """Percentage of all processors' time, including time stolen by a hypervisor."""
        total, busy, own = (now - then for now, then in zip(_cpu_seconds(), self._start, strict=True))
        return round(100 * max(0.0, busy - own) / max(total, 1e-9), 1)


def _cpu_seconds() -> tuple[float, float, float]:
    """Return the seconds in total, those not idle, and those used by this process."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, waiting, *rest = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    busy = user + nice + system + sum(rest)
    own = os.times()
    return busy + idle + waiting, busy, own.user + own.system


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
