"""Staging a variant: a file becomes tensors of a graph, in memory of their own, that no call can choose yet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weightswap_runtime.errors import DigestMismatch, OutOfMemory, WeightsMismatch
from weightswap_runtime.format.identity import Identity, identify
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.nonfinite import Counts, Nonfinite, count_nonfinite, newly_nonfinite, refuse_nonfinite
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena
from weightswap_runtime.memory.host import Memory
from weightswap_runtime.sources.location import as_location, printable
from weightswap_runtime.staging.checks import check_expected
from weightswap_runtime.staging.full import DAMAGED, digest_problems
from weightswap_runtime.staging.reading import Findings, lay, read_tensors
from weightswap_runtime.staging.request import SwapRequest
from weightswap_runtime.tensors.content import TensorBytes, array_content, as_array, numpy_dtype
from weightswap_runtime.tensors.digests import Blocks, block_digests, tensor_digest
from weightswap_runtime.tensors.dtypes import describe
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.workers import Workers

from .peft_directory import CONFIG_NAME, Taken, match_peft, read_config, weights_in

_FLOATS = ("F16", "BF16", "F32", "F64")


class StagedVariant(NamedTuple):
    """A variant's tensors in an arena of their own. `nonfinite`: those that have NaN or infinities."""

    arena: Arena
    identity: Identity
    source: str
    bytes_read: int
    seconds: float
    nonfinite: Mapping[str, Nonfinite]


def stage_variant(rows: Sequence[NamedTensor], memory: Memory, workers: Workers, request: SwapRequest) -> StagedVariant:
    """Read and verify a variant: a directory of PEFT's, or a safetensors file with the FQNs of `rows`.

    Of the request, its path, what it expects, allows and limits count. Raises WeightFileError, WeightsMismatch,
    DigestMismatch, UnexpectedWeights, NonFiniteWeights, OutOfMemory, and Unsupported for what PEFT does and the graph
    does not.
    """
    start, job = time.perf_counter(), Job(request.rate_limit)
    folder, file = weights_in(as_location(request.path))
    config = read_config(folder)
    try:
        with open_weights(request.path if config is None else file) as weights:
            if config is None:
                taken = _match_names(weights, rows)
            else:
                taken = match_peft(weights.tensors, rows, config, weights.where)
            arena, found = _read(weights, taken, memory, workers, job)
            labels = weights.stamp.labels if weights.stamp else {}
            where, read = weights.where, sum(tensor.nbytes for tensor in weights.tensors.values())
    except MemoryError as error:
        raise OutOfMemory(f"{printable(request.path)}: no memory for it ({error})") from error
    identity = identify(rows, found.digests, labels, found.nonfinite)
    check_expected(identity.weights_id, where, request)
    odd = newly_nonfinite(rows, identity.nonfinite, {})
    refuse_nonfinite(odd, request.allow_nonfinite, where)
    return StagedVariant(arena, identity, where, read, time.perf_counter() - start, odd)


def _match_names(weights: WeightSet, rows: Sequence[NamedTensor]) -> list[Taken]:
    """A file's tensors by the FQNs of the graph. Raises WeightsMismatch."""
    tensors, problems = weights.tensors, []
    for row in rows:
        stored = tensors.get(row.name)
        if stored is None:
            problems.append(f"{row.name}: missing, the graph wants {describe(row.dtype, row.shape)}")
        elif stored.shape != row.shape or not _can_be(stored.dtype, row.dtype):
            has = describe(stored.dtype, stored.shape)
            problems.append(f"{row.name}: the graph wants {describe(row.dtype, row.shape)}, the file has {has}")
    problems += [f"{name}: the graph has no place for it" for name in sorted(tensors.keys() - {r.name for r in rows})]
    if problems:
        advice = f"A directory of PEFT's has {CONFIG_NAME}; any other file has the names of the graph."
        raise WeightsMismatch(weights.where, problems, advice)
    return [Taken(row, row.name) for row in rows]


def _can_be(dtype: str, wanted: str) -> bool:
    return dtype == wanted or {dtype, wanted} <= set(_FLOATS)


def _read(
    weights: WeightSet, taken: Sequence[Taken], memory: Memory, workers: Workers, job: Job
) -> tuple[Arena, Findings]:
    """Read the tensors, and lay them into an arena that has the rows."""
    if wrong := [t.key for t in taken if t.key and not _can_be(weights.tensors[t.key].dtype, t.row.dtype)]:
        raise WeightsMismatch(
            weights.where, [f"{key}: is no floating point number" for key in wrong], "Train it again."
        )
    stored = {t.key: weights.tensors[t.key] for t in taken if t.key is not None}
    raw = HostArena(ArenaLayout(NamedTensor(name=key, dtype=t.dtype, shape=t.shape) for key, t in stored.items()))
    read = read_tensors(weights, {key: (key,) for key in stored}, raw, workers, job)
    stamp = weights.stamp
    if stamp and (corrupt := digest_problems(stamp, {key: tensor_digest(b) for key, b in read.digests.items()})):
        raise DigestMismatch(weights.where, corrupt, DAMAGED)
    arena = memory.arena(ArenaLayout(each.row for each in taken))
    found = Findings({}, {})
    with arena.writing(join=True):
        for each in taken:
            stored_bytes = raw.view(each.key) if each.key is not None else None
            rows = _row_bytes(each, weights, stored_bytes)
            if each.key is not None and rows is stored_bytes:
                digests, counts = read.digests[each.key], read.nonfinite.get(each.key)
            else:
                digests, counts = _look_at(each.row, rows)
            found.add(Findings({each.row.name: digests}, {each.row.name: counts} if counts else {}))
            lay(arena, each.row, rows, job)
    arena.synchronize()
    return arena, found


def _look_at(row: NamedTensor, rows: memoryview) -> tuple[Blocks, Counts | None]:
    return block_digests(rows), count_nonfinite(row.dtype, rows)


def _row_bytes(taken: Taken, weights: WeightSet, stored: memoryview | None) -> memoryview:
    """The row-major bytes of a row: those that were read, or these multiplied, cast and padded with zeros."""
    row = taken.row
    if taken.key is None or stored is None:
        return memoryview(bytearray(row.nbytes))
    has = weights.tensors[taken.key]
    if taken.factor == 1.0 and (has.dtype, has.shape) == (row.dtype, row.shape):
        return stored
    values = as_array(TensorBytes(has.dtype, has.shape, stored))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is refused
        if taken.factor != 1.0:
            wide = values.astype(
                np.result_type(values.dtype, np.float32) if has.dtype in ("F32", "F64") else np.float32
            )
            values = wide * wide.dtype.type(taken.factor)
        padded = np.zeros(row.shape, numpy_dtype(row.dtype))
        padded[tuple(slice(0, size) for size in has.shape)] = values.astype(padded.dtype)
    return array_content(padded).data
