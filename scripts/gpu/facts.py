"""Prints facts about the machine and its software, as JSON. Exits with 1 if torch finds no GPU."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time

QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.max,pcie.link.width.max"


def main() -> int:
    start = time.perf_counter()
    import torch

    took = time.perf_counter() - start
    if not torch.cuda.is_available():
        print("scripts/test_cuda needs a GPU, but torch finds none here", file=sys.stderr)
        return 1
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "GPU": f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, sm_{properties.major}{properties.minor}",
        QUERY: _smi(),
        "cores": len(os.sched_getaffinity(0)),
        "memory, GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "seconds for the first import of torch": round(took, 1),
    }
    print(json.dumps(facts))
    return 0


def _smi() -> str:
    command = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__})"


if __name__ == "__main__":
    sys.exit(main())
