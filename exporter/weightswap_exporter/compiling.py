"""Files for other engines than `torch`, made from an artifact's graphs and added to the artifact."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from weightswap_runtime import Artifact
from weightswap_runtime.engines import aoti_names, onnx_names
from weightswap_runtime.errors import ExportError, Unsupported
from weightswap_runtime.files import new_file
from weightswap_runtime.manifest import MANIFEST_NAME, Manifest, encode_manifest
from weightswap_runtime.places import check_writable

ENGINES = ("torch", "aoti", "onnx")


def check_engines(engines: Sequence[str]) -> None:
    """Raise Unsupported for an engine that there is not."""
    if isinstance(engines, str) or not isinstance(engines, Sequence) or not set(map(str, engines)) <= set(ENGINES):
        raise Unsupported(f"engines={engines!r}: expected a sequence of {', '.join(map(repr, ENGINES))}")


def compile_engines(artifact: str | os.PathLike[str] | Artifact, engines: Sequence[str]) -> Artifact:
    """Make what other engines need from the graphs of an artifact, and add it to the artifact's folder.

    engines: "aoti" compiles each method with AOTInductor, for machines like this one; needs a C++ compiler. "onnx"
    writes an ONNX model without weights for each method; needs the extra `onnx-export`. "torch" needs nothing: every
    artifact has its graphs.

    Files of the same engine that are there already are replaced; the graph id stays. Returns the artifact with its new
    files. Processes that serve it are not disturbed. Raises Unsupported, MissingExtra, ArtifactError, CaptureError for
    a graph that the engine cannot express, and ExportError.
    """
    check_engines(engines)
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    check_writable(opened.path)
    files = engine_files(opened, engines)
    try:
        for name, content in files.items():
            _write(opened.path / name, content)
        # last: a folder whose manifest does not list a file is still whole
        _write(opened.path / MANIFEST_NAME, encode_manifest(with_files(opened.manifest, files)))
    except OSError as error:
        raise ExportError(f"{opened.path}: cannot be written ({error})") from error
    return Artifact.open(opened.path)


def engine_files(artifact: Artifact, engines: Sequence[str]) -> dict[str, bytes]:
    """The files that engines need beside the graphs, by their name in the artifact."""
    files: dict[str, bytes] = {}
    for engine in dict.fromkeys(engines):
        files |= _MAKERS[engine](artifact)
    return files


def with_files(manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """The manifest with files that are no part of the graph id."""
    digests = manifest.files | {name: blake3(content).hexdigest() for name, content in files.items()}
    return msgspec.structs.replace(manifest, files=dict(sorted(digests.items())))


def _onnx(artifact: Artifact) -> dict[str, bytes]:
    from .onnx_graphs import onnx_graph

    return {onnx_names.graph_file(name): onnx_graph(artifact, name) for name in artifact.methods}


def _aoti(artifact: Artifact) -> dict[str, bytes]:
    from .aoti_packages import build_target, package

    target = build_target()
    return {aoti_names.package_file(target, name): package(artifact, name, target) for name in artifact.methods}


_MAKERS: dict[str, Callable[[Artifact], dict[str, bytes]]] = {"torch": lambda _: {}, "aoti": _aoti, "onnx": _onnx}


def _write(path: Path, content: bytes) -> None:
    with new_file(path) as file:
        file.write(content)
