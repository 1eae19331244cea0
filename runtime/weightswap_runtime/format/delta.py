"""Delta files: the byte ranges of weights that change from one weights id to another (docs/format.md).

A delta is read here as far as its stamp; `staging.delta` applies it. It is written from two weight files in one pass
over the weights whose digests differ, in pieces of about 1 MiB, and hashes what it reads: a damaged file would
otherwise become a delta whose result never has the id that it promises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from weightswap_runtime.errors import (
    DamagedFile,
    DigestMismatch,
    GraphMismatch,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    listed,
)
from weightswap_runtime.sources.location import Location, Url, check_writable
from weightswap_runtime.sources.writing import companion
from weightswap_runtime.tensors import BLOCK, DIGEST, TensorHasher, TensorType, describe, is_valid

from .goldens import goldens_behind
from .safetensors import FileTensor, Stamp, StampedFile, TensorRow, WeightFile, canonical_order, label_problem
from .weight_set import WeightSet, goldens_path

DELTA_KEY = "weightswap_delta"
DATA, RUNS = "data:", "runs:"  # prefixes of a file's tensors: new bytes, and which ranges they replace
FEWEST = 256  # least bytes that are compared together: each range takes 16 bytes of the file
_AGAIN = "Write the delta again, or copy it again."

Progress = Callable[[int, int], None]
_Runs = list[tuple[int, int]]


class DeltaStamp(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a delta file."""

    graph_id: str
    base: str  # the weights id before the change
    weights_id: str  # the weights id after it
    changes: dict[str, TensorType]  # by the FQNs of the changed weights
    digests: dict[str, str]  # by the names of the file's tensors
    labels: dict[str, str] = {}


def delta_stamp(weights: WeightSet) -> DeltaStamp | None:
    """Return the stamp of a delta file; None for other files. Raises DamagedFile."""
    text = weights.metadata.get(DELTA_KEY)
    if text is None:
        return None
    try:
        stamp = msgspec.json.decode(text, type=DeltaStamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DamagedFile(f"{weights.where}: its `{DELTA_KEY}` metadata cannot be read ({error}). {_AGAIN}") from error
    if problem := label_problem(stamp.labels):
        raise DamagedFile(f"{weights.where}: {problem}")
    if problems := list(_problems(stamp, weights)):
        raise DamagedFile(f"{weights.where}: contradicts itself: {listed(problems, between='; ')}. {_AGAIN}")
    return stamp


def _problems(stamp: DeltaStamp, weights: WeightSet) -> Iterator[str]:
    texts = (stamp.graph_id, stamp.base, stamp.weights_id, *stamp.digests.values())
    if not all(DIGEST.fullmatch(text) for text in texts):
        yield "an id or a digest does not have 64 hexadecimal digits"
    expected = {prefix + name for name in stamp.changes for prefix in (DATA, RUNS)}
    if expected != weights.tensors.keys() or expected != stamp.digests.keys():
        yield "its tensors do not match the weights that it claims to change"
        return
    for name, changed in stamp.changes.items():
        data, runs = weights.tensors[DATA + name], weights.tensors[RUNS + name]
        if (data.dtype, len(data.shape), runs.dtype, runs.shape[1:]) != ("U8", 1, "I64", (2,)):
            yield f"the tensors of {name} are {describe(data)} and {describe(runs)}"
        if not is_valid(changed):
            yield f"{name} has the type {describe(changed)}"


@dataclass(frozen=True)
class Delta:
    """Delta file that was written."""

    path: Path
    graph_id: str
    base: str  # the weights id before the change
    weights_id: str  # the weights id after it
    nbytes: int  # of the weights, that it replaces
    total_bytes: int  # of all weights
    changed: tuple[str, ...]  # FQNs
    labels: dict[str, str]


def write_delta(
    base: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Write the differences from one weight file to another; both must have been packed by weightswap, for one graph.

    The unit of comparison is a row of a weight (of an embedding table, of a linear layer); several rows if they have
    less than 256 bytes; a piece of 1 MiB if rows are larger, or the weight has none. Weights with equal digests are not
    read. A few pieces are in memory at a time. labels: added to those of `new`. progress: a callback, called with the
    bytes compared so far, and the total.

    Goldens beside `new` are copied beside the delta before the delta appears; without them, goldens that are already
    beside the delta are removed.

    Raises WeightFileError, GraphMismatch, WeightsMismatch, and DigestMismatch for a damaged file.
    """
    check_writable(out)
    with WeightFile(base) as old, WeightFile(new) as fresh:
        for file in (old, fresh):
            if _is_same(file.path, Path(out)):
                raise Unsupported(f"{out}: the delta would replace a file that it is made from; name another")
        stamps = _stamps(old, fresh)
        texts = {**stamps[1].labels, **(labels or {})}
        if problem := label_problem(texts):  # the writer would find it, too, but after all has been read
            raise WeightFileError(f"{out!s:.200}: cannot be written ({problem})")
        runs = _compare(old, fresh, stamps, progress)
        blank = DeltaStamp(
            graph_id=stamps[1].graph_id,
            base=stamps[0].weights_id,
            weights_id=stamps[1].weights_id,
            changes={name: TensorType.of(fresh.tensors[name]) for name in runs},
            digests={},
            labels=texts,
        )
        try:
            _write(Path(out), fresh, runs, blank)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeightFileError(f"{out!s:.200}: cannot be written ({reason})") from error
        return Delta(
            path=Path(out),
            graph_id=blank.graph_id,
            base=blank.base,
            weights_id=blank.weights_id,
            nbytes=sum(end - begin for stretches in runs.values() for begin, end in stretches),
            total_bytes=sum(tensor.nbytes for tensor in fresh.tensors.values()),
            changed=tuple(runs),
            labels=texts,
        )


def _is_same(location: Location, out: Path) -> bool:
    """Return True if both are the same file; False also for an invalid name."""
    try:
        return isinstance(location, Path) and location.samefile(out)
    except (OSError, ValueError):  # `out` does not exist yet, or the write will report the error
        return False


def _stamps(old: WeightFile, fresh: WeightFile) -> tuple[Stamp, Stamp]:
    """Return both files' stamps. Raises WeightFileError, GraphMismatch and WeightsMismatch for unsuitable files."""
    for file in (old, fresh):
        if DELTA_KEY in file.header.metadata:
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


def _compare(
    old: WeightFile, fresh: WeightFile, stamps: tuple[Stamp, Stamp], progress: Progress | None
) -> dict[str, _Runs]:
    """Return the ranges that differ, for each weight with differences."""
    names = [name for name in fresh.tensors if stamps[0].digests[name] != stamps[1].digests[name]]
    total = sum(fresh.tensors[name].nbytes for name in names)
    done = 0
    runs: dict[str, _Runs] = {}
    for name in sorted(names):
        hashers = TensorHasher(), TensorHasher()
        grain, stretches = _grain(fresh.tensors[name]), _Runs()
        for start, mine, theirs in _pairs(old, fresh, name, grain):
            hashers[0].update(mine)
            hashers[1].update(theirs)
            for begin, end in _different(mine, theirs, grain):
                _append(stretches, start + begin, start + end)
            done += len(mine)
            if progress:
                progress(done, total)
        for file, stamp, hasher in zip((old, fresh), stamps, hashers, strict=True):
            if hasher.hexdigest() != stamp.digests[name]:
                problem = f"{name}: its bytes do not match the digest that the file records"
                raise DigestMismatch(
                    file.where, [problem], "The file is damaged: copy it again, or pack its checkpoint again."
                )
        runs[name] = stretches
    return runs


def _grain(tensor: FileTensor) -> int:
    """Return how many bytes are compared, and replaced, as a unit."""
    row = tensor.nbytes // tensor.shape[0] if len(tensor.shape) > 1 and tensor.nbytes else BLOCK
    return -(-FEWEST // row) * row if row <= BLOCK else BLOCK


def _pairs(old: WeightFile, fresh: WeightFile, name: str, grain: int) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield the offset and both contents of pieces of a tensor: whole grains, about 1 MiB."""
    size = fresh.tensors[name].nbytes
    step = max(grain, BLOCK // grain * grain)
    for start in range(0, size, step):
        length = min(step, size - start)
        yield start, _read(old, name, start, length), _read(fresh, name, start, length)


def _read(file: WeightFile, name: str, start: int, length: int) -> memoryview:
    memory = memoryview(bytearray(length))
    file.source.read_into([memory], file.header.data_start + file.tensors[name].begin + start)
    return memory


def _different(mine: memoryview, theirs: memoryview, grain: int) -> Iterator[tuple[int, int]]:
    if mine == theirs:
        return
    if len(mine) <= grain:
        yield 0, len(mine)
        return
    whole = len(mine) // grain * grain
    rows, others = (np.frombuffer(side[:whole], f"V{grain}") for side in (mine, theirs))
    for index in np.flatnonzero(rows != others):
        yield int(index) * grain, (int(index) + 1) * grain
    if mine[whole:] != theirs[whole:]:
        yield whole, len(mine)


def _append(runs: _Runs, begin: int, end: int) -> None:
    """Append a range, or extend the last one if that ends where it begins."""
    if runs and runs[-1][1] == begin:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((begin, end))


def _write(path: Path, fresh: WeightFile, runs: Mapping[str, _Runs], blank: DeltaStamp) -> None:
    order = canonical_order(row for name, stretches in runs.items() for row in _rows(name, stretches))
    with StampedFile(path, order, DELTA_KEY, blank.labels) as file:
        digests = file.write_tensors(((row.name, _data(fresh, row.name, runs)) for row in order), blank)
        file.write_stamp(replace(blank, digests=digests))
        fresh.check_unchanged()
        with companion(goldens_path(path), _goldens_of(fresh.path)):
            file.rename(path)


def _goldens_of(weights: Location) -> bytes | None:
    if isinstance(weights, Url):
        return goldens_behind(weights)
    path = goldens_path(weights)
    return path.read_bytes() if path.is_file() else None


def _rows(name: str, runs: _Runs) -> Iterable[TensorRow]:
    yield TensorRow(DATA + name, "U8", (sum(end - begin for begin, end in runs),))
    yield TensorRow(RUNS + name, "I64", (len(runs), 2))


def _data(fresh: WeightFile, key: str, runs: Mapping[str, _Runs]) -> Iterator[memoryview]:
    name = key.removeprefix(DATA) if key.startswith(DATA) else key.removeprefix(RUNS)
    if key.startswith(RUNS):
        yield memoryview(np.array(runs[name], "<i8").tobytes())
        return
    for begin, end in runs[name]:
        for start in range(begin, end, BLOCK):
            yield _read(fresh, name, start, min(BLOCK, end - start))
