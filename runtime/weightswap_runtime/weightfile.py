"""Weight files: one full set of weights as plain safetensors, in canonical layout when we write it."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from .dtypes import nbytes
from .errors import WeightFileError
from .files import new_file
from .header import FileTensor, Header, header_length, pack_ranges, parse_header, render_header

ALIGNMENT = 256
LABEL_ROOM = 1024
CLOCK_TICK_NS = 20_000_000  # the kernel stamps files by a clock of up to 10 ms
METADATA_KEY = "weightswap"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What weightswap adds to `__metadata__`. `digests` are BLAKE3, hexadecimal, by tensor name.

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


class _Fingerprint(NamedTuple):
    """What shows that a file is written to. Times in nanoseconds."""

    size: int
    modified: int
    changed: int
    links: int


class WeightFile(AbstractContextManager["WeightFile"]):
    """An open safetensors file whose header was read and checked. Data is read through `fd` by the caller.

    The file stays readable when its name is replaced. `check_unchanged()` tells whether it was written to in place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise WeightFileError(
                f"expected the path of a weight file, got a {type(path).__qualname__}; "
                "write one with weightswap_exporter.pack()"
            )
        self.path = Path(path)
        self.fd = self._open()
        try:
            self._identity = self._fingerprint()
            self.header = self._read_header()
            self.stamp = _read_stamp(self.header, str(self.path))
            if self.stamp is None:  # nothing but its times can tell that it changes
                self._settle()
        except OSError as error:
            self.close()
            raise WeightFileError(f"{self.path}: cannot be read ({error.strerror})") from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        try:
            # without O_NONBLOCK a named pipe would be waited for
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeightFileError(f"{self.path!s:.200}: cannot be opened ({reason})") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise WeightFileError(f"{self.path}: cannot be read (not a regular file)")
        return fd

    @property
    def tensors(self) -> dict[str, FileTensor]:
        return self.header.tensors

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_unchanged(self) -> None:
        """Raise WeightFileError if the file was written to or truncated since it was opened."""
        before, now = self._identity, self._fingerprint()
        # replacing a file takes one name from the old one, which changes its ctime and nothing else
        replaced = now.links != before.links
        if now[:2] != before[:2] or (now.changed != before.changed and not replaced):
            raise WeightFileError(
                f"{self.path}: the file was written to while it was read. "
                "Replace files (os.replace), never rewrite them."
            )

    def _fingerprint(self) -> _Fingerprint:
        status = os.fstat(self.fd)
        return _Fingerprint(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)

    def _settle(self) -> None:
        """Let a file that was just written grow older than the clock that stamps it, so that a later write shows."""
        age = time.time_ns() - max(self._identity.modified, self._identity.changed)
        if 0 <= age < CLOCK_TICK_NS:
            time.sleep(CLOCK_TICK_NS / 1e9)
            self.check_unchanged()

    def _read_header(self) -> Header:
        size = self._identity.size
        length = header_length(os.pread(self.fd, 8, 0), size, str(self.path))
        raw = bytearray()
        while len(raw) < length and (piece := os.pread(self.fd, length - len(raw), 8 + len(raw))):
            raw += piece
        if len(raw) < length:
            raise WeightFileError(f"{self.path}: the file was truncated while its header was read")
        return parse_header(bytes(raw), size, str(self.path))


def _read_stamp(header: Header, where: str) -> Stamp | None:
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        stamp = msgspec.json.decode(text, type=Stamp)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata is not what weightswap writes ({error})"
        ) from error
    bad = [name for name, digest in stamp.digests.items() if not _DIGEST.fullmatch(digest)]
    if bad or stamp.digests.keys() != header.tensors.keys():
        odd = sorted(bad or stamp.digests.keys() ^ header.tensors.keys())[:5]
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata lacks one BLAKE3 digest for each tensor ({', '.join(odd)}). "
            "Pack the file again, or remove the metadata."
        )
    if strange := {name for names in (stamp.cast or {}).values() for name in names} - header.tensors.keys():
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata says that {', '.join(sorted(strange)[:5])} were cast, which it "
            "does not hold. Pack the file again, or remove the metadata."
        )
    return stamp


def write_weight_file(
    path: str | os.PathLike[str],
    rows: Sequence[TensorRow],
    data: Mapping[str, Iterable[memoryview]] | Iterator[tuple[str, Iterable[memoryview]]],
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
    blank = Stamp(
        graph_id=graph_id,
        weights_id="0" * 64,
        digests=dict.fromkeys(ranges, "0" * 64),
        labels=dict(labels or {}),
        cast=dict(cast) if cast else msgspec.UNSET,
    )
    items = iter(data.items() if isinstance(data, Mapping) else data)
    stamp = blank
    with new_file(Path(path), lambda: rename(stamp) if rename else Path(path)) as file:
        placeholder = _render(ranges, blank)
        file.write(placeholder)
        digests: dict[str, str] = {}
        for row, (name, pieces) in zip(order, items, strict=True):
            if row.name != name:
                raise ValueError(f"tensor {name!r} came where {row.name!r} belongs")
            digests[name] = _write_tensor(file.write, pieces, ranges[name])
        stamp = msgspec.structs.replace(
            blank, weights_id=weights_id((row, digests[row.name]) for row in order), digests=digests
        )
        header = _render(ranges, stamp)
        if len(header) != len(placeholder):
            raise ValueError("the header changed its size between two renderings")
        file.seek(0)
        file.write(header)
    return stamp


def _write_tensor(write: Callable[[memoryview], int], pieces: Iterable[memoryview], place: FileTensor) -> str:
    hasher = blake3()
    written = 0
    for piece in pieces:
        hasher.update(piece)
        written += write(piece)
    if written != place.end - place.begin:
        raise ValueError(f"{written} bytes came for a tensor of {place.end - place.begin}")
    return hasher.hexdigest()


def _render(ranges: Mapping[str, FileTensor], stamp: Stamp) -> bytes:
    # "format": transformers and others refuse files without it
    metadata = {"format": "pt", METADATA_KEY: msgspec.json.encode(stamp).decode()}
    labels = json.dumps(msgspec.json.encode(stamp.labels).decode(), ensure_ascii=False)
    return render_header(ranges, metadata, reserve=max(0, LABEL_ROOM - len(labels.encode())))
