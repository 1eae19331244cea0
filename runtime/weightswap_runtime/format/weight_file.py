"""Weight files: one full set of weights as plain safetensors, in canonical layout when we write it."""

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

from .header import FileTensor, Header, header_length, pack_ranges, parse_header, render_header

ALIGNMENT = 256
LABEL_ROOM = 1024
METADATA_KEY = "weightswap"
TensorData = Mapping[str, Iterable[memoryview]] | Iterator[tuple[str, Iterable[memoryview]]]
_UNKNOWN = "0" * 64  # an id or a digest, before the bytes are there


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What weightswap adds to `__metadata__`. `digests` are `tensor_digest`s by tensor name.

    `cast` says which tensors were cast when they were packed: the dtype they had -> their names, sorted. It is absent
    from files in which none was.
    """

    graph_id: str
    weights_id: str
    digests: dict[str, str]
    labels: dict[str, str] = {}
    cast: dict[str, list[str]] | msgspec.UnsetType = msgspec.UNSET


class TensorRow(NamedTuple):
    """A tensor to be written; `shape` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def weights_id(rows: Iterable[tuple[TensorRow, str]]) -> str:
    """BLAKE3 over the sorted lines `name dtype [shape] digest`; independent of file, order and layout."""
    lines = sorted(f"{t.name} {t.dtype} [{','.join(map(str, t.shape))}] {digest}\n" for t, digest in rows)
    return blake3("".join(lines).encode()).hexdigest()


def size_alignment(size: int) -> int:
    """The largest power of two that divides `size`, at most 256; an empty tensor fits anywhere."""
    return min(size & -size, ALIGNMENT) if size else ALIGNMENT


def canonical_order(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Rows by falling alignment of their size, then by name: every tensor starts at a multiple of that alignment."""
    return sorted(rows, key=lambda row: (-size_alignment(nbytes(row.dtype, row.shape) or 0), row.name))


class WeightFile(AbstractContextManager["WeightFile"]):
    """An open safetensors file whose header was read and checked. Data is read from `source` by the caller.

    path: a local path, or an fsspec URL, of which `path` and `where` show no credentials. A local file stays readable
    when its name is replaced, an object as long as it has the same content. `check_unchanged()` tells whether it was
    written to. check: called every few milliseconds while a remote answer is waited for; what it raises ends the wait.
    """

    def __init__(self, path: str | os.PathLike[str] | Url, check: Check | None = None) -> None:
        self.path = as_location(path)
        self.source = open_source(self.path, check)
        try:
            self.where = self.source.where
            self.header = read_header(self.source)
            self.tensors = self.header.tensors
            self.stamp = _read_stamp(self.header, self.where)
            if self.stamp is None:  # nothing but its times can tell that it changes
                self.source.await_stable_mtime()
                self._check_header()
        except BaseException:
            self.close()
            raise

    def _check_header(self) -> None:
        """What was read before the file had settled may have been another's."""
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
    """The pieces of a small safetensors file, in canonical order."""
    order = canonical_order(TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    header = render_header(pack_ranges(order), {"format": "pt", **metadata})
    return [memoryview(header), *(memoryview(tensors[row.name].data) for row in order)]


def read_header(source: ByteSource) -> Header:
    """The header of a safetensors file. Raises WeightFileError."""
    prefix = bytearray(min(8, source.size))
    source.read_into([memoryview(prefix)], 0)
    length = header_length(bytes(prefix), source.size, source.where)
    raw = bytearray(length)
    source.read_into([memoryview(raw)], len(prefix))
    return parse_header(bytes(raw), source.size, source.where)


def holds_goldens(metadata: Mapping[str, str]) -> bool:
    """Whether a file holds recorded calls instead of weights."""
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
        if holds_goldens(header.metadata):  # of no weights
            return None
        raise DamagedFile(f"{where}: its `{METADATA_KEY}` metadata are not those of a weight file ({error})") from error
    bad = [name for name, digest in stamp.digests.items() if not DIGEST.fullmatch(digest)]
    if bad or stamp.digests.keys() != header.tensors.keys():
        odd = sorted(bad or stamp.digests.keys() ^ header.tensors.keys())
        raise DamagedFile(
            f"{where}: its `{METADATA_KEY}` metadata lacks one BLAKE3 digest for each tensor ({listed(odd)}). "
            "Pack the file again, or remove the metadata."
        )
    if strange := {name for names in (stamp.cast or {}).values() for name in names} - header.tensors.keys():
        raise DamagedFile(
            f"{where}: its `{METADATA_KEY}` metadata says that {listed(sorted(strange))} were cast, which it "
            "does not hold. Pack the file again, or remove the metadata."
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
    """Write a weight file; it appears under `path` whole or not at all. Otherwise as `new_weight_file`.

    Returns the stamp that the file carries.
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
    """A weight file in canonical layout, on disk beside `path`, that the block is to rename; and the stamp in it.

    `data` gives each tensor's little-endian row-major bytes, in pieces, in the order of `canonical_order(rows)`.
    One tensor is in memory at a time. `cast` is recorded as it is.
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
    """A safetensors file that is being written: its tensors, the stamp that has their digests, and then its name."""

    def __init__(self, path: Path, order: Sequence[TensorRow], key: str, labels: Mapping[str, str]) -> None:
        self._order, self._ranges = order, pack_ranges(order)
        self._key, self._labels = key, labels
        super().__init__(path)

    def write_tensors(self, data: TensorData, blank: msgspec.Struct) -> dict[str, str]:
        """Write the tensors, behind room for the stamp. Returns their digests by name.

        blank: the stamp, still without digests.
        """
        self._room = self.file.write(self._header(replace(blank, digests=dict.fromkeys(self._ranges, _UNKNOWN))))
        items = iter(data.items() if isinstance(data, Mapping) else data)
        digests = {}
        for row, (name, pieces) in zip(self._order, items, strict=True):
            if row.name != name:
                raise ValueError(f"tensor {name!r} came where {row.name!r} belongs")
            digests[name] = _write_tensor(self.file.write, pieces, self._ranges[name])
        return digests

    def write_stamp(self, stamp: msgspec.Struct) -> None:
        """Fill the room before the tensors; all bytes are on disk then."""
        header = self._header(stamp)
        if len(header) != self._room:
            raise ValueError("the header changed its size between two renderings")
        self.file.seek(0)
        self.file.write(header)
        self.sync()

    def _header(self, stamp: msgspec.Struct) -> bytes:
        """The bytes before the tensors, with room for longer labels."""
        # "format": transformers and others refuse files without it
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
        raise ValueError(f"{written} bytes came for a tensor of {expected.nbytes}")
    return hasher.hexdigest()
