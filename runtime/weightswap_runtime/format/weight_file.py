"""Weight files: one full set of weights as plain safetensors; those written here have the canonical layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from weightswap_runtime.errors import DamagedFile, WeightFileError
from weightswap_runtime.messages import listed
from weightswap_runtime.sources.atomic import PendingFile
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url, as_location
from weightswap_runtime.sources.opening import open_source
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.digests import DIGEST, TensorHasher
from weightswap_runtime.tensors.dtypes import nbytes

from .header import MAX_HEADER, FileTensor, Header, header_length, pack_ranges, parse_header, render_header

ALIGNMENT = 256
LABEL_ROOM = 1024
MOST_LABEL_BYTES = 64 << 10  # servers keep them for each set of weights, and name them in their answers
METADATA_KEY = "weightswap"
TensorData = Mapping[str, Iterable[memoryview]] | Iterator[tuple[str, Iterable[memoryview]]]
_UNKNOWN = "0" * 64  # stands for an id or a digest until the bytes are written


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Entry that weightswap adds to `__metadata__`. `digests` maps tensor names to their `tensor_digest`s.

    `cast` lists the tensors that were cast when they were packed: their former dtype -> their names, sorted. Files
    without cast tensors have no such field.
    """

    graph_id: str
    weights_id: str
    digests: dict[str, str]
    labels: dict[str, str] = {}
    cast: dict[str, list[str]] | msgspec.UnsetType = msgspec.UNSET


def label_problem(labels: Mapping[str, str]) -> str:
    """Return what is wrong with the labels of a file; an empty string if nothing is."""
    try:
        size = len(msgspec.json.encode(labels))
    except UnicodeEncodeError as error:
        return f"the label {error.object!a:.200} is not valid Unicode"
    if size <= MOST_LABEL_BYTES:
        return ""
    return f"its labels have {size} bytes as JSON, but servers read at most {MOST_LABEL_BYTES}; pack shorter ones"


class TensorRow(NamedTuple):
    """Tensor to be written; `shape` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def weights_id(rows: Iterable[tuple[TensorRow, str]]) -> str:
    """Return BLAKE3 over the sorted lines `name dtype [shape] digest`; independent of file, order and layout."""
    lines = sorted(f"{t.name} {t.dtype} [{','.join(map(str, t.shape))}] {digest}\n" for t, digest in rows)
    return blake3("".join(lines).encode()).hexdigest()


def size_alignment(size: int) -> int:
    """Return the largest power of two that divides `size`, at most 256; 256 for an empty tensor."""
    return min(size & -size, ALIGNMENT) if size else ALIGNMENT


def canonical_order(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Sort rows by falling alignment of their size, then by name; every tensor then starts at such an alignment."""
    return sorted(rows, key=lambda row: (-size_alignment(nbytes(row.dtype, row.shape) or 0), row.name))


class WeightFile(AbstractContextManager["WeightFile"]):
    """Open safetensors file whose header has been read and checked. Callers read the data from `source`.

    path: a local path or an fsspec URL; the attributes `path` and `where` show no credentials of it. A local file stays
    readable when its name is replaced, a remote object while its content is the same. `check_unchanged()` detects
    writes. check: a callback, called every few milliseconds while waiting for a remote response; an exception that it
    raises ends the wait. most_header: the most bytes of the header; see `Manifest.most_header`.
    """

    def __init__(
        self, path: str | os.PathLike[str] | Url, check: Check | None = None, most_header: int = MAX_HEADER
    ) -> None:
        self.path = as_location(path)
        self.source = open_source(self.path, check)
        try:
            self.where = self.source.where
            self.header = read_header(self.source, most_header)
            self.tensors = self.header.tensors
            self.stamp = _read_stamp(self.header, self.where)
            if self.stamp is None:  # without digests, only the file's times show that it changed
                self.source.await_stable_mtime()
                self._check_header()
        except BaseException:
            self.close()
            raise

    def _check_header(self) -> None:
        """Raise WeightFileError if the header changed before the file's mtime was stable."""
        if read_header(self.source) != self.header:
            raise WeightFileError(
                f"{self.where}: the file was written to while it was opened. Replace files (os.replace), never rewrite "
                "them."
            )

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise WeightFileError if the file was written to or truncated since it was opened; see `ByteSource`."""
        self.source.check_unchanged(proven=proven)

    def close(self) -> None:
        self.source.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_tensors(
    tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] = MappingProxyType({})
) -> list[memoryview]:
    """Return the pieces of a small safetensors file, in canonical order."""
    order = canonical_order(TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    header = render_header(pack_ranges(order), {"format": "pt", **metadata})
    return [memoryview(header), *(memoryview(tensors[row.name].data) for row in order)]


def read_header(source: ByteSource, most: int = MAX_HEADER) -> Header:
    """Read and parse the header of a safetensors file. Raises WeightFileError."""
    prefix = bytearray(min(8, source.size))
    source.read_into([memoryview(prefix)], 0)
    length = header_length(bytes(prefix), source.size, source.where, most)
    raw = bytearray(length)
    source.read_into([memoryview(raw)], len(prefix))
    return parse_header(bytes(raw), source.size, source.where)


def holds_goldens(metadata: Mapping[str, str]) -> bool:
    """Return True if a file holds recorded calls instead of weights."""
    try:
        return "cases" in msgspec.json.decode(metadata.get(METADATA_KEY, ""), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def _read_stamp(header: Header, where: str) -> Stamp | None:
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        stamp = msgspec.json.decode(text, type=Stamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if holds_goldens(header.metadata):  # inputs alone, without a weights id
            return None
        raise DamagedFile(f"{where}: its `{METADATA_KEY}` metadata is not that of a weight file ({error})") from error
    if problem := label_problem(stamp.labels):
        raise DamagedFile(f"{where}: {problem}")
    if max(len(stamp.graph_id), len(stamp.weights_id)) > len(_UNKNOWN):
        raise DamagedFile(f"{where}: its graph id or weights id has more than 64 digits. Pack the file again.")
    bad = [name for name, digest in stamp.digests.items() if not DIGEST.fullmatch(digest)]
    if bad or stamp.digests.keys() != header.tensors.keys():
        odd = sorted(bad or stamp.digests.keys() ^ header.tensors.keys())
        raise DamagedFile(
            f"{where}: its `{METADATA_KEY}` metadata lacks one BLAKE3 digest for each tensor ({listed(odd)}). "
            "Copy the file again, or pack its checkpoint again."
        )
    if strange := {name for names in (stamp.cast or {}).values() for name in names} - header.tensors.keys():
        raise DamagedFile(
            f"{where}: its `{METADATA_KEY}` metadata says that {listed(sorted(strange))} were cast, which the "
            "file does not hold. Copy the file again, or pack its checkpoint again."
        )
    return stamp


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
) -> Iterator[tuple[PendingFile, Stamp]]:
    """Write a weight file in canonical layout to a temporary name beside `path`; the block must rename it.

    Yields the file, whose bytes are on disk, and its stamp. `data` gives each tensor's little-endian row-major bytes,
    in pieces, in the order of `canonical_order(rows)`. One tensor is in memory at a time. `cast` is recorded as it is.
    """
    order = canonical_order(rows)
    blank = Stamp(
        graph_id=graph_id,
        weights_id=_UNKNOWN,
        digests={},
        labels=dict(labels),
        cast=dict(cast) if cast else msgspec.UNSET,
    )
    with StampedFile(path, order, METADATA_KEY, labels) as file:
        digests = file.write_tensors(data, blank)
        stamp = replace(blank, weights_id=weights_id((row, digests[row.name]) for row in order), digests=digests)
        file.write_stamp(stamp)
        yield file, stamp


class StampedFile(PendingFile):
    """Safetensors file that is being written: first the tensors, then the stamp with their digests, then the name."""

    def __init__(self, path: Path, order: Sequence[TensorRow], key: str, labels: Mapping[str, str]) -> None:
        if problem := label_problem(labels):
            raise ValueError(problem)
        self._order, self._ranges = order, pack_ranges(order)
        self._key, self._labels = key, labels
        super().__init__(path)

    def write_tensors(self, data: TensorData, blank: msgspec.Struct) -> dict[str, str]:
        """Write the tensors after a gap for the header, and return their digests by name.

        blank: the stamp without digests; the gap's size is computed from it.
        """
        self._room = self.file.write(self._header(replace(blank, digests=dict.fromkeys(self._ranges, _UNKNOWN))))
        items = iter(data.items() if isinstance(data, Mapping) else data)
        digests = {}
        for row, (name, pieces) in zip(self._order, items, strict=True):
            if row.name != name:
                raise ValueError(f"expected the tensor {row.name!r} next, got {name!r}")
            digests[name] = _write_tensor(self.file.write, pieces, self._ranges[name])
        return digests

    def write_stamp(self, stamp: msgspec.Struct) -> None:
        """Write the header into the gap before the tensors, and flush all bytes to disk."""
        header = self._header(stamp)
        if len(header) != self._room:
            raise ValueError("the header changed size between two renderings")
        self.file.seek(0)
        self.file.write(header)
        self.sync()

    def _header(self, stamp: msgspec.Struct) -> bytes:
        """Return the bytes before the tensors, with room for longer labels."""
        # transformers and others refuse files without "format"
        metadata = {"format": "pt", self._key: msgspec.json.encode(stamp).decode()}
        text = json.dumps(msgspec.json.encode(self._labels).decode(), ensure_ascii=False)
        return render_header(self._ranges, metadata, reserve=max(0, LABEL_ROOM - len(text.encode())))


def _write_tensor(write: Callable[[memoryview], int], pieces: Iterable[memoryview], expected: FileTensor) -> str:
    hasher = TensorHasher()
    written = 0
    for piece in pieces:
        hasher.update(piece)
        written += write(piece)
    if written != expected.nbytes:
        raise ValueError(f"got {written} bytes for a tensor of {expected.nbytes}")
    return hasher.hexdigest()
