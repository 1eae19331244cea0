"""safetensors files: reading headers that nobody vouches for. `canonical` writes them.

A header says which bytes are which tensor, so it is checked wholly before a byte of data is read: names, types, and
that the ranges cover the data without gap or overlap. Files that weightswap writes also carry a stamp with digests.
The layout, the stamp and what is refused are specified in docs/format.md.
"""

from __future__ import annotations

import os
import re
import struct
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from json import JSONDecoder
from typing import Any, NamedTuple, NoReturn

import msgspec
from blake3 import blake3

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import WeightFileError, brief, listed
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url, as_location
from weightswap_runtime.sources.opening import open_source
from weightswap_runtime.tensors import (
    DIGEST,
    DTYPES,
    MAX_DIMENSIONS,
    Blocks,
    TensorBytes,
    block_count,
    nbytes,
)

MAX_HEADER = 100_000_000  # as in the safetensors library
LEAST_HEADER = 4 << 20  # bytes that any reader accepts
METADATA_KEY = "weightswap"
DELTA_KEY = "weightswap_delta"  # of the stamp of a delta, which has the digests of its tensors, too
MOST_LABEL_BYTES = 64 << 10  # servers keep them for each set of weights, and name them in their answers
ALIGNMENT = 256  # of the largest tensors in a file, and of all in an arena
FOREIGN_HEAD = 512  # bytes that `foreign_kind` looks at

LENGTH = struct.Struct("<Q")
DIGEST_BYTES = 32  # of BLAKE3
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
        return tuple(raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES))


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
    return head[LENGTH.size : LENGTH.size + 1] == b"{" and LENGTH.unpack_from(head)[0] <= MAX_HEADER


def read_header(source: ByteSource, most: int = MAX_HEADER) -> Header:
    """Read and parse the header of a safetensors file. Raises WeightFileError."""
    prefix = bytearray(min(LENGTH.size, source.size))
    source.read_into([memoryview(prefix)], 0)
    length = header_length(bytes(prefix), source.size, source.where, most)
    raw = bytearray(length)
    source.read_into([memoryview(raw)], len(prefix))
    return parse_header(bytes(raw), source.size, source.where)


def parse_file(
    raw: bytes | bytearray, where: str, most: int = MAX_HEADER
) -> tuple[dict[str, TensorBytes], dict[str, str]]:
    """Return tensors and metadata of a whole file in memory. Raises what `header_length` and `parse_header` raise."""
    length = header_length(bytes(raw[: LENGTH.size]), len(raw), where, most)
    header = parse_header(bytes(raw[LENGTH.size : LENGTH.size + length]), len(raw), where)
    return header.contents(memoryview(raw)[header.data_start :]), header.metadata


def header_length(prefix: bytes, file_size: int, where: str, most: int = MAX_HEADER) -> int:
    """Decode the first eight bytes of a file, and return how many bytes of JSON follow them, at most `most`.

    Raises WeightFileError: truncated if the file is too short, else damaged.
    """
    if len(prefix) < LENGTH.size:
        _cut_off(where, f"{file_size} bytes are too few for a safetensors file, which starts with an 8-byte length")
    length: int = LENGTH.unpack(prefix)[0]
    if prefix.startswith(b"PK\x03\x04"):
        _refuse_torch(where, "a zip file, like those that torch.save writes")
    if length > MAX_HEADER and prefix.startswith(b"\x80\x02"):
        _refuse_torch(where, "a pickle, like those that old versions of torch.save wrote")
    if length > MAX_HEADER and (foreign := foreign_kind(prefix)):
        raise WeightFileError(f"{where}: {foreign}", reason="damaged")
    if length > MAX_HEADER:
        _refuse(where, f"damaged, or not a safetensors file: header of {length} bytes, the format allows {MAX_HEADER}")
    if LENGTH.size + length > file_size:
        _cut_off(where, f"the header claims {length} bytes, the file has {file_size - LENGTH.size} after its length")
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
    data_start = LENGTH.size + len(raw)
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
        stamp = from_json(text, Stamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if holds_goldens(header.metadata):  # inputs alone, without a weights id
            return None
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata is not that of a weight file ({error})", reason="damaged"
        ) from error
    if problem := label_problem(stamp.labels):
        raise WeightFileError(f"{where}: {problem}", reason="damaged")
    if max(len(stamp.graph_id), len(stamp.weights_id)) > 2 * DIGEST_BYTES:
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
    return tensor is not None and len(raw) == block_count(tensor.nbytes) * DIGEST_BYTES


def holds_goldens(metadata: Mapping[str, str]) -> bool:
    """Return True if a file holds recorded calls instead of weights."""
    try:
        return "cases" in from_json(metadata.get(METADATA_KEY, ""), dict[str, msgspec.Raw])
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
