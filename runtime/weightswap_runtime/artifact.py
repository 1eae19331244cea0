"""Reading an artifact: every byte that is used was checked against the manifest first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3

from .dtypes import describe
from .errors import ArtifactError
from .files import is_file
from .header import Header, header_length, parse_header
from .manifest import CONSTANTS_NAME, MANIFEST_NAME, AdapterInput, Manifest, NamedTensor, decode_manifest

MAX_MANIFEST = 256 << 20
Row = NamedTensor | AdapterInput


class Artifact:
    """An exported model without weights: a folder with a manifest. Immutable."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read and validate the manifest of the folder `path`. Raises ArtifactError."""
        if not isinstance(path, str | os.PathLike):
            raise ArtifactError(f"expected the path of an artifact, got a {type(path).__qualname__}")
        folder = Path(path)
        name = folder / MANIFEST_NAME
        if not is_file(name):
            raise ArtifactError(
                f"{folder!s:.200}: no artifact here (expected a folder with a {MANIFEST_NAME}). "
                "Give the folder that weightswap export wrote."
            )
        if name.stat().st_size > MAX_MANIFEST:
            raise ArtifactError(f"{name}: larger than {MAX_MANIFEST} bytes, so it is not a manifest")
        return cls(folder, decode_manifest(name.read_bytes(), str(name)))

    @property
    def graph_id(self) -> str:
        return self.manifest.graph_id

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.manifest.methods)

    def read(self, name: str) -> bytes:
        """The bytes of one file of the manifest, checked against its digest. Raises ArtifactError."""
        expected = self.manifest.files[name]
        path = self.path / name
        advice = "Export the artifact again, or copy it again."
        root = self.path.resolve()
        if not path.resolve().is_relative_to(root):
            raise ArtifactError(f"{path}: leads out of the artifact. {advice}")
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path}: is not a regular file. {advice}")
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"{path}: listed in the manifest but not readable ({error.strerror}). {advice}"
            ) from error
        found = blake3(raw).hexdigest()
        if found != expected:
            raise ArtifactError(
                f"{path}: altered since the export (expected digest {expected[:12]}, found {found[:12]}). {advice}"
            )
        return raw

    def row_major(self) -> Artifact:
        """The same artifact for an engine that takes weights in row-major order alone, whatever the model has."""
        weights = tuple(msgspec.structs.replace(weight, stride=None) for weight in self.manifest.weights)
        return Artifact(self.path, msgspec.structs.replace(self.manifest, weights=weights))

    def verify(self) -> None:
        """Check every file that the manifest lists. Raises ArtifactError."""
        for name in self.manifest.files:
            self.read(name)

    def constants(self) -> tuple[Header, memoryview]:
        """Header and data section of the constants and of the state's initial values."""
        return self.tensors(CONSTANTS_NAME, (*self.manifest.constants, *self.manifest.state))

    def tensors(self, name: str, rows: Iterable[Row]) -> tuple[Header, memoryview]:
        """Header and data section of one of its safetensors files, which must have `rows`. Raises ArtifactError."""
        raw = self.read(name)
        where = str(self.path / name)
        length = header_length(raw[:8], len(raw), where)
        header = parse_header(raw[8 : 8 + length], len(raw), where)
        for row in rows:
            stored = header.tensors.get(row.name)
            if stored is None or (stored.dtype, stored.shape) != (row.dtype, row.shape):
                raise ArtifactError(f"{where}: has no {describe(row.dtype, row.shape)} for {row.name!r}")
        return header, memoryview(raw)[header.data_start :]

    def __repr__(self) -> str:
        return f"Artifact({str(self.path)!r}, graph_id={self.graph_id[:12]!r}, methods={list(self.methods)})"
