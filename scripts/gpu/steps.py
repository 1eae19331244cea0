"""The steps of a run on a GPU, what matters most first. Steps of one group run beside each other."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARY = ("torch", "numpy", "ml_dtypes", "msgspec", "blake3", "safetensors", "rich", "typer")
TESTS = (*LIBRARY, "pytest", "hypothesis")
# A connection for each stream: with fewer some wait for each other, which hides a wait that is missing.
ENVIRONMENT = ("env", "CUDA_DEVICE_MAX_CONNECTIONS=32", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1")
FEW_THREADS = "OMP_NUM_THREADS=4"  # for torch on the CPU, where steps share the processors
PYTEST = (sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "-p", "outcomes", "-vv", "-ra")
# warnings about the machine, such as torch's about pynvml, must not fail tests; a thread that dies must
PYTEST += ("-W", "default", "-W", "error::pytest.PytestUnhandledThreadExceptionWarning")
PYTEST += ("-o", "faulthandler_timeout=60", "--durations=8")
AOTI = ("torch>=2.13", "triton")
ONNX = ("onnx", "onnxscript", "onnxruntime-gpu")
ZOO = ("transformers>=5.23", "pytest-xdist")
# one by one if that fails, as a wheel for another interpreter would stop the others
INSTALL = """
install() { "$0" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$@"; }
site=$1; shift
install "$site" "$@" || for wheel in "$@"; do install "$site" "$wheel" || echo "$wheel is not installed"; done
"""


NO_GPU = 69  # exit code of a step after which nothing else can pass; a step that fails in another way stops nothing


@dataclass(frozen=True)
class Step:
    """A command with its limit in seconds, from its own start.

    needs: distributions with their least versions, and files; without one of them the step is skipped. only_with:
    distributions without which it cannot pass on this machine, and is left out. tests: pytest runs it.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = LIBRARY
    only_with: tuple[str, ...] = ()
    tests: bool = False


def first_steps(out: Path, site: Path, wheels: Sequence[Path]) -> list[Step]:
    """Return what comes before all else: the first import of torch, and meanwhile wheels are installed in `site`."""
    facts = Step("facts", (sys.executable, "scripts/gpu/facts.py", str(out / "facts.json")), 120, ())
    command = ("bash", "-c", INSTALL, sys.executable, str(site), *map(str, wheels))
    return [facts, *([Step("packages", command, 60, ())] if wheels else [])]


def all_steps(out: Path) -> list[list[Step]]:
    """Return the groups of steps. What is bound by latency, or measures time, is alone: processes share a GPU in turns.

    `out`: the folder that figures are written to.
    """
    return [
        [_tests("slow streams", 150, "tests/devices/test_slow_streams.py")],
        [_tests("storm", 80, "tests/promises/never_a_mixture/test_storm.py")],
        [_tests("large swaps", 90, "tests/devices/test_large_swaps.py")],
        [_tests("hashing on the device", 40, "tests/devices/test_device_digests.py")],
        [_benchmarks(out)],
        [_tests("rows", 60, "tests/promises/never_a_mixture/test_rows.py")],
        [_tests("given tensors", 40, "tests/devices/test_given_on_device.py")],
        [_tests("devices", 120, "tests/devices/test_accelerator.py", "tests/devices/test_crossing_states.py")],
        [_python("ceilings", 60, "scripts/gpu/ceilings.py", str(out / "ceilings.json"))],
        [
            _beside("parity", 120, "tests/exporter/parity/test_compare.py", only_with=("onnx", "onnxscript")),
            _beside("models", 200, "tests/zoo/test_zoo.py", "-p", "xdist", "-n", "6", only_with=ZOO),
            _beside("aoti", 150, "tests/devices/test_aoti.py", only_with=AOTI),
            _beside("onnx", 120, "tests/devices/test_onnx.py", only_with=ONNX),
            _beside(
                "engines beside each other",
                150,
                "tests/runtime/engines/test_methods_engines.py",
                "tests/runtime/engines/test_statistics.py",
                only_with=(*AOTI, *ONNX),
            ),
        ],
        *([[_memcheck()]] if os.environ.get("MEMCHECK") else []),
    ]


def _tests(name: str, limit: float, *arguments: str) -> Step:
    """Return a step with the tests that are marked `cuda` in some files."""
    return Step(name, (*ENVIRONMENT, *PYTEST, *arguments), limit, TESTS, tests=True)


def _beside(name: str, limit: float, *arguments: str, only_with: tuple[str, ...]) -> Step:
    """Return a step with tests that run beside others."""
    return Step(name, (*ENVIRONMENT, FEW_THREADS, *PYTEST, *arguments), limit, TESTS, only_with, tests=True)


def _python(name: str, limit: float, *arguments: str) -> Step:
    return Step(name, (sys.executable, *arguments), limit)


def _benchmarks(out: Path) -> Step:
    size, rounds = os.environ.get("SIZE_MB", "4000"), os.environ.get("ROUNDS", "3")
    options = ("--size-mb", size, "--rounds", rounds, "--out", str(out))
    return _python("benchmarks", 220, "scripts/benchmarks/main.py", "cuda", *options)


def _memcheck() -> Step:
    """Return the step that checks memory accesses of our kernels and of torch's; CUDA API errors are not reported."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1")
    files = ("tests/devices/test_accelerator.py", "tests/devices/test_device_digests.py")
    command = (program, *options, *PYTEST, *files, "-k", "streams or every_kind or digests")
    return Step("memcheck", command, 240, (*TESTS, program), tests=True)
