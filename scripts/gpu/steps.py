"""Steps in order, with what each needs. The steps of a group run in parallel."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

LIBRARY = ("torch", "numpy", "ml_dtypes", "msgspec", "blake3", "safetensors", "rich", "typer")
TESTS = (*LIBRARY, "pytest", "hypothesis")
PYTEST = (sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "-vv", "-ra")
# warnings about the machine, such as torch's about pynvml, must not fail a step
PYTEST += ("-W", "default", "-o", "faulthandler_timeout=60")

FEW_THREADS = ("env", "OMP_NUM_THREADS=4")  # limits torch's CPU threads: these steps share the processors


@dataclass(frozen=True)
class Step:
    """Command with its limit in seconds from its own start. It is skipped without one of its packages or files.

    tests: the last line counts tests; if none has passed, the step was skipped. leaves: seconds to leave for later
    steps.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    packages: tuple[str, ...] = LIBRARY
    files: tuple[str, ...] = ()
    tests: bool = False
    leaves: float = 0


_ONNX = ("onnx", "onnxruntime", "onnxscript")


def marked(name: str, limit: float, *files: str, packages: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> Step:
    """Return the step of the tests that are marked `cuda` in some files."""
    return Step(name, (*FEW_THREADS, *PYTEST, *also, *files), limit, (*TESTS, *packages), files, tests=True)


def all_steps(out: Path) -> list[list[Step]]:
    """Return groups of steps; a group either times nothing, or has one step. Timings are written to `out`."""
    return [
        [python("ceilings", 90, "scripts/gpu/ceilings.py", str(out / "ceilings.json"))],
        [
            marked("slow streams", 200, "tests/devices/test_slow_streams.py"),
            marked("large swaps", 180, "tests/devices/test_large_swaps.py"),
            marked("devices", 180, "tests/devices/test_accelerator.py", "tests/devices/test_crossing_states.py"),
            marked("storm", 180, "tests/promises/never_a_mixture/test_storm.py"),
            marked("hashing on the device", 120, "tests/devices/test_device_digests.py"),
            marked("models", 150, "tests/zoo/test_zoo.py", packages=("transformers", "xdist"), also=("-n", "6")),
            marked("parity", 120, "tests/exporter/parity/test_compare.py"),
            marked("aoti", 150, "tests/devices/test_aoti.py", packages=("triton",)),
            marked("onnx", 120, "tests/devices/test_onnx.py", packages=_ONNX),
            marked(
                "engines beside each other",
                150,
                "tests/runtime/engines/test_methods_engines.py",
                "tests/runtime/engines/test_statistics.py",
                packages=("triton", *_ONNX),
            ),
        ],
        [_benchmarks(out)],
        [python("plot", 60, "scripts/benchmarks/plot.py", str(out), packages=("matplotlib", "torch", "rich"))],
        *([[_memcheck()]] if os.environ.get("MEMCHECK") else []),
    ]


def python(name: str, limit: float, *arguments: str, packages: tuple[str, ...] = LIBRARY, leaves: float = 0) -> Step:
    return Step(name, (sys.executable, *arguments), limit, packages, leaves=leaves)


def _benchmarks(out: Path) -> Step:
    size, rounds = os.environ.get("SIZE_MB", "8000"), os.environ.get("ROUNDS", "5")
    options = ("--size-mb", size, "--rounds", rounds, "--out", str(out))
    return python("benchmarks", 400, "scripts/benchmarks/main.py", "cuda", *options, leaves=20)


def _memcheck() -> Step:
    """Return the step that checks our own kernels and torch calls; errors that torch handles itself are not counted."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1")
    files = ("tests/devices/test_accelerator.py", "tests/devices/test_device_digests.py")
    existing = tuple(file for file in files if Path(file).exists())
    command = (program, *options, *PYTEST, *existing, "-k", "streams or every_kind or digests")
    return Step("memcheck", command, 240, TESTS, (program,), tests=True)
