"""Several deltas as one file: a delta that leads as far, or the full set to which they lead.

The deltas are read one after another, and what they change is laid over each other in memory: it takes about
four times the bytes that they change together and 200 for each of their rows or runs of bytes (two deltas of two
million runs of one byte took 705 MB, of as many rows of four bytes 749 MB), and no step of Python for each row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges, Layers, scatter
from weightswap_runtime.errors import (
    BaseMismatch,
    DigestMismatch,
    GraphMismatch,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
)
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.sources.location import Location, check_writable
from weightswap_runtime.sources.opening import read_beside
from weightswap_runtime.sources.writing import PendingFile, companion
from weightswap_runtime.tensors import BLOCK, TensorType, describe, digest_of, same_type

from .canonical import canonical_order, new_weight_file
from .delta import (
    Changed,
    Delta,
    DeltaStamp,
    Progress,
    check_other,
    delta_stamp,
    joined_labels,
    new_delta_file,
    parts_of,
    read_part,
    row_bytes,
    writing,
)
from .goldens import read_goldens
from .safetensors import Stamp, TensorRow
from .weight_set import SIGNATURE_SUFFIX, FileSet, StoredTensor, check_weights_name, goldens_path, open_weights

_MOST_SIGNATURE = 1 << 20  # bytes
_AGAIN = "The file is damaged: copy it again, or write the delta again."
PathLike = str | os.PathLike[str]


def merge_deltas(
    deltas: Sequence[PathLike],
    out: PathLike,
    *,
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Write one delta that does what several do one after another: of each byte that they change, the last value.

    deltas: paths or URLs, each of a delta from the weights to which the one before leads. Who serves the weights from
    which the first starts gets those of the last with one swap. Only the deltas are read; what they change together is
    in memory about four times, with 200 bytes for each row or run. labels: added to those of the last. progress: called
    with the bytes read so far, and the total.

    Goldens beside the last are copied beside the result before that appears, and so is its signature, which is one of
    the same weights; without goldens, those that are already beside the result are removed.

    Raises Unsupported, WeightFileError, GraphMismatch, BaseMismatch for deltas that do not follow each other,
    WeightsMismatch, and DigestMismatch for a damaged file; nothing has been written then.
    """
    with merged_delta(deltas, out, labels=labels, progress=progress) as (delta, put):
        put()
    return delta


@contextmanager
def merged_delta(
    deltas: Sequence[PathLike],
    out: PathLike,
    *,
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Delta, Callable[[], None]]]:
    """Write what `merge_deltas` does to a temporary name, and yield a function that puts it in place."""
    check_writable(out)
    check_weights_name(out)
    with _opened(deltas, out) as chain:
        last = chain.steps[-1]
        texts = joined_labels(last.stamp.labels, labels, out)
        merged = {name: part for name, part in chain.read(progress).items() if part.nbytes}
        types = {name: chain.types[name] for name in merged}
        changes = {name: _changed(types[name], part) for name, part in merged.items()}
        blank = DeltaStamp(
            graph_id=last.stamp.graph_id,
            base=chain.steps[0].stamp.base,
            weights_id=last.stamp.weights_id,
            changes=types,
            digests={},
            labels=texts,
        )
        delta = Delta.of(out, blank, sum(part.nbytes for part in merged.values()), total_bytes=None)
        with (
            writing(out),
            new_delta_file(Path(out), changes, lambda name: [merged[name].data], blank) as file,
        ):
            chain.check_unchanged()
            yield delta, partial(_put, file, last.weights.location, Path(out))


def write_merged_set(base: PathLike, deltas: Sequence[PathLike], out: PathLike) -> Stamp:
    """Write the full set to which deltas lead from a weight file, with the labels of the last; return its stamp.

    One weight is in memory at a time, beside what the deltas change. Files beside the last delta are copied as by
    `merge_deltas`. Raises what that raises; DigestMismatch also if the result would not have the id of the last.
    """
    with merged_set(base, deltas, out) as (stamp, put):
        put()
    return stamp


@contextmanager
def merged_set(base: PathLike, deltas: Sequence[PathLike], out: PathLike) -> Iterator[tuple[Stamp, Callable[[], None]]]:
    """Write what `write_merged_set` does to a temporary name, and yield a function that puts it in place."""
    check_writable(out)
    check_weights_name(out)
    with open_weights(base) as full, _opened(deltas, out) as chain:
        check_other(full.location, out)
        first, last = chain.steps[0], chain.steps[-1]
        stamp = _stamp_of(full, first)
        odd = [
            f"{name}: changes, but is {describe(full.tensors[name]) if name in full.tensors else 'not there'}"
            for name, type_ in chain.types.items()
            if name not in full.tensors or not same_type(full.tensors[name], type_)
        ]
        if odd:
            raise WeightsMismatch(full.where, odd, "Pack the weights again, or merge the deltas alone.")
        changes = chain.read(None)
        rows = [TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in full.tensors.items()]
        data = ((row.name, _laid(full.tensors[row.name], changes.get(row.name))) for row in canonical_order(rows))
        labels, cast = last.stamp.labels, dict(stamp.cast) if stamp.cast else {}
        with (
            writing(out),
            new_weight_file(Path(out), rows, data, graph_id=stamp.graph_id, labels=labels, cast=cast) as (
                file,
                written,
            ),
        ):
            if written.weights_id != last.stamp.weights_id:
                text = f"{full.where} and {len(deltas)} deltas give the weights {written.weights_id[:12]}"
                raise DigestMismatch(
                    last.weights.where, [f"{text}, not {last.stamp.weights_id[:12]} as it claims"], _AGAIN
                )
            yield written, partial(_put, file, last.weights.location, Path(out))


def _put(file: PendingFile, last: Location, out: Path) -> None:
    """Rename a file, once what lies beside the last delta is beside it."""
    with writing(out), _beside(last, out):
        file.rename(out)


def _stamp_of(full: FileSet, first: _Step) -> Stamp:
    """Return the stamp of a full set from which a delta starts. Raises WeightFileError, GraphMismatch, BaseMismatch."""
    if full.stamp is None:
        raise WeightFileError(f"{full.where}: not one file that weightswap has packed; merge the deltas alone")
    _check_follows(full.where, full.stamp, first)
    return full.stamp


def _laid(tensor: StoredTensor, change: ByteRanges | None) -> Iterator[memoryview]:
    """Yield the bytes of a weight with a change laid over them."""
    if change is None:
        for start in range(0, tensor.nbytes, BLOCK):
            yield read_part(tensor, start, min(BLOCK, tensor.nbytes - start))
        return
    content = read_part(tensor, 0, tensor.nbytes)
    scatter(content, change)
    yield content


class _Step(NamedTuple):
    """An open delta."""

    weights: FileSet
    stamp: DeltaStamp

    def read(self, report: Callable[[int], None]) -> dict[str, ByteRanges]:
        """Return what the delta changes, by FQN. Raises DigestMismatch and WeightFileError. told: called with sizes."""
        content, wrong = {}, []
        for name, tensor in self.weights.tensors.items():
            content[name] = read_part(tensor, 0, tensor.nbytes)
            if digest_of([content[name]]) != self.stamp.digests[name]:
                wrong.append(f"{name}: its bytes do not match the digest that the file records")
            report(tensor.nbytes)
        if wrong:
            raise DigestMismatch(self.weights.where, wrong, _AGAIN)
        return parts_of(self.stamp, content, self.weights.where)


class _Chain(NamedTuple):
    """Open deltas, each from the weights to which the one before leads."""

    steps: Sequence[_Step]
    types: dict[str, TensorType]  # of the weights that any of them changes

    def read(self, progress: Progress | None) -> dict[str, ByteRanges]:
        """Return what all deltas change together, by FQN, in order. Raises DigestMismatch and WeightFileError."""
        total = sum(tensor.nbytes for step in self.steps for tensor in step.weights.tensors.values())
        done, layers = 0, Layers()

        def report(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(done, total)

        for step in self.steps:
            layers.add(step.read(report))
        return dict(sorted(layers.merged().items()))

    def check_unchanged(self) -> None:
        for step in self.steps:
            step.weights.check_unchanged(proven=True)


@contextmanager
def _opened(deltas: Sequence[PathLike], out: PathLike) -> Iterator[_Chain]:
    """Open deltas, and check by their headers that they follow each other."""
    if not deltas:
        raise Unsupported("no delta to merge; give those of a chain, in order")
    with ExitStack() as stack:
        steps = [_open(path, out, stack) for path in deltas]
        types: dict[str, TensorType] = {}
        for step in steps:
            types.update(step.stamp.changes)
        for before, after in pairwise(steps):
            _check_follows(before.weights.where, before.stamp, after)
        for step in steps:
            odd = [
                f"{name}: {each}, but {types[name]} in another delta"
                for name, each in step.stamp.changes.items()
                if not same_type(each, types[name])
            ]
            if odd:
                raise WeightsMismatch(step.weights.where, odd, "Write the deltas between files of one artifact.")
        yield _Chain(steps, types)


def _open(path: PathLike, out: PathLike, stack: ExitStack) -> _Step:
    weights = stack.enter_context(open_weights(path))
    stamp = delta_stamp(weights)
    if stamp is None:
        raise WeightFileError(f"{weights.where}: not a delta; only deltas can be merged (weightswap delta writes them)")
    check_other(weights.location, out)
    for source in weights.sources:
        if isinstance(source, LocalFile):
            source.rest()
    return _Step(weights, stamp)


def _check_follows(where: str, before: Stamp | DeltaStamp, after: _Step) -> None:
    """Raise GraphMismatch or BaseMismatch if a delta does not start from the weights of the file before."""
    if before.graph_id != after.stamp.graph_id:
        raise GraphMismatch(
            f"{after.weights.where}: for the graph {after.stamp.graph_id[:12]}, {where} for {before.graph_id[:12]}. "
            "Files of one graph can be merged."
        )
    if before.weights_id != after.stamp.base:
        raise BaseMismatch(
            f"{after.weights.where}: a delta from the weights {after.stamp.base[:12]}, but {where} "
            f"{'has' if isinstance(before, Stamp) else 'leads to'} {before.weights_id[:12]}. Give the deltas of a "
            "chain in order, without a gap."
        )


def _changed(type_: TensorType, part: ByteRanges) -> Changed:
    joined = part.joined(0)
    row = row_bytes(type_.dtype, type_.shape)
    return Changed(np.stack([joined.begins, joined.ends], axis=1), row if row and joined.are_multiples(row) else 0)


@contextmanager
def _beside(last: Location, out: Path) -> Iterator[None]:
    """Put the goldens and the signature of the last delta's weights beside a file that the block renames."""
    with ExitStack() as stack:
        stack.enter_context(companion(goldens_path(out), read_goldens(last)))
        if signature := read_beside(last, last.name + SIGNATURE_SUFFIX, _MOST_SIGNATURE):
            stack.enter_context(companion(out.with_name(out.name + SIGNATURE_SUFFIX), signature))
        yield
