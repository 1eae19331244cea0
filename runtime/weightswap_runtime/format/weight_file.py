"""Weight files: one full set of weights as plain safetensors, in canonical layout when we write it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from blake3 import blake3

from weightswap_runtime.errors import DamagedFile, WeightFileError
from weightswap_runtime.sources.atomic import new_file
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url, as_location
from weightswap_runtime.sources.opening import open_source
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.digests import TensorHasher
from weightswap_runtime.tensors.dtypes import nbytes

from .header import FileTensor, Header, header_length, pack_ranges, parse_header, render_header

ALIGNMENT = 256
LABEL_ROOM = 1024
METADATA_KEY = "weightswap"
TensorData = Mapping[str, Iterable[memoryview]] | Iterator[tuple[str, Iterable[memoryview]]]
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
            self.header = read_header(self.source)
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

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def tensors(self) -> dict[str, FileTensor]:
        return self.header.tensors

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


class _Cases(msgspec.Struct):
    cases: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def holds_goldens(header: Header) -> bool:
    """Whether a file holds recorded calls instead of weights."""
    try:
        record = msgspec.json.decode(header.metadata.get(METADATA_KEY, ""), type=_Cases)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return record.cases is not msgspec.UNSET


def _read_stamp(header: Header, where: str) -> Stamp | None:
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        stamp = msgspec.json.decode(text, type=Stamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if holds_goldens(header):  # of no weights
            return None
        raise DamagedFile(f"{where}: its `{METADATA_KEY}` metadata are not those of a weight file ({error})") from error
    bad = [name for name, digest in stamp.digests.items() if not _DIGEST.fullmatch(digest)]
    if bad or stamp.digests.keys() != header.tensors.keys():
        odd = sorted(bad or stamp.digests.keys() ^ header.tensors.keys())[:5]
        raise DamagedFile(
            f"{where}: its `{METADATA_KEY}` metadata lacks one BLAKE3 digest for each tensor ({', '.join(odd)}). "
            "Pack the file again, or remove the metadata."
        )
    if strange := {name for names in (stamp.cast or {}).values() for name in names} - header.tensors.keys():
        raise DamagedFile(
            f"{where}: its `{METADATA_KEY}` metadata says that {', '.join(sorted(strange)[:5])} were cast, which it "
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
    cast: Mapping[str, list[str]] | None = None,
    rename: Callable[[Stamp], Path] | None = None,
) -> Stamp:
    """Write a weight file in canonical layout; it appears under `path` whole or not at all.

    `data` gives each tensor's little-endian row-major bytes, in pieces, in the order of `canonical_order(rows)`.
    One tensor is in memory at a time. `cast` is recorded as it is. `rename` gives another path in the same folder, when
    the ids are known. Returns the stamp that the file carries.
    """
    order = canonical_order(rows)
    ranges = pack_ranges(order)

    def stamped(digests: Mapping[str, str]) -> Stamp:
        return Stamp(
            graph_id=graph_id,
            weights_id=weights_id((row, digests[row.name]) for row in order),
            digests=dict(digests),
            labels=dict(labels or {}),
            cast=dict(cast) if cast else msgspec.UNSET,
        )

    digests = write_tensors(
        Path(path),
        order,
        data,
        lambda digests: render_stamped(ranges, METADATA_KEY, stamped(digests), labels or {}),
        lambda digests: rename(stamped(digests)) if rename else Path(path),
    )
    return stamped(digests)


def write_tensors(
    path: Path,
    order: Sequence[TensorRow],
    data: TensorData,
    header: Callable[[Mapping[str, str]], bytes],
    rename: Callable[[Mapping[str, str]], Path] | None = None,
) -> Mapping[str, str]:
    """Write a safetensors file whose header holds digests; it appears whole or not at all. Returns the digests.

    `header` renders the header from digests by name, always with the same length; `rename` gives another path.
    """
    ranges = pack_ranges(order)
    items = iter(data.items() if isinstance(data, Mapping) else data)
    digests = dict.fromkeys(ranges, "0" * 64)
    with new_file(path, lambda: rename(digests) if rename else path) as file:
        placeholder = header(digests)
        file.write(placeholder)
        for row, (name, pieces) in zip(order, items, strict=True):
            if row.name != name:
                raise ValueError(f"tensor {name!r} came where {row.name!r} belongs")
            digests[name] = _write_tensor(file.write, pieces, ranges[name])
        final = header(digests)
        if len(final) != len(placeholder):
            raise ValueError("the header changed its size between two renderings")
        file.seek(0)
        file.write(final)
    return digests


def _write_tensor(write: Callable[[memoryview], int], pieces: Iterable[memoryview], expected: FileTensor) -> str:
    hasher = TensorHasher()
    written = 0
    for piece in pieces:
        hasher.update(piece)
        written += write(piece)
    if written != expected.nbytes:
        raise ValueError(f"{written} bytes came for a tensor of {expected.nbytes}")
    return hasher.hexdigest()


def render_stamped(
    ranges: Mapping[str, FileTensor], key: str, stamp: msgspec.Struct, labels: Mapping[str, str]
) -> bytes:
    """The header of a file that carries a stamp under `key`, with room for longer labels."""
    # "format": transformers and others refuse files without it
    metadata = {"format": "pt", key: msgspec.json.encode(stamp).decode()}
    text = json.dumps(msgspec.json.encode(labels).decode(), ensure_ascii=False)
    return render_header(ranges, metadata, reserve=max(0, LABEL_ROOM - len(text.encode())))
