"""Header of a safetensors file: parsed strictly, written in the canonical layout.

Format: https://github.com/huggingface/safetensors#format. The checks are those of the reference
implementation and two more (duplicate keys, byte ranges in any order without holes).
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from json import JSONDecoder
from typing import Any, NamedTuple, NoReturn, TypeVar

from weightswap_runtime.errors import DamagedFile, TruncatedFile, WeightFileError
from weightswap_runtime.messages import brief, listed
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.dtypes import DTYPES, MAX_DIMENSIONS, nbytes

MAX_HEADER = 100_000_000
LEAST_HEADER = 4 << 20  # bytes that any reader accepts
DATA_ALIGNMENT = 4096
_LENGTH = struct.Struct("<Q")
_ZIP = b"PK\x03\x04"
_LFS, _MAX_LFS = b"version ", 1024  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_AGAIN = "Write it again, or copy it again."
_METADATA = "__metadata__"
_NOT_STRINGS = "__metadata__ is not an object of strings"
_MOST_ENTRY = 4096  # characters of one tensor's entry
_SPACES = re.compile(r"[ \t\n\r]*+")
T = TypeVar("T")
LFS_POINTER = "a git-lfs pointer, not the file itself. Fetch the file: git lfs pull"


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
    """Parsed header. `data_start` is the offset in the file at which the data section begins."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]
    data_start: int

    def contents(self, data: memoryview) -> dict[str, TensorBytes]:
        """Return the tensors as views of `data`, the file's data section."""
        return {name: TensorBytes(t.dtype, t.shape, data[t.begin : t.end]) for name, t in self.tensors.items()}


def header_length(prefix: bytes, file_size: int, where: str, most: int = MAX_HEADER) -> int:
    """Decode the first eight bytes of a file, and return how many bytes of JSON follow them, at most `most`.

    Raises DamagedFile, and TruncatedFile if the file is too short.
    """
    if len(prefix) < _LENGTH.size:
        _cut_off(where, f"{file_size} bytes are too few for a safetensors file, which starts with an 8-byte length")
    if prefix.startswith(_ZIP):
        raise DamagedFile(
            f"{where}: a zip file, like those that torch.save writes, not a safetensors file. "
            "Pack it on the build side: weightswap pack CHECKPOINT ARTIFACT -o FILE.safetensors"
        )
    if prefix == _LFS and file_size < _MAX_LFS:
        raise DamagedFile(f"{where}: {LFS_POINTER}")
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_HEADER:
        _refuse(where, f"damaged, or not a safetensors file: header of {length} bytes, the format allows {MAX_HEADER}")
    if _LENGTH.size + length > file_size:
        _cut_off(where, f"the header claims {length} bytes, the file has {file_size - _LENGTH.size} after its length")
    if length > most:
        raise DamagedFile(
            f"{where}: has a header of {length} bytes; for this model at most {most} are read. Give a file with fewer "
            "tensors and less metadata."
        )
    return length


def parse_header(raw: bytes, file_size: int, where: str) -> Header:
    """Parse the JSON part `raw` of a file of `file_size` bytes, and check every tensor's range.

    Raises DamagedFile, and TruncatedFile if the file is shorter than the header says.
    """
    data_start = _LENGTH.size + len(raw)
    if not raw.startswith(b"{"):
        _refuse(where, "the header does not begin with '{', so it is not a safetensors header")
    try:
        tensors, metadata = _Reader(raw.decode(), where).header()
    except (ValueError, RecursionError) as error:
        _refuse(where, f"the header is not JSON, or has a long entry ({error})")
    _check_names(tensors, where)
    _check_coverage(tensors, file_size - data_start, where)
    return Header(tensors, metadata, data_start)


def parse_file(raw: bytes, where: str, most: int = MAX_HEADER) -> tuple[dict[str, TensorBytes], dict[str, str]]:
    """Return tensors and metadata of a whole file in memory. Raises what `header_length` and `parse_header` raise."""
    length = header_length(raw[:8], len(raw), where, most)
    header = parse_header(raw[8 : 8 + length], len(raw), where)
    return header.contents(memoryview(raw)[header.data_start :]), header.metadata


def render_header(tensors: Mapping[str, FileTensor], metadata: Mapping[str, str], reserve: int = 0) -> bytes:
    """Return the bytes before the data section, padded with spaces to a multiple of 4096.

    `reserve` is the number of extra bytes to leave room for, so that longer metadata does not move the data section.
    """
    entries = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
        for name, t in tensors.items()
    }
    document = {_METADATA: dict(metadata), **entries}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    blocks = -(-(_LENGTH.size + len(text) + reserve) // DATA_ALIGNMENT)
    size = blocks * DATA_ALIGNMENT - _LENGTH.size
    if size > MAX_HEADER:
        raise WeightFileError(f"a header of {size} bytes would be needed; safetensors allows {MAX_HEADER}")
    return _LENGTH.pack(size) + text.ljust(size)


def _refuse(where: str, problem: str) -> NoReturn:
    raise DamagedFile(f"{where}: {problem}. {_AGAIN}")


def _cut_off(where: str, problem: str) -> NoReturn:
    raise TruncatedFile(f"{where}: {problem}. {_AGAIN}")


class _Reader:
    """Reader of a header's JSON, value by value: while one is decoded, no other thread runs."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where, self._place = text, where, 0
        self._decode = JSONDecoder(object_pairs_hook=self._unique).raw_decode

    def header(self) -> tuple[dict[str, FileTensor], dict[str, str]]:
        """Return the tensors and the metadata. Raises ValueError and RecursionError for what is not JSON."""
        metadata: dict[str, str] = {}

        def value(name: str) -> FileTensor | None:
            if name != _METADATA:
                return _tensor(name, self._entry(), self._where)
            if self._next() == "{":
                metadata.update(self._object(self._text_of))
            else:
                _refuse(self._where, _NOT_STRINGS)
            return None

        found = self._object(value)
        if self._next():
            raise ValueError("it goes on after its end")
        return {name: tensor for name, tensor in found.items() if tensor is not None}, metadata

    def _object(self, value: Callable[[str], T]) -> dict[str, T]:
        """Read an object. value: reads the value of a name."""
        members: dict[str, T] = {}
        self._pass("{")
        while self._next() != "}":
            if members:
                self._pass(",")
            name = self._string()
            if name in members:
                self._unique([(name, None), (name, None)])
            self._pass(":")
            members[name] = value(name)
        self._pass("}")
        return members

    def _text_of(self, name: str) -> str:
        if self._next() != '"':
            _refuse(self._where, _NOT_STRINGS)
        return self._string()

    def _next(self) -> str:
        """Return the next character that is no space, or an empty string."""
        self._place = _SPACES.match(self._text, self._place).end()  # type: ignore[union-attr]
        return self._text[self._place : self._place + 1]

    def _pass(self, expected: str) -> None:
        if self._next() != expected:
            raise ValueError(f"expected {expected!r} at character {self._place}")
        self._place += 1

    def _string(self) -> str:
        if self._next() != '"':
            raise ValueError(f"expected a string at character {self._place}")
        text, self._place = self._decode(self._text, self._place)
        return str(text)

    def _entry(self) -> object:
        self._next()
        entry, length = self._decode(self._text[self._place : self._place + _MOST_ENTRY])
        self._place += length
        return entry

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            duplicates = sorted(brief(name) for name, count in counts.items() if count > 1)
            _refuse(self._where, f"the header has duplicate keys: {listed(duplicates)}")
        return document


def _check_names(names: Iterable[str], where: str) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            _refuse(where, f"the name {_short(name)!a} is not Unicode text")


def _tensor(name: str, entry: object, where: str) -> FileTensor:
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
