"""Names of packages of the engine `aoti`, the machines that they are for, and what they say of themselves.

Both ends import this; it needs no torch.
"""

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

    `march` is what a compiler calls a processor with these features and no others; `bits` is the width of its vectors.
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


BESIDE_GPUS = "cpu-x86_64-avx2"  # what code for a GPU expects of the processor

_CUDA = "cuda-sm"


class NotedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a package takes once: its name there, and what the manifest calls it."""

    fqn: str
    kind: Literal["weight", "state", "constant", "variant"]
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a package was made from and for. `written` are the indices of the flat inputs that a call changes."""

    graph_id: str
    method: str
    target: str
    torch: str
    tensors: tuple[NotedTensor, ...]
    written: tuple[int, ...] = ()


def package_file(target: str, method: str) -> str:
    """Where an artifact keeps the package of a method."""
    return f"engines/aoti/{target}/{method}.pt2"


def gpu_target(capability: tuple[int, int]) -> str:
    """The target of a GPU with a compute capability. Its machine code runs on no other."""
    return f"{_CUDA}{capability[0]}{capability[1]}"


def is_gpu_target(target: str) -> bool:
    """Whether packages for a target run on a GPU."""
    return target.startswith(_CUDA)


@cache
def machine_targets() -> tuple[str, ...]:
    """The targets whose packages this machine's processor can run, fastest first."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return ()
    found = _processor_flags()
    return tuple(target.name for target in TARGETS.values() if target.flags <= found)


def machine_name() -> str:
    """What this machine is, for messages."""
    targets = machine_targets()
    return targets[0] if targets else f"a {platform.machine()} with {platform.system()} that no target describes"


def _processor_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
