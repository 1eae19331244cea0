"""Writes facts about the machine and its software to a JSON file. Exits with NO_GPU if torch finds none.

They are read while the GPU works, as an idle one lowers its clocks and its link's generation.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from steps import NO_GPU

ASKED = {
    "driver": ("driver_version",),
    "clocks at work, MHz (SM, memory)": ("clocks.sm", "clocks.mem"),
    "highest clocks, MHz (SM, memory)": ("clocks.max.sm", "clocks.max.mem"),
    "PCIe at work (generation, lanes)": ("pcie.link.gen.current", "pcie.link.width.current"),
    "PCIe at most (generation, lanes)": ("pcie.link.gen.max", "pcie.link.width.max"),
    "power at work and at most, W": ("power.draw", "power.limit"),
}
SMI_LIMIT = 20.0  # seconds
WORK = 3_000_000_000  # cycles: more than a second


def main(path: Path) -> int:
    start = time.perf_counter()
    import torch

    imported = time.perf_counter()
    if not torch.cuda.is_available():
        print("scripts/test_cuda needs a GPU, but torch finds none here", file=sys.stderr)
        return NO_GPU
    x = torch.zeros(256, 256, device="cuda")
    (x @ x).sum().item()  # loads what the first kernels need
    started = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "GPU": f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, sm_{properties.major}{properties.minor}",
        **_smi(torch),
        "cores": len(os.sched_getaffinity(0)),
        "memory, GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "seconds to write 1 GB of new memory": round(_first_touch(), 2),
        "files are in": os.environ.get("TMPDIR", "the default temporary folder"),
        "seconds for the first import of torch": round(imported - start, 1),
        "seconds for the first kernels": round(started - imported, 1),
    }
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(facts, indent=1))
    temporary.replace(path)
    return 0


def _smi(torch) -> dict[str, str]:  # type: ignore[no-untyped-def]
    """Ask the driver's program, while the GPU is busy and bytes cross its link."""
    locked = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there, stream = locked.to("cuda"), torch.cuda.Stream()
    fields = [field for asked in ASKED.values() for field in asked]
    command = ("nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    torch.cuda._sleep(WORK)
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            late = time.perf_counter() + SMI_LIMIT
            while process.poll() is None:
                if time.perf_counter() > late:
                    process.kill()
                with torch.cuda.stream(stream):
                    there.copy_(locked, non_blocking=True)
                stream.synchronize()
            values = iter(filter(None, process.communicate()[0].strip().split(", ")))
    except OSError as error:
        return dict.fromkeys(ASKED, f"not known ({type(error).__name__})")
    return {name: ", ".join(next(values, "?") for _ in asked) for name, asked in ASKED.items()}


def _first_touch() -> float:
    """Return the seconds in which a GB of new memory is written: files of the benchmarks are such memory."""
    memory = mmap.mmap(-1, 10**9)
    first = ctypes.c_char.from_buffer(memory)
    start = time.perf_counter()
    ctypes.memset(ctypes.addressof(first), 0, len(memory))
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
