"""Packages of the engine `aoti`: file names, targets and notes. Exporter and runtime share this; it needs no torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

NOTE_NAME = "extra/weightswap.json"
LIBRARY_SUFFIX = ".wrapper.so"

_V3 = frozenset(["avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


class Target(msgspec.Struct, frozen=True):
    """A kind of machine. `flags` are the features of its processor, as /proc/cpuinfo calls them.

    `march` is the compiler's name for a processor with exactly these features; `bits` is the width of its vectors.
    """

    name: str
    flags: frozenset[str]
    march: str
    bits: int


TARGETS = {
    target.name: target
    for target in (
        Target("cpu-x86_64-avx512", _V4, "x86-64-v4", 512),
        Target("cpu-x86_64-avx2", _V3, "x86-64-v3", 256),
    )
}


BESIDE_GPUS = "cpu-x86_64-avx2"  # target of the processor that code for a GPU needs

_CUDA = "cuda-sm"


class NotedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a package is bound to: its name in the package (fqn), and its kind and name in the manifest."""

    fqn: str
    kind: Literal["weight", "state", "constant", "variant"]
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin and target of a package, stored in it. `written` lists the flat inputs, by index, that a call changes."""

    graph_id: str
    method: str
    target: str
    torch: str
    tensors: tuple[NotedTensor, ...]
    written: tuple[int, ...] = ()


def package_file(target: str, method: str) -> str:
    """Return the path of a method's package in an artifact."""
    return f"engines/aoti/{target}/{method}.pt2"


def gpu_target(capability: tuple[int, int]) -> str:
    """Return the target of GPUs with a compute capability. Its machine code runs on no others."""
    return f"{_CUDA}{capability[0]}{capability[1]}"


def is_gpu_target(target: str) -> bool:
    """Return whether packages for a target run on a GPU."""
    return target.startswith(_CUDA)


@cache
def machine_targets() -> tuple[str, ...]:
    """Return the targets whose packages this machine's processor can run, fastest first."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return ()
    flags = _processor_flags()
    return tuple(target.name for target in TARGETS.values() if target.flags <= flags)


def machine_name() -> str:
    """Describe this machine, for messages."""
    targets = machine_targets()
    return targets[0] if targets else f"a {platform.machine()} with {platform.system()} that no target describes"


def _processor_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
