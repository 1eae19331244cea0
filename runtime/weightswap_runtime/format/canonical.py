"""Weight files in canonical layout, and small safetensors files, being written. docs/format.md specifies the layout."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.sources.writing import PendingFile
from weightswap_runtime.tensors import (
    Blocks,
    TensorBytes,
    TensorHasher,
    block_count,
    nbytes,
    tensor_digest,
)

from .safetensors import (
    ALIGNMENT,
    DIGEST_BYTES,
    LENGTH,
    MAX_HEADER,
    METADATA_KEY,
    FileTensor,
    Stamp,
    TensorRow,
    label_problem,
    weights_id,
)

_DATA_ALIGNMENT = 4096  # bytes: the data of a file begins at a multiple, as docs/format.md says


_UNKNOWN = "0" * 64  # stands for an id or a digest until the bytes are written
_LABEL_SPACE = 1024  # two sets of weights have the same layout unless labels are longer


def size_alignment(size: int) -> int:
    """Return the largest power of two that divides `size`, at most 256; 256 for an empty tensor."""
    return min(size & -size, ALIGNMENT) if size else ALIGNMENT


def canonical_order(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Sort rows by falling alignment of their size, then by name; every tensor then starts at such an alignment."""
    return sorted(rows, key=lambda row: (-size_alignment(nbytes(row.dtype, row.shape) or 0), row.name))


TensorData = Mapping[str, Iterable[memoryview]] | Iterator[tuple[str, Iterable[memoryview]]]


def write_weight_file(
    path: str | os.PathLike[str],
    rows: Sequence[TensorRow],
    data: TensorData,
    *,
    graph_id: str,
    labels: Mapping[str, str] | None = None,
) -> Stamp:
    """Write a weight file and return its stamp. The file appears under `path` whole or not at all.

    For the arguments see `new_weight_file`.
    """
    with new_weight_file(Path(path), rows, data, graph_id=graph_id, labels=labels or {}, cast={}) as (file, stamp):
        file.rename(Path(path))
    return stamp


@contextmanager
def new_weight_file(
    path: Path,
    rows: Sequence[TensorRow],
    data: TensorData,
    *,
    graph_id: str,
    labels: Mapping[str, str],
    cast: Mapping[str, list[str]],
    with_blocks: bool = False,
) -> Iterator[tuple[StampedFile, Stamp]]:
    """Write a weight file in canonical layout to a temporary name beside `path`; the block must rename it.

    Yields the file, whose bytes are on disk, and its stamp. `data` gives each tensor's little-endian row-major bytes,
    in pieces, in the order of `canonical_order(rows)`. One tensor is in memory at a time. `cast` is recorded as it is.
    with_blocks: record the digests of blocks, too.
    """
    order = canonical_order(rows)
    counts = {row.name: block_count(nbytes(row.dtype, row.shape) or 0) for row in order if with_blocks}
    several = {name: count for name, count in counts.items() if count > 1}
    blank = Stamp(
        graph_id=graph_id,
        weights_id=_UNKNOWN,
        digests={},
        labels=dict(labels),
        cast=dict(cast) if cast else msgspec.UNSET,
        blocks={name: _base64([bytes(DIGEST_BYTES)] * count) for name, count in several.items()} or msgspec.UNSET,
    )
    with StampedFile(path, order, METADATA_KEY, labels) as file:
        digests = file.write_tensors(data, blank)
        stamp = replace(
            blank,
            weights_id=weights_id((row, digests[row.name]) for row in order),
            digests=digests,
            blocks={name: _base64(file.blocks[name]) for name in several} or msgspec.UNSET,
        )
        file.write_stamp(stamp)
        yield file, stamp


def _base64(blocks: Iterable[bytes]) -> str:
    return b64encode(b"".join(blocks)).decode()


class StampedFile(PendingFile):
    """Safetensors file that is being written: first the tensors, then the stamp with their digests, then the name."""

    def __init__(self, path: Path, order: Sequence[TensorRow], key: str, labels: Mapping[str, str]) -> None:
        if problem := label_problem(labels):
            raise ValueError(problem)
        self._order, self._ranges = order, pack_ranges(order)
        self._key, self._labels = key, labels
        self.blocks: dict[str, Blocks] = {}  # the digests of each written tensor's blocks
        super().__init__(path)

    def write_tensors(self, data: TensorData, blank: msgspec.Struct) -> dict[str, str]:
        """Write the tensors after a gap for the header, and return their digests by name.

        blank: the stamp without digests; the gap's size is computed from it.
        """
        self._free = self.file.write(self._header(replace(blank, digests=dict.fromkeys(self._ranges, _UNKNOWN))))
        items = iter(data.items() if isinstance(data, Mapping) else data)
        for row, (name, pieces) in zip(self._order, items, strict=True):
            if row.name != name:
                raise ValueError(f"expected the tensor {row.name!r} next, got {name!r}")
            self.blocks[name] = self._write_tensor(pieces, self._ranges[name].nbytes)
        return {name: tensor_digest(blocks) for name, blocks in self.blocks.items()}

    def _write_tensor(self, pieces: Iterable[memoryview], expected: int) -> Blocks:
        hasher = TensorHasher()
        written = 0
        for piece in pieces:
            hasher.update(piece)
            written += self.file.write(piece)
        if written != expected:
            raise ValueError(f"got {written} bytes for a tensor of {expected}")
        return hasher.blocks

    def write_stamp(self, stamp: msgspec.Struct) -> None:
        """Write the header into the gap before the tensors, and flush all bytes to disk."""
        header = self._header(stamp)
        if len(header) != self._free:
            raise ValueError("the header changed size between two renderings")
        self.file.seek(0)
        self.file.write(header)
        self.sync()

    def _header(self, stamp: msgspec.Struct) -> bytes:
        """Return the bytes before the tensors, with room for longer labels."""
        # transformers and others refuse files without "format"
        metadata = {"format": "pt", self._key: msgspec.json.encode(stamp).decode()}
        text = json.dumps(msgspec.json.encode(self._labels).decode(), ensure_ascii=False)
        return render_header(self._ranges, metadata, reserve=max(0, _LABEL_SPACE - len(text.encode())))


def encode_tensors(
    tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] = MappingProxyType({})
) -> list[memoryview]:
    """Return the pieces of a small safetensors file, in canonical order."""
    order = canonical_order(TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    header = render_header(pack_ranges(order), {"format": "pt", **metadata})
    return [memoryview(header), *(memoryview(tensors[row.name].data) for row in order)]


def pack_ranges(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, FileTensor]:
    """Lay out (name, dtype, shape) rows one after another, and return their ranges. Raises WeightFileError."""
    placed: dict[str, FileTensor] = {}
    position = 0
    for name, dtype, shape in tensors:
        size = nbytes(dtype, shape)
        if size is None:
            raise WeightFileError(f"{name}: {dtype}{list(shape)} does not fill whole bytes")
        placed[name] = FileTensor(dtype, shape, position, position + size)
        position += size
    return placed


def render_header(tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], reserve: int = 0) -> bytes:
    """Return the bytes before the data section, padded with spaces to a multiple of 4096.

    `reserve` is the number of extra bytes to leave room for, so that longer metadata does not move the data section.
    """
    entries = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
        for name, t in tensors.items()
    }
    document = {"__metadata__": dict(metadata), **entries}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    blocks = -(-(LENGTH.size + len(text) + reserve) // _DATA_ALIGNMENT)
    size = blocks * _DATA_ALIGNMENT - LENGTH.size
    if size > MAX_HEADER:
        raise WeightFileError(f"a header of {size} bytes would be needed; safetensors allows {MAX_HEADER}")
    return LENGTH.pack(size) + text.ljust(size)
