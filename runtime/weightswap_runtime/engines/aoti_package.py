"""AOTInductor's packages in an artifact, and the machines they are for. Needs no torch, and loads no machine code."""

from __future__ import annotations

import io
import platform
import zipfile
from collections.abc import Collection, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import ArtifactError, Unsupported, listed
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.tensors import describe, row_major, same_type

NOTE_NAME = "extra/weightswap.json"
LIBRARY_SUFFIX = ".wrapper.so"
BESIDE_GPUS = "cpu-x86_64-avx2"  # target of the processor that code for a GPU needs
_CUDA = "cuda-sm"
# the levels 3 and 4 of x86-64's ABI, as /proc/cpuinfo spells their features
_V3 = frozenset(["avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


class Target(msgspec.Struct, frozen=True):
    """A kind of machine."""

    name: str
    flags: frozenset[str]  # features of its processor
    march: str  # the compiler's name for a processor with exactly these features
    bits: int  # width of its vectors


TARGETS = {  # fastest first
    target.name: target
    for target in (
        Target("cpu-x86_64-avx512", _V4, "x86-64-v4", 512),
        Target("cpu-x86_64-avx2", _V3, "x86-64-v3", 256),
    )
}


class NotedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a package is bound to."""

    fqn: str  # its name in the package
    kind: Literal["weight", "state", "constant", "variant"]  # in the manifest, as are the others
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin and target of a package, stored in it."""

    graph_id: str
    method: str
    target: str
    torch: str
    tensors: tuple[NotedTensor, ...]
    written: tuple[int, ...] = ()  # indices of flat inputs that a call changes


class Package(NamedTuple):
    """One method's package."""

    where: str  # its path
    note: Note
    library: bytes  # its machine code


def find_targets(artifact: Artifact, gpu: str | None = None) -> dict[str, str]:
    """Return for each method the best target that it has a package for and this machine can run.

    gpu: the target of the GPU to run on, instead of the processor. Methods without packages for this kind of device
    are left out. Raises Unsupported if no method has one, or if a method has packages for other targets alone.
    """
    runnable = [gpu] if gpu else machine_targets()
    offered = {name: _targets_of(artifact, name) for name in artifact.methods}
    compiled = {name for name, targets in offered.items() if bool(gpu) in map(is_gpu_target, targets)}
    best = {name: next((target for target in runnable if target in offered[name]), "") for name in artifact.methods}
    lacking = [name for name in artifact.methods if name in compiled and not best[name]]
    if any(best.values()) and not lacking:
        return {name: target for name, target in best.items() if target}
    lacking = lacking or [name for name in artifact.methods if offered[name]]
    command = _command(artifact, gpu or "", lacking or artifact.methods)
    if not lacking:
        raise Unsupported(f"{artifact.path}: was not compiled for the engine 'aoti'. Run: {command}")
    who = f"{', '.join(lacking)} " if any(best.values()) else ""
    targets = ", ".join(sorted({target for name in lacking for target in offered[name]}))
    machine = f"this GPU is {gpu}" if gpu else f"this machine is {machine_name()}"
    raise Unsupported(
        f"{artifact.path}: {who}was compiled for {targets}; {machine}. Run on a machine like this one: {command}"
    )


def read_package(artifact: Artifact, target: str, method: str) -> Package:
    """Read a package. Raises ArtifactError if it is damaged or of another graph, Unsupported if of another torch."""
    name = package_file(target, method)
    where = str(artifact.path / name)
    compiled = [name for name in artifact.methods if target in _targets_of(artifact, name)]
    advice = f"Compile it again: {_command(artifact, target, compiled)}"
    raw = artifact.read(name)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = archive.namelist()
            (note_name,) = (member for member in members if member.endswith(f"/{NOTE_NAME}"))
            (library_name,) = (member for member in members if member.endswith(LIBRARY_SUFFIX))
            note = from_json(archive.read(note_name), Note)
            package = Package(where, note, archive.read(library_name))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ArtifactError(f"{where}: is not a package ({error}). {advice}") from error
    if problems := list(_problems(artifact, target, method, note)):
        raise ArtifactError(f"{where}: is not the package of {method!r}: {listed(problems, between='; ')}")
    if (here := _minor(_installed())) != (there := _minor(note.torch)):
        raise Unsupported(f"{where}: was compiled with torch {there}, but this is torch {here or 'none'}. {advice}")
    return package


def can_run(artifact: Artifact) -> bool:
    """Return whether the packages are for this processor and this torch. Raises ArtifactError for damaged ones."""
    try:
        for method, target in find_targets(artifact).items():
            read_package(artifact, target, method)
    except Unsupported:
        return False
    return True


def _targets_of(artifact: Artifact, method: str) -> set[str]:
    """Return the targets that a method was compiled for."""
    offered = {name.split("/")[2] for name in artifact.manifest.files if name.startswith("engines/aoti/")}
    return {target for target in offered if package_file(target, method) in artifact.manifest.files}


def _command(artifact: Artifact, target: str, methods: Collection[str]) -> str:
    """Return the command that compiles methods for a target."""
    device = " --device cuda" if is_gpu_target(target) else ""
    some = "" if len(methods) == len(artifact.methods) else "".join(f" --method {name}" for name in methods)
    return f"weightswap compile {artifact.path} --engine aoti{device}{some}"


def _installed() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])


def _problems(artifact: Artifact, target: str, method: str, note: Note) -> Iterator[str]:
    if note.graph_id != artifact.graph_id:
        yield f"it was made from the graph {note.graph_id[:12]}, expected {artifact.graph_id[:12]}"
    if (note.target, note.method) != (target, method):
        yield f"it claims to be {note.method!r} for {note.target}"
    manifest = artifact.manifest
    yield from (text for bound in note.tensors if (text := _mismatch(manifest, method, bound)))
    names = [bound.fqn for bound in note.tensors]
    yield from (f"it lists {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1)


def _mismatch(manifest: Manifest, method: str, bound: NotedTensor) -> str | None:
    """Describe why a tensor that the package takes is not the manifest's; return None if it is."""
    known = {(item.kind, item.name) for item in manifest.methods[method].inputs}
    tables = {
        "weight": manifest.weights,
        "state": manifest.state,
        "constant": manifest.constants,
        "variant": manifest.variable,
    }
    row = next((row for row in tables[bound.kind] if bound.name in row.names), None)
    if row is None or (bound.kind, bound.name) not in known:
        return f"it takes the {bound.kind} {bound.name!r}, which the method does not"
    stride = row_major(row.shape) if row.stride is None else row.stride
    if not same_type(bound, row) or bound.stride != stride:
        found = f"{describe(bound)} in the strides {list(bound.stride)}"
        wanted = f"{describe(row)} in {list(stride)}"
        return f"it takes {bound.name!r} as {found}, expected {wanted}"
    return None


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
