"""Packages of the engine `aoti`: read, and held against the manifest before their machine code is loaded."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import msgspec

from weightswap_runtime.errors import ArtifactError, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Manifest, NamedTensor
from weightswap_runtime.tensors.dtypes import describe

from .names import LIBRARY_SUFFIX, NOTE_NAME, Note, Taken, is_gpu_target, machine_name, machine_targets, package_file


class Package(NamedTuple):
    """One method's package: where it lies, what it says of itself, and its machine code."""

    where: str
    note: Note
    library: bytes


def find_target(artifact: Artifact, gpu: str | None = None) -> str:
    """The best of the targets that this machine can run and every method has a package for. Raises Unsupported.

    gpu: the target of the GPU to run on, instead of the processor.
    """
    files = artifact.manifest.files
    offered = {name.split("/")[2] for name in files if name.startswith("engines/aoti/")}
    whole = {target for target in offered if all(package_file(target, name) in files for name in artifact.methods)}
    for target in [gpu] if gpu else machine_targets():
        if target in whole:
            return target
    command = _command(artifact, gpu or "")
    if not whole:
        raise Unsupported(f"{artifact.path}: was not compiled for the engine 'aoti'. Run: {command}")
    here = f"this GPU is {gpu}" if gpu else f"this machine is {machine_name()}"
    raise Unsupported(
        f"{artifact.path}: was compiled for {', '.join(sorted(whole))}; {here}. On a machine like this one: {command}"
    )


def _command(artifact: Artifact, target: str) -> str:
    """What compiles for a target."""
    return f"weightswap compile {artifact.path} --engine aoti{' --device cuda' if is_gpu_target(target) else ''}"


def read_package(artifact: Artifact, target: str, method: str) -> Package:
    """Raises ArtifactError for a package that is damaged or of another graph, Unsupported for one of another torch."""
    name = package_file(target, method)
    where = str(artifact.path / name)
    advice = f"Compile it again: {_command(artifact, target)}"
    raw = artifact.read(name)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = archive.namelist()
            (note_name,) = (member for member in members if member.endswith(f"/{NOTE_NAME}"))
            (library_name,) = (member for member in members if member.endswith(LIBRARY_SUFFIX))
            note = msgspec.json.decode(archive.read(note_name), type=Note)
            package = Package(where, note, archive.read(library_name))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ArtifactError(f"{where}: is not a package ({error}). {advice}") from error
    if problems := list(_problems(artifact, target, method, note)):
        raise ArtifactError(f"{where}: is not the package of {method!r}: {'; '.join(problems[:5])}")
    if (here := _minor(_installed())) != (there := _minor(note.torch)):
        raise Unsupported(f"{where}: was compiled with torch {there}, and this is torch {here or 'none'}. {advice}")
    return package


def can_run(artifact: Artifact) -> bool:
    """Whether every method has a package for this processor and this torch. Raises ArtifactError for damaged ones."""
    try:
        target = find_target(artifact)
        for method in artifact.methods:
            read_package(artifact, target, method)
    except Unsupported:
        return False
    return True


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
        yield f"it says that it is {note.method!r} for {note.target}"
    manifest = artifact.manifest
    yield from (text for bound in note.tensors if (text := _mismatch(manifest, method, bound)))
    names = [bound.fqn for bound in note.tensors]
    yield from (f"it lists {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1)


def _mismatch(manifest: Manifest, method: str, bound: Taken) -> str | None:
    """Why a tensor that the package takes is not the manifest's; None if it is."""
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
    if (bound.dtype, bound.shape, bound.stride) != (row.dtype, row.shape, stride_of(row)):
        found = f"{describe(bound.dtype, bound.shape)} in the strides {list(bound.stride)}"
        wanted = f"{describe(row.dtype, row.shape)} in {list(stride_of(row))}"
        return f"it takes {bound.name!r} as {found}, expected {wanted}"
    return None


def stride_of(row: NamedTensor) -> tuple[int, ...]:
    """The strides of a tensor, in elements."""
    if row.stride is not None:
        return row.stride
    steps = [1]
    for size in reversed(row.shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps)) if row.shape else ()
