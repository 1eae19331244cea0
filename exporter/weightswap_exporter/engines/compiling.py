"""Compilation of an artifact's graphs for engines other than `torch`, which adds files to the artifact."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from blake3 import blake3

from weightswap_runtime import Artifact
from weightswap_runtime.engines import aoti_package as aoti_targets
from weightswap_runtime.engines import onnx_names
from weightswap_runtime.engines.choosing import ENGINES
from weightswap_runtime.errors import CaptureError, ExportError, UnknownName, Unsupported, WeightswapError
from weightswap_runtime.format.manifest import MANIFEST_NAME, Manifest, encode_manifest
from weightswap_runtime.memory.device_memory import HOST, device_name
from weightswap_runtime.sources.writing import new_file

OnStep = Callable[[str], object]


def ignore_step(_: str) -> None:
    """Ignore a progress message."""


def check_engines(engines: Sequence[str], where: str = "") -> None:
    """Raise Unsupported if an engine is unknown, or `engines` is not a sequence of names."""
    names = engines if isinstance(engines, Sequence) and not isinstance(engines, str) else (engines,)
    if not {str(name) for name in names} <= set(ENGINES) or names is not engines:
        raise Unsupported(f"{where}engines={engines!r}: expected a sequence of {', '.join(map(repr, ENGINES))}")


def compile_engines(
    artifact: str | os.PathLike[str] | Artifact,
    engines: Sequence[str],
    *,
    methods: Sequence[str] | None = None,
    trial: bool = True,
    device: str = HOST,
    on_step: OnStep = ignore_step,
) -> Artifact:
    """Compile the graphs of an artifact for other engines, and add the files to the artifact's folder.

    engines: "aoti" compiles each method with AOTInductor, for machines like this one; needs a C++ compiler. "onnx"
    writes an ONNX model without weights for each method; needs the extra `onnx-export`. "torch" needs nothing: every
    artifact has its graphs.

    methods: those to compile; None: all. A method that an engine has no file for runs on `torch` instead.

    device: what "aoti" compiles for: "cpu", or "cuda" for GPUs like this machine's, which also needs the CUDA toolkit.
    An artifact can have both. The other engines' files are the same for all devices.

    trial: compare the compiled files with the graph itself, in a process of its own with random weights and inputs, and
    refuse files whose outputs differ. A UserWarning says when that is impossible, as for more than 2 GB of weights.

    on_step: a callback that gets the name of each step.

    Existing files of the same engine, machine and method are replaced; the graph id stays. Returns the artifact with
    its new files. Processes that serve it are not disturbed. Raises Unsupported, UnknownName, MissingExtra,
    ArtifactError, CaptureError for a graph that the engine cannot express, and ExportError.
    """
    check_engines(engines)
    if device != HOST and not any(ENGINES[engine].by_device for engine in engines):
        raise Unsupported(f"device={device!r}: what is compiled for {', '.join(engines)} is the same for all devices")
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    folder = opened.folder
    files = engine_files(opened, dict.fromkeys(_checked_methods(opened, methods), engines), device, on_step)
    if trial:
        on_step("trying what was compiled")
        _try(opened, files, engines, device)
    try:
        for name, content in files.items():
            _write(folder / name, content)
        # last: the folder is a valid artifact while its manifest does not list the new files
        _write(folder / MANIFEST_NAME, encode_manifest(with_files(opened.manifest, files)))
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written ({error})") from error
    return Artifact.open(folder)


def _checked_methods(artifact: Artifact, methods: Sequence[str] | None) -> Sequence[str]:
    names = artifact.methods if methods is None else [methods] if isinstance(methods, str) else methods
    if unknown := [name for name in names if name not in artifact.methods]:
        raise UnknownName(f"{unknown[0]!r} is not a method of this artifact, which has: {', '.join(artifact.methods)}")
    return names


def _try(artifact: Artifact, files: dict[str, bytes], engines: Sequence[str], device: str) -> None:
    with TemporaryDirectory(prefix="weightswap-") as folder:
        copy = Path(folder) / "artifact"
        shutil.copytree(artifact.folder, copy)
        write_files(copy, artifact.manifest, files)
        try_engines(Artifact.open(copy), engines, device)


def try_engines(artifact: Artifact, engines: Sequence[str], device: str = HOST) -> None:
    """Compare compiled files with the graphs on random weights and inputs. Raises CaptureError."""
    from .engine_check import try_engine

    for engine in dict.fromkeys(engines):
        if ENGINES[engine].compiled:
            try_engine(artifact, engine, device if ENGINES[engine].by_device else HOST)


def write_files(folder: Path, manifest: Manifest, files: dict[str, bytes]) -> None:
    """Write files and the manifest that lists them into a folder that no process reads yet."""
    for name, content in (files | {MANIFEST_NAME: encode_manifest(with_files(manifest, files))}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def engine_files(
    artifact: Artifact, engines: Mapping[str, Sequence[str]], device: str = HOST, on_step: OnStep = ignore_step
) -> dict[str, bytes]:
    """Return the files that engines need besides the graphs, by name in the artifact. engines: by method."""
    files: dict[str, bytes] = {}
    compiled = dict.fromkeys(engine for names in engines.values() for engine in names if ENGINES[engine].compiled)
    if compiled and artifact.manifest.ranks:
        raise Unsupported(
            f"{artifact.path}: is for several ranks, which only the engine 'torch' runs: {', '.join(compiled)}"
        )
    pairs = [(engine, method) for engine in compiled for method, names in engines.items() if engine in names]
    for number, (engine, name) in enumerate(pairs, start=1):
        on_step(f"compiling {name} for the engine {engine} ({number} of {len(pairs)})")
        try:
            file, content = _MAKERS[engine](artifact, name, device)
        except (WeightswapError, OSError):
            raise
        except Exception as error:  # of torch's, which names no model
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CaptureError(
                f"method {name!r}: the engine {engine!r} cannot express it: {reason}. Use the engine 'torch'"
            ) from error
        files[file] = content
    return files


def with_files(manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest with files added that are not part of the graph id."""
    digests = manifest.files | {name: blake3(content).hexdigest() for name, content in files.items()}
    return msgspec.structs.replace(manifest, files=dict(sorted(digests.items())))


def _onnx(artifact: Artifact, method: str, _: str) -> tuple[str, bytes]:
    from .onnx import onnx_graph

    return onnx_names.graph_file(method), onnx_graph(artifact, method)


def _aoti(artifact: Artifact, method: str, device: str) -> tuple[str, bytes]:
    import torch

    from .aoti import build_target, package

    place = torch.device(device_name(device))
    target = build_target(place)
    return aoti_targets.package_file(target, method), package(artifact, method, target, place)


# functions of (artifact, method, device) that return the name and content of a file
_MAKERS: dict[str, Callable[[Artifact, str, str], tuple[str, bytes]]] = {"aoti": _aoti, "onnx": _onnx}


def _write(path: Path, content: bytes) -> None:
    with new_file(path) as file:
        file.write(content)
