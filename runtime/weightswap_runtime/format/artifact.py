"""Artifacts, read: a folder or what a URL names, whose every byte is checked against the manifest before it is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from blake3 import blake3

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import ArtifactError, OutOfMemory, Unsupported, WeightFileError
from weightswap_runtime.sources.location import Location, Url, as_location, is_url
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.sources.writing import is_file
from weightswap_runtime.tensors import TensorBytes, describe, same_type

from .manifest import CONSTANTS_NAME, MANIFEST_NAME, PARTS_NAME, ConversionInput, Manifest, NamedTensor, decode_manifest
from .safetensors import parse_file

_MOST_MANIFEST = 64 << 20  # bytes
_FILES = (".safetensors", ".json")  # suffixes of files; an artifact is a folder
_AGAIN = "Export the artifact again, or copy it again."


class Artifact:
    """Exported model without weights: a folder with a manifest. Immutable. `path` is a Path or a Url."""

    def __init__(self, path: Location, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Open the artifact in a local folder or behind an fsspec URL; read and validate its manifest.

        Raises ArtifactError, and Unsupported or MissingExtra for a kind of URL that cannot be read here.
        """
        if not isinstance(path, str | os.PathLike | Url):
            raise ArtifactError(f"expected the path of an artifact, got a {type(path).__qualname__}")
        with _artifact_errors():
            folder = as_location(path)
            raw = read_small(folder / MANIFEST_NAME, _MOST_MANIFEST)
        if raw is None:
            raise ArtifactError(
                f"{folder!s:.200}: no artifact here (expected a folder with a {MANIFEST_NAME}). "
                "Give the folder that weightswap export wrote."
            )
        return cls(folder, decode_manifest(raw, str(folder / MANIFEST_NAME)))

    @property
    def folder(self) -> Path:
        """Local folder, to which files may be added. Raises Unsupported for an artifact behind a URL."""
        if isinstance(self.path, Url):
            raise Unsupported(f"{self.path}: cannot write to a URL; copy the artifact here first")
        return self.path

    @property
    def graph_id(self) -> str:
        return self.manifest.graph_id

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.manifest.methods)

    @cached_property
    def methods_with_state(self) -> frozenset[str]:
        """Names of the methods whose graphs take state."""
        return frozenset(name for name, method in self.manifest.methods.items() if method.has_state)

    @cached_property
    def kinds(self) -> dict[str, dict[str, Any]]:
        """Kinds of the parameters that are made of other tensors, by FQN. Raises ArtifactError."""
        if PARTS_NAME not in self.manifest.files:
            return {}
        try:
            return from_json(self.read(PARTS_NAME), dict[str, dict[str, Any]])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.path / PARTS_NAME}: not the kinds of tensors ({error}). {_AGAIN}") from error

    def compiled_methods(self, engine: str) -> list[str]:
        """Return the names of the methods for which the artifact has compiled files of an engine."""
        compiled = {PurePosixPath(file).stem for file in self.manifest.files if file.startswith(f"engines/{engine}/")}
        return [name for name in self.methods if name in compiled]

    def read(self, name: str) -> bytes:
        """Return the bytes of a file that the manifest lists, checked against its digest. Raises ArtifactError."""
        expected = self.manifest.files[name]
        path = self.path / name
        with _artifact_errors():
            raw = read_small(path, sys.maxsize) if isinstance(path, Url) else self._read_local(path)
        if raw is None:
            raise ArtifactError(f"{path}: listed in the manifest but missing. {_AGAIN}")
        digest = blake3(raw).hexdigest()
        if digest != expected:
            raise ArtifactError(
                f"{path}: altered since the export (expected digest {expected[:12]}, found {digest[:12]}). {_AGAIN}"
            )
        return raw

    def _read_local(self, path: Path) -> bytes:
        try:
            if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder)):
                raise ArtifactError(f"{path}: points outside the artifact. {_AGAIN}")
            if path.exists() and not path.is_file():
                raise ArtifactError(f"{path}: is not a regular file. {_AGAIN}")
            return path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"{path}: listed in the manifest but not readable ({error.strerror}). {_AGAIN}"
            ) from error
        except MemoryError as error:
            raise ArtifactError(f"{path}: no memory to read its {path.stat().st_size} bytes into. {_AGAIN}") from error

    def row_major(self) -> Artifact:
        """Return the same artifact for an engine that accepts weights in row-major order only, without strides."""
        weights = tuple(msgspec.structs.replace(weight, stride=None) for weight in self.manifest.weights)
        return Artifact(self.path, msgspec.structs.replace(self.manifest, weights=weights))

    def verify(self) -> None:
        """Check every file that the manifest lists. Raises ArtifactError."""
        for name in self.manifest.files:
            self.read(name)

    def constants(self) -> dict[str, TensorBytes]:
        """Return the constants and the initial values of the state. Raises ArtifactError."""
        state = self.manifest.state
        stored = (*self.manifest.constants, *(row for row in state if not row.zero))
        return self.tensors(CONSTANTS_NAME, stored) | zeros(state)

    def tensors(self, name: str, rows: Iterable[NamedTensor | ConversionInput]) -> dict[str, TensorBytes]:
        """Return the tensors of one of the artifact's safetensors files.

        Raises ArtifactError if the file is damaged or lacks one of `rows`.
        """
        where = str(self.path / name)
        tensors, _ = parse_file(self.read(name), where)
        for row in rows:
            stored = tensors.get(row.name)
            if stored is None or not same_type(stored, row):
                raise ArtifactError(f"{where}: has no {describe(row)} for {row.name!r}")
        return tensors

    def __repr__(self) -> str:
        return f"Artifact({str(self.path)!r}, graph_id={self.graph_id[:12]!r}, methods={list(self.methods)})"


def zeros(state: Sequence[NamedTensor]) -> dict[str, TensorBytes]:
    """Return zeros for the state tensors whose initial values are stored in no file.

    They all share one anonymous mapping, whose pages take no memory until they are written to. Raises ArtifactError.
    """
    rows = [row for row in state if row.zero]
    if not rows:
        return {}
    size = max(1, *(row.nbytes for row in rows))
    try:
        memory = memoryview(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS))
    except (OSError, OverflowError, ValueError) as error:
        raise ArtifactError(f"{CONSTANTS_NAME}: no memory for the zeros of {rows[0].name!r} ({error})") from error
    return {row.name: TensorBytes(row.dtype, row.shape, memory[: row.nbytes]) for row in rows}


def is_artifact(path: str) -> bool:
    """Return True if there is an artifact behind a path or a URL."""
    if not is_url(path):
        return is_file(Path(path) / MANIFEST_NAME)
    folder = as_location(path)
    if folder.name.endswith(_FILES):
        return False
    try:
        return read_small(folder / MANIFEST_NAME, _MOST_MANIFEST) is not None
    except WeightFileError:  # servers that do not reveal what exists refuse the request
        return False


@contextmanager
def _artifact_errors() -> Iterator[None]:
    """Raise each WeightFileError of the block as an ArtifactError, and so a lack of memory."""
    try:
        yield
    except (WeightFileError, OutOfMemory) as error:
        raise ArtifactError(str(error)) from error
