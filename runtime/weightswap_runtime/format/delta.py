"""Delta files: the byte ranges of weights that change from one weights id to another (docs/format.md).

A delta is read here as far as its stamp; `staging.delta` applies it. It is written from two weight files in one pass
over the weights whose digests differ, in pieces of about 1 MiB, and hashes what it reads: a damaged file would
otherwise become a delta whose result never has the id that it promises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import (
    DigestMismatch,
    GraphMismatch,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    listed,
)
from weightswap_runtime.native import Offsets
from weightswap_runtime.sources.location import Location, check_writable
from weightswap_runtime.sources.writing import companion
from weightswap_runtime.tensors import (
    BLOCK,
    DIGEST,
    TensorBytes,
    TensorHasher,
    TensorType,
    block_digests,
    describe,
    is_valid,
    nbytes,
    tensor_digest,
)

from .canonical import StampedFile, canonical_order, encode_tensors
from .goldens import read_goldens
from .safetensors import DELTA_KEY, Stamp, TensorRow, WeightFile, label_problem
from .weight_set import FileSet, StoredTensor, WeightSet, check_weights_name, goldens_path

# Prefixes of a file's tensors: new bytes, and what they replace: ranges of bytes, or rows of the first dimension
DATA, RUNS, ROWS = "data:", "runs:", "rows:"
_AGAIN = "Write the delta again, or copy it again."

Progress = Callable[[int, int], None]


class DeltaStamp(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a delta file."""

    graph_id: str
    base: str  # the weights id before the change
    weights_id: str  # the weights id after it
    changes: dict[str, TensorType]  # by the FQNs of the changed weights
    digests: dict[str, str]  # by the names of the file's tensors
    labels: dict[str, str] = {}


def delta_stamp(weights: WeightSet) -> DeltaStamp | None:
    """Return the stamp of a delta file; None for other files. Raises WeightFileError."""
    text = weights.metadata.get(DELTA_KEY)
    if text is None:
        return None
    try:
        stamp = from_json(text, DeltaStamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WeightFileError(
            f"{weights.where}: its `{DELTA_KEY}` metadata cannot be read ({error}). {_AGAIN}", reason="damaged"
        ) from error
    if problem := label_problem(stamp.labels):
        raise WeightFileError(f"{weights.where}: {problem}", reason="damaged")
    if problems := list(_problems(stamp, weights)):
        raise WeightFileError(
            f"{weights.where}: contradicts itself: {listed(problems, between='; ')}. {_AGAIN}", reason="damaged"
        )
    return stamp


def _problems(stamp: DeltaStamp, weights: WeightSet) -> Iterator[str]:
    texts = (stamp.graph_id, stamp.base, stamp.weights_id, *stamp.digests.values())
    if not all(DIGEST.fullmatch(text) for text in texts):
        yield "an id or a digest does not have 64 hexadecimal digits"
    places = {name: (ROWS if ROWS + name in weights.tensors else RUNS) + name for name in stamp.changes}
    expected = {*places.values(), *(DATA + name for name in stamp.changes)}
    if expected != weights.tensors.keys() or expected != stamp.digests.keys():
        yield "its tensors do not match the weights that it claims to change"
        return
    for name, changed in stamp.changes.items():
        data, place = weights.tensors[DATA + name], weights.tensors[places[name]]
        form = (1, ()) if places[name].startswith(ROWS) else (2, (2,))
        if (data.dtype, len(data.shape), place.dtype) != ("U8", 1, "I64") or (
            len(place.shape),
            place.shape[1:],
        ) != form:
            yield f"the tensors of {name} are {describe(data)} and {describe(place)}"
        if not is_valid(changed):
            yield f"{name} has the type {describe(changed)}"


def parts_of(stamp: DeltaStamp, tensors: Mapping[str, memoryview], where: str) -> dict[str, ByteRanges]:
    """Return what a delta changes, by FQN, from the content of its tensors. Raises WeightFileError."""
    parts, problems = {}, []
    for name, changed in stamp.changes.items():
        try:
            parts[name] = ranges_of(name, changed, tensors)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise WeightFileError(f"{where}: {listed(problems, between='; ')}. {_AGAIN}", reason="damaged")
    return parts


def ranges_of(name: str, changed: TensorType, tensors: Mapping[str, memoryview]) -> ByteRanges:
    """Return what a delta changes of a weight, from the content of its tensors. Raises ValueError with the reason."""
    size, data = nbytes(changed.dtype, changed.shape) or 0, tensors[DATA + name]
    if (content := tensors.get(ROWS + name)) is not None:
        ids = np.frombuffer(content, "<i8")
        count = changed.shape[0] if changed.shape else 0
        check_rows(ids, count, size)
        if len(data) != len(ids) * (size // count):
            raise ValueError(f"{len(ids)} rows have {len(data)} bytes, a row of the table has {size // count}")
        return ByteRanges.of_rows(ids, size // count if count else 0, data)
    ranges = ByteRanges.of(np.frombuffer(tensors[RUNS + name], "<i8").reshape(-1, 2), data)
    if not ranges.fit(size):
        raise ValueError("its ranges do not fit its data")
    return ranges


def check_rows(ids: Offsets, count: int, size: int) -> None:
    """Raise ValueError for ids that are not ascending rows of a table with so many, of `size` bytes."""
    if not len(ids) or not size:
        raise ValueError("it has no rows")
    odd = np.flatnonzero((ids < 0) | (ids >= count))
    if len(odd):
        raise ValueError(f"row {ids[odd[0]]}: the table has {count} rows")
    odd = np.flatnonzero(ids[1:] <= ids[:-1])
    if len(odd):
        raise ValueError(f"row {ids[odd[0] + 1]} comes after row {ids[odd[0]]}: rows have to be in ascending order")


@dataclass(frozen=True)
class Delta:
    """Delta file that was written."""

    path: Path
    graph_id: str
    base: str  # the weights id before the change
    weights_id: str  # the weights id after it
    nbytes: int  # of the weights, that it replaces
    total_bytes: int | None  # of all weights; None if it was merged from deltas, which do not say
    changed: tuple[str, ...]  # FQNs
    labels: dict[str, str]

    @classmethod
    def of(cls, path: str | os.PathLike[str], stamp: DeltaStamp, nbytes: int, total_bytes: int | None) -> Delta:
        ids = stamp.graph_id, stamp.base, stamp.weights_id
        return cls(Path(path), *ids, nbytes, total_bytes, tuple(stamp.changes), stamp.labels)


def write_delta(
    base: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Write the differences from one weight file to another; both must have been packed by weightswap, for one graph.

    The unit of comparison is a row of a weight (of an embedding table, of a linear layer); a piece of 1 MiB if rows are
    larger, or the weight has none. Weights with equal digests are not read. A few pieces are in memory at a time.
    labels: added to those of `new`. progress: a callback, called with the bytes compared so far, and the total.

    Goldens beside `new` are copied beside the delta before the delta appears; without them, goldens that are already
    beside the delta are removed.

    Raises Unsupported, WeightFileError, GraphMismatch, WeightsMismatch, and DigestMismatch for a damaged file.
    """
    check_writable(out)
    check_weights_name(out)
    with _open(base) as old, _open(new) as fresh:
        for file in (old, fresh):
            check_other(file.location, out)
        stamps = _stamps(old, fresh)
        texts = joined_labels(stamps[1].labels, labels, out)
        changes = _compare(old, fresh, stamps, progress)
        blank = DeltaStamp(
            graph_id=stamps[1].graph_id,
            base=stamps[0].weights_id,
            weights_id=stamps[1].weights_id,
            changes={name: TensorType.of(fresh.tensors[name]) for name in changes},
            digests={},
            labels=texts,
        )
        pending = new_delta_file(Path(out), changes, lambda name: _content(fresh.tensors[name], changes[name]), blank)
        with writing(out), pending as written:
            fresh.check_unchanged()
            with companion(goldens_path(out), read_goldens(fresh.location)):
                written.rename(Path(out))
        total = sum(tensor.nbytes for tensor in fresh.tensors.values())
        return Delta.of(out, blank, sum(change.nbytes for change in changes.values()), total)


def _open(path: str | os.PathLike[str]) -> FileSet:
    file = WeightFile(path)
    return FileSet(file.path, [file])


def check_other(location: Location, out: str | os.PathLike[str]) -> None:
    """Raise Unsupported if a file would be replaced by what is made from it."""
    try:
        is_same = isinstance(location, Path) and location.samefile(out)
    except (OSError, ValueError):  # `out` does not exist yet, or the write will report the error
        return
    if is_same:
        raise Unsupported(f"{out}: the delta would replace a file that it is made from; name another")


def joined_labels(before: Mapping[str, str], more: Mapping[str, str] | None, out: object) -> dict[str, str]:
    """Return the labels of a file. Raises WeightFileError for what it cannot hold, before all else is read."""
    texts = {**before, **(more or {})}
    if problem := label_problem(texts):
        raise WeightFileError(f"{out!s:.200}: cannot be written ({problem})")
    return texts


def _stamps(old: FileSet, fresh: FileSet) -> tuple[Stamp, Stamp]:
    """Return both files' stamps. Raises WeightFileError, GraphMismatch and WeightsMismatch for unsuitable files."""
    for file in (old, fresh):
        if DELTA_KEY in file.metadata:
            raise WeightFileError(f"{file.where}: a delta; deltas are written between full weight files")
        if file.stamp is None:
            raise WeightFileError(
                f"{file.where}: not packed by weightswap, so its weights id is unknown. Pack it first: "
                "weightswap pack CHECKPOINT ARTIFACT -o FILE.safetensors"
            )
    assert old.stamp is not None
    assert fresh.stamp is not None
    if old.stamp.graph_id != fresh.stamp.graph_id:
        raise GraphMismatch(
            f"{fresh.where}: packed for the graph {fresh.stamp.graph_id[:12]}, {old.where} for "
            f"{old.stamp.graph_id[:12]}. A delta is between two sets of weights for the same graph."
        )
    types = [{name: (t.dtype, t.shape) for name, t in file.tensors.items()} for file in (old, fresh)]
    odd = [name for name in sorted({*types[0], *types[1]}) if types[0].get(name) != types[1].get(name)]
    if odd:
        problems = [f"{name}: not the same in both files" for name in odd]
        raise WeightsMismatch(fresh.where, problems, "Pack both again for the same artifact.")
    return old.stamp, fresh.stamp


class Changed(NamedTuple):
    """What differs of a weight."""

    runs: Offsets  # ranges of its bytes, of shape [runs, 2], ascending and apart from each other
    row: int  # bytes of a row of its first dimension, if the ranges are whole rows; else 0

    @classmethod
    def of_rows(cls, ids: Offsets, row: int, size: int) -> Changed:
        """Return the rows with these ascending ids, of `row` bytes each, of a weight of `size` bytes."""
        return cls(_runs(ids, row, size), row if row <= BLOCK else 0)

    @classmethod
    def whole(cls, size: int) -> Changed:
        """Return all of a weight."""
        return cls(np.array([[0, size]], np.int64), 0)

    @property
    def nbytes(self) -> int:
        return int((self.runs[:, 1] - self.runs[:, 0]).sum())

    def rows(self) -> Offsets:
        """Return the numbers of the rows, where the ranges are whole rows."""
        firsts, ends = (self.runs // self.row).T
        counts = ends - firsts
        rows: Offsets = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        return rows

    def places(self) -> tuple[str, Offsets]:
        """Return what says where the new bytes belong, with its prefix: whichever takes fewer bytes."""
        if self.row and self.nbytes // self.row <= 2 * len(self.runs):
            return ROWS, self.rows()
        return RUNS, self.runs


def row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a row of a weight's first dimension; 0 if deltas have none of it, as rows are too large."""
    size = nbytes(dtype, shape) or 0
    row = size // shape[0] if len(shape) > 1 and size else 0
    return row if row <= BLOCK else 0


def _compare(
    old: FileSet, fresh: FileSet, stamps: tuple[Stamp, Stamp], progress: Progress | None
) -> dict[str, Changed]:
    """Return what differs, for each weight with differences."""
    names = [name for name in fresh.tensors if stamps[0].digests[name] != stamps[1].digests[name]]
    total = sum(fresh.tensors[name].nbytes for name in names)
    done = 0
    changes: dict[str, Changed] = {}
    for name in sorted(names):
        hashers = TensorHasher(), TensorHasher()
        tensor = fresh.tensors[name]
        row = row_bytes(tensor.dtype, tensor.shape)
        grain = row or BLOCK
        found: list[Offsets] = []
        for start, mine, theirs in _pairs(old.tensors[name], tensor, grain):
            hashers[0].update(mine)
            hashers[1].update(theirs)
            found.append(_different(mine, theirs, grain) + start // grain)
            done += len(mine)
            if progress:
                progress(done, total)
        for file, stamp, hasher in zip((old, fresh), stamps, hashers, strict=True):
            if hasher.hexdigest() != stamp.digests[name]:
                problem = f"{name}: its bytes do not match the digest that the file records"
                raise DigestMismatch(
                    file.where, [problem], "The file is damaged: copy it again, or pack its checkpoint again."
                )
        changes[name] = Changed(_runs(np.concatenate(found), grain, tensor.nbytes), row)
    return changes


def _runs(units: Offsets, grain: int, size: int) -> Offsets:
    """Return the ranges of bytes of units, the last of which may be shorter; units that follow each other are one."""
    firsts = np.flatnonzero(np.diff(units, prepend=-2) != 1)
    ends = units[np.append(firsts[1:] - 1, -1)] + 1
    runs: Offsets = np.minimum(np.stack([units[firsts], ends], axis=1) * grain, size)
    return runs


def _pairs(old: StoredTensor, fresh: StoredTensor, grain: int) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield the offset and both contents of pieces of a tensor: whole grains, about 1 MiB."""
    step = max(grain, BLOCK // grain * grain)
    for start in range(0, fresh.nbytes, step):
        length = min(step, fresh.nbytes - start)
        yield start, read_part(old, start, length), read_part(fresh, start, length)


def _different(mine: memoryview, theirs: memoryview, grain: int) -> Offsets:
    """Return the numbers of the units that differ."""
    if mine == theirs:
        return np.empty(0, np.int64)
    whole = len(mine) // grain * grain
    kind = f"u{grain}" if grain in (1, 2, 4, 8) else f"V{grain}"  # numbers are compared several times as fast
    one, other = (np.frombuffer(side[:whole], kind) for side in (mine, theirs))
    units = np.flatnonzero(one != other)
    return np.append(units, whole // grain) if mine[whole:] != theirs[whole:] else units


def encode_delta(contents: Mapping[str, tuple[Changed, memoryview]], blank: DeltaStamp) -> list[memoryview]:
    """Return a delta file in memory: its header, and then its tensors in pieces, which share the memory of `contents`.

    contents: what differs of each weight, and its new bytes end to end. blank: the stamp without digests. Raises
    WeightFileError.
    """
    tensors: dict[str, TensorBytes] = {}
    for name, (change, data) in contents.items():
        prefix, places = change.places()
        tensors[DATA + name] = TensorBytes("U8", (len(data),), data)
        tensors[prefix + name] = TensorBytes("I64", places.shape, memoryview(places.astype("<i8").tobytes()))
    digests = {name: tensor_digest(block_digests(tensor.data)) for name, tensor in tensors.items()}
    return encode_tensors(tensors, {DELTA_KEY: msgspec.json.encode(replace(blank, digests=digests)).decode()})


@contextmanager
def new_delta_file(
    path: Path, changes: Mapping[str, Changed], content: Callable[[str], Iterable[memoryview]], blank: DeltaStamp
) -> Iterator[StampedFile]:
    """Write a delta to a temporary name beside `path`; the block must rename it. Raises OSError and ValueError.

    content: returns the new bytes of a weight, in pieces. blank: the stamp without digests.
    """
    order = canonical_order(row for name, change in changes.items() for row in _rows(name, change))
    with StampedFile(path, order, DELTA_KEY, blank.labels) as file:
        digests = file.write_tensors(((row.name, _pieces(row.name, changes, content)) for row in order), blank)
        file.write_stamp(replace(blank, digests=digests))
        yield file


@contextmanager
def writing(out: str | os.PathLike[str]) -> Iterator[None]:
    """Report what fails in the block as a file that cannot be written. Raises WeightFileError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightFileError(f"{out!s:.200}: cannot be written ({reason})") from error


def _rows(name: str, change: Changed) -> Iterable[TensorRow]:
    prefix, places = change.places()
    yield TensorRow(DATA + name, "U8", (change.nbytes,))
    yield TensorRow(prefix + name, "I64", places.shape)


def _pieces(
    key: str, changes: Mapping[str, Changed], content: Callable[[str], Iterable[memoryview]]
) -> Iterable[memoryview]:
    prefix, _, name = key.partition(":")
    if prefix + ":" == DATA:
        return content(name)
    return [memoryview(changes[name].places()[1].astype("<i8").tobytes())]


def _content(fresh: StoredTensor, change: Changed) -> Iterator[memoryview]:
    for begin, end in change.runs.tolist():
        for start in range(begin, end, BLOCK):
            yield read_part(fresh, start, min(BLOCK, end - start))


def read_part(tensor: StoredTensor, start: int, size: int) -> memoryview:
    memory = memoryview(bytearray(size))
    tensor.source.read_into([memory], tensor.offset + start)
    return memory
