"""safetensors files: reading headers that nobody vouches for, and writing weight files in canonical layout.

A header says which bytes are which tensor, so it is checked wholly before a byte of data is read: names, types, and
that the ranges cover the data without gap or overlap. Files that weightswap writes also carry a stamp with digests.
The layout, the stamp and what is refused are specified in docs/format.md.
"""

from __future__ import annotations

import json
import os
import re
import struct
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from json import JSONDecoder
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from weightswap_runtime.errors import WeightFileError, brief, listed
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url, as_location
from weightswap_runtime.sources.opening import open_source
from weightswap_runtime.sources.writing import PendingFile
from weightswap_runtime.tensors import (
    DIGEST,
    DTYPES,
    MAX_DIMENSIONS,
    Blocks,
    TensorBytes,
    TensorHasher,
    block_count,
    nbytes,
    tensor_digest,
)

MAX_HEADER = 100_000_000  # as in the safetensors library
LEAST_HEADER = 4 << 20  # bytes that any reader accepts
METADATA_KEY = "weightswap"
DELTA_KEY = "weightswap_delta"  # of the stamp of a delta, which has the digests of its tensors, too
MOST_LABEL_BYTES = 64 << 10  # servers keep them for each set of weights, and name them in their answers
ALIGNMENT = 256  # of the largest tensors in a file, and of all in an arena
FOREIGN_HEAD = 512  # bytes that `foreign_kind` looks at

_DATA_ALIGNMENT = 4096
_LABEL_SPACE = 1024  # two sets of weights have the same layout unless labels are longer
_LENGTH = struct.Struct("<Q")
_UNKNOWN = "0" * 64  # stands for an id or a digest until the bytes are written
_DIGEST_BYTES = 32
_ONNX = re.compile(rb"\x08[\x01-\x3f][\x12\x1a\x22\x28\x32\x3a\x42]")  # a ModelProto: ir_version, and a next field
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd


class FileTensor(NamedTuple):
    """Tensor of a file. `begin` and `end` are byte offsets from the start of the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Header(NamedTuple):
    """Parsed header."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]
    data_start: int  # the offset in the file at which the data section begins

    def contents(self, data: memoryview) -> dict[str, TensorBytes]:
        """Return the tensors as views of `data`, the file's data section."""
        return {name: TensorBytes(t.dtype, t.shape, data[t.begin : t.end]) for name, t in self.tensors.items()}


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Entry that weightswap adds to `__metadata__`."""

    graph_id: str
    weights_id: str
    digests: dict[str, str]  # the `tensor_digest` of each tensor of the file
    labels: dict[str, str] = {}
    cast: dict[str, list[str]] | msgspec.UnsetType = msgspec.UNSET  # former dtype -> sorted names; absent if none was
    # the digests of the blocks of tensors that have several, end to end, as Base64: for those who read a part alone
    blocks: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    def blocks_of(self, name: str) -> Blocks | None:
        """Return the digests of a tensor's blocks, which its digest proves; None if the file does not have them."""
        text = (self.blocks or {}).get(name)
        if text is None:
            return None
        raw = b64decode(text)
        return tuple(raw[start : start + _DIGEST_BYTES] for start in range(0, len(raw), _DIGEST_BYTES))


class TensorRow(NamedTuple):
    """Tensor to be written; `shape` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightFile(AbstractContextManager["WeightFile"]):
    """Open safetensors file whose header has been read and checked. Callers read the data from `source`.

    path: a local path or an fsspec URL; the attributes `path` and `where` show no credentials of it. A local file stays
    readable when its name is replaced, a remote object while its content is the same. `check_unchanged()` detects
    writes. check: a callback, called every few milliseconds while waiting for a remote response; an exception that it
    raises ends the wait. most_header: the most bytes of the header; see `Manifest.most_header`. source: of the content,
    if it is not at the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Url,
        check: Check | None = None,
        most_header: int = MAX_HEADER,
        source: ByteSource | None = None,
    ) -> None:
        self.path = as_location(path)
        self.source = source or open_source(self.path, check)
        try:
            self.where = self.source.where
            self.header = read_header(self.source, most_header)
            self.tensors = self.header.tensors
            self.stamp = _read_stamp(self.header, self.where)
            if (
                self.stamp is None and DELTA_KEY not in self.header.metadata
            ):  # without digests, only the file's times show that it changed
                self.source.await_stable_mtime()
                if read_header(self.source) != self.header:  # it may have changed before they were looked at
                    raise WeightFileError(
                        f"{self.where}: the file was written to while it was opened. Replace files (os.replace), never "
                        "rewrite them."
                    )
        except BaseException:
            self.close()
            raise

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise WeightFileError if the file was written to or truncated since it was opened; see `ByteSource`."""
        self.source.check_unchanged(proven=proven)

    def close(self) -> None:
        self.source.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def foreign_kind(head: bytes) -> str:
    """Return what a file is, and what to do, if its first 512 bytes are those of no checkpoint; else an empty string.

    Eight bytes are enough for all kinds but tar archives.
    """
    # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    if head.startswith(b"version "):
        return "a git-lfs pointer, not the file itself. Fetch the file: git lfs pull"
    if head.lstrip()[:1] == b"<":
        return "a web page (HTML or XML), as a server answers instead of a file. Download the file itself"
    if head.startswith(b"GGUF"):
        return "a GGUF file, as llama.cpp reads. Give the checkpoint that it was made of"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "an HDF5 file, as Keras writes. Give a checkpoint of the PyTorch model"
    if _ONNX.match(head):
        return "an ONNX file, a graph. Give a checkpoint of the PyTorch model that it was made of"
    if head.startswith(_COMPRESSED):
        return "a compressed file. Unpack it, and give the checkpoint that is in it"
    if head[257:262] == b"ustar":
        return "a tar archive. Unpack it, and give the checkpoint that is in it"
    return ""


def is_safetensors(head: bytes) -> bool:
    """Return whether a file begins as safetensors files do."""
    return head[_LENGTH.size : _LENGTH.size + 1] == b"{" and _LENGTH.unpack_from(head)[0] <= MAX_HEADER


def read_header(source: ByteSource, most: int = MAX_HEADER) -> Header:
    """Read and parse the header of a safetensors file. Raises WeightFileError."""
    prefix = bytearray(min(_LENGTH.size, source.size))
    source.read_into([memoryview(prefix)], 0)
    length = header_length(bytes(prefix), source.size, source.where, most)
    raw = bytearray(length)
    source.read_into([memoryview(raw)], len(prefix))
    return parse_header(bytes(raw), source.size, source.where)


def parse_file(raw: bytes, where: str, most: int = MAX_HEADER) -> tuple[dict[str, TensorBytes], dict[str, str]]:
    """Return tensors and metadata of a whole file in memory. Raises what `header_length` and `parse_header` raise."""
    length = header_length(raw[: _LENGTH.size], len(raw), where, most)
    header = parse_header(raw[_LENGTH.size : _LENGTH.size + length], len(raw), where)
    return header.contents(memoryview(raw)[header.data_start :]), header.metadata


def header_length(prefix: bytes, file_size: int, where: str, most: int = MAX_HEADER) -> int:
    """Decode the first eight bytes of a file, and return how many bytes of JSON follow them, at most `most`.

    Raises WeightFileError: truncated if the file is too short, else damaged.
    """
    if len(prefix) < _LENGTH.size:
        _cut_off(where, f"{file_size} bytes are too few for a safetensors file, which starts with an 8-byte length")
    length: int = _LENGTH.unpack(prefix)[0]
    if prefix.startswith(b"PK\x03\x04"):
        _refuse_torch(where, "a zip file, like those that torch.save writes")
    if length > MAX_HEADER and prefix.startswith(b"\x80\x02"):
        _refuse_torch(where, "a pickle, like those that old versions of torch.save wrote")
    if length > MAX_HEADER and (foreign := foreign_kind(prefix)):
        raise WeightFileError(f"{where}: {foreign}", reason="damaged")
    if length > MAX_HEADER:
        _refuse(where, f"damaged, or not a safetensors file: header of {length} bytes, the format allows {MAX_HEADER}")
    if _LENGTH.size + length > file_size:
        _cut_off(where, f"the header claims {length} bytes, the file has {file_size - _LENGTH.size} after its length")
    if length > most:
        raise WeightFileError(
            f"{where}: has a header of {length} bytes; for this model at most {most} are read. Give a file with fewer "
            "tensors and less metadata.",
            reason="damaged",
        )
    return length


def _refuse_torch(where: str, what: str) -> NoReturn:
    name = "Give it a name that ends with .pt, and pack" if where.endswith(".safetensors") else "Pack"
    raise WeightFileError(
        f"{where}: {what}, not a safetensors file. {name} it on the build side: weightswap pack CHECKPOINT.pt ARTIFACT "
        "-o FILE.safetensors",
        reason="damaged",
    )


def parse_header(raw: bytes, file_size: int, where: str) -> Header:
    """Parse the JSON part `raw` of a file of `file_size` bytes, and check every tensor's range.

    Raises WeightFileError: truncated if the file is shorter than the header says, else damaged.
    """
    data_start = _LENGTH.size + len(raw)
    if not raw.startswith(b"{"):
        _refuse(where, "the header does not begin with '{', so it is not a safetensors header")
    try:
        tensors, metadata = _HeaderReader(raw.decode(), where).read()
    except (ValueError, RecursionError) as error:
        _refuse(where, f"the header is not JSON, or has a long entry ({error})")
    _check_coverage(tensors, file_size - data_start, where)
    return Header(tensors, metadata, data_start)


def _refuse(where: str, problem: str) -> NoReturn:
    raise WeightFileError(f"{where}: {problem}. Write it again, or copy it again.", reason="damaged")


def _cut_off(where: str, problem: str) -> NoReturn:
    raise WeightFileError(f"{where}: {problem}. Write it again, or copy it again.", reason="truncated")


class _HeaderReader:
    """Reader of a header's JSON, value by value.

    The decoder, written in C, holds the interpreter until it is done: 100 MB at once would stop all calls for seconds.
    """

    _SPACES = re.compile(r"[ \t\n\r]*+")
    _MOST_ENTRY = 4096  # characters of one tensor's entry: one value must not be most of the header, either

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._place = text, where, 0
        self._decode = JSONDecoder(object_pairs_hook=self._without_duplicates).raw_decode

    def read(self) -> tuple[dict[str, FileTensor], dict[str, str]]:
        """Return the tensors and the metadata. Raises ValueError and RecursionError for what is not JSON."""
        tensors: dict[str, FileTensor] = {}
        metadata: dict[str, str] = {}
        for name in self._members():
            if name != "__metadata__":
                tensors[name] = _tensor(name, self._entry(), self._where)
                continue
            if self._next() == "n" and self._text.startswith("null", self._place):  # the package takes it for none
                self._place += len("null")
                continue
            self._expect_text("{")
            for key in self._members():
                self._expect_text('"')
                metadata[key] = self._string()
        if self._next():
            raise ValueError("it goes on after its end")
        return tensors, metadata

    def _members(self) -> Iterator[str]:
        """Yield each name of an object; the caller reads its value, which comes next."""
        seen: set[str] = set()
        self._pass("{")
        while self._next() != "}":
            if seen:
                self._pass(",")
            name = self._string()
            if name in seen:
                self._refuse_duplicates([name])
            seen.add(name)
            self._pass(":")
            yield name
        self._pass("}")

    def _next(self) -> str:
        """Return the next character that is no space, or an empty string."""
        self._place = self._SPACES.match(self._text, self._place).end()  # type: ignore[union-attr]
        return self._text[self._place : self._place + 1]

    def _pass(self, expected: str) -> None:
        if self._next() != expected:
            raise ValueError(f"expected {expected!r} at character {self._place}")
        self._place += 1

    def _expect_text(self, begins: str) -> None:
        if self._next() != begins:
            _refuse(self._where, "__metadata__ is not an object of strings")

    def _string(self) -> str:
        if self._next() != '"':
            raise ValueError(f"expected a string at character {self._place}")
        text, self._place = self._decode(self._text, self._place)
        return str(text)

    def _entry(self) -> object:
        self._next()
        entry, length = self._decode(self._text[self._place : self._place + self._MOST_ENTRY])
        self._place += length
        return entry

    def _without_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            self._refuse_duplicates(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return document

    def _refuse_duplicates(self, names: Iterable[str]) -> NoReturn:
        _refuse(self._where, f"the header has duplicate keys: {listed(sorted(map(brief, names)))}")


def _tensor(name: str, entry: object, where: str) -> FileTensor:
    try:
        name.encode()
    except UnicodeEncodeError:
        _refuse(where, f"the name {_short(name)!a} is not Unicode text")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        _refuse(where, f"{_short(name)} is not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(where, f"{_short(name)} has the unknown dtype {_short(dtype)}; expected one of {', '.join(DTYPES)}")
    if not _naturals(shape, MAX_DIMENSIONS):
        _refuse(
            where,
            f"{_short(name)} has the shape {_short(shape)}, which is not a list of at most {MAX_DIMENSIONS} sizes",
        )
    if not _naturals(offsets, 2) or len(offsets) != 2:
        _refuse(where, f"{_short(name)} has the data_offsets {_short(offsets)}, which are not two byte offsets")
    begin, end = offsets
    size = nbytes(dtype, shape)
    if size != end - begin:
        _refuse(where, f"{_short(name)} is {dtype}{shape}, {size} bytes, but its range is [{begin}, {end}]")
    return FileTensor(dtype, tuple(shape), begin, end)


def _naturals(values: object, most: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_coverage(tensors: Mapping[str, FileTensor], data_size: int, where: str) -> None:
    """Check that every byte of the data section belongs to exactly one tensor."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < position:
            _refuse(
                where, f"{_short(name)} begins at {tensor.begin}, inside the tensor before it, which ends at {position}"
            )
        if tensor.begin > position:
            _refuse(where, f"bytes {position} to {tensor.begin} belong to no tensor ({_short(name)} comes next)")
        position = tensor.end
    if position > data_size:
        _cut_off(where, f"the tensors need {position} bytes, the file holds {data_size}: it is truncated")
    if position < data_size:
        _refuse(where, f"{data_size - position} bytes follow the last tensor")


def _read_stamp(header: Header, where: str) -> Stamp | None:
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        stamp = msgspec.json.decode(text, type=Stamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if holds_goldens(header.metadata):  # inputs alone, without a weights id
            return None
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata is not that of a weight file ({error})", reason="damaged"
        ) from error
    if problem := label_problem(stamp.labels):
        raise WeightFileError(f"{where}: {problem}", reason="damaged")
    if max(len(stamp.graph_id), len(stamp.weights_id)) > len(_UNKNOWN):
        raise WeightFileError(
            f"{where}: its graph id or weights id has more than 64 digits. Pack the file again.", reason="damaged"
        )
    bad = [name for name, digest in stamp.digests.items() if not DIGEST.fullmatch(digest)]
    if bad or stamp.digests.keys() != header.tensors.keys():
        odd = sorted(bad or stamp.digests.keys() ^ header.tensors.keys())
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata lacks one BLAKE3 digest for each tensor ({listed(odd)}). "
            "Copy the file again, or pack its checkpoint again.",
            reason="damaged",
        )
    _check_details(stamp, header, where)
    return stamp


def _check_details(stamp: Stamp, header: Header, where: str) -> None:
    """Raise WeightFileError if what a stamp says about some tensors cannot be of those in the file."""
    strange = {name for names in (stamp.cast or {}).values() for name in names} - header.tensors.keys()
    short = [name for name, text in (stamp.blocks or {}).items() if not _fits_blocks(text, header.tensors.get(name))]
    for names, problem in (
        (strange, "says that {} were cast, which the file does not hold"),
        (short, "lacks one BLAKE3 digest for each block of {}"),
    ):
        if names:
            raise WeightFileError(
                f"{where}: its `{METADATA_KEY}` metadata {problem.format(listed(sorted(names)))}. Copy the file again, "
                "or pack its checkpoint again.",
                reason="damaged",
            )


def _fits_blocks(text: str, tensor: FileTensor | None) -> bool:
    """Return whether Base64 has as many bytes as the digests of a tensor's blocks."""
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        return False
    return tensor is not None and len(raw) == block_count(tensor.nbytes) * _DIGEST_BYTES


def holds_goldens(metadata: Mapping[str, str]) -> bool:
    """Return True if a file holds recorded calls instead of weights."""
    try:
        return "cases" in msgspec.json.decode(metadata.get(METADATA_KEY, ""), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def label_problem(labels: Mapping[str, str]) -> str:
    """Return what is wrong with the labels of a file; an empty string if nothing is."""
    try:
        size = len(msgspec.json.encode(labels))
    except UnicodeEncodeError as error:
        return f"the label {error.object!a:.200} is not valid Unicode"
    if size <= MOST_LABEL_BYTES:
        return ""
    return f"its labels have {size} bytes as JSON, but servers read at most {MOST_LABEL_BYTES}; pack shorter ones"


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
        blocks={name: _base64([bytes(_DIGEST_BYTES)] * count) for name, count in several.items()} or msgspec.UNSET,
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
    blocks = -(-(_LENGTH.size + len(text) + reserve) // _DATA_ALIGNMENT)
    size = blocks * _DATA_ALIGNMENT - _LENGTH.size
    if size > MAX_HEADER:
        raise WeightFileError(f"a header of {size} bytes would be needed; safetensors allows {MAX_HEADER}")
    return _LENGTH.pack(size) + text.ljust(size)
