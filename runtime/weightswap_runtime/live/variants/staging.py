"""Staging of variants: a file is read into an arena of its own, which calls cannot choose yet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import DigestMismatch, OutOfMemory, WeightsMismatch
from weightswap_runtime.format.header import LEAST_HEADER
from weightswap_runtime.format.identity import Identity, identify
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.nonfinite import Nonfinite, count_nonfinite, newly_nonfinite, refuse_nonfinite
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena
from weightswap_runtime.memory.host import Memory
from weightswap_runtime.sources.location import as_location, printable
from weightswap_runtime.staging.checks import DAMAGED, check_expected, digest_problems
from weightswap_runtime.staging.reading import Findings, lay, read_tensors
from weightswap_runtime.staging.request import Admit, SwapRequest
from weightswap_runtime.tensors.content import TensorBytes, array_content, as_array, numpy_dtype
from weightswap_runtime.tensors.digests import block_digests
from weightswap_runtime.tensors.dtypes import describe, same_type
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .peft_directory import CONFIG_NAME, RowSource, match_peft, read_config, weights_in

_FLOATS = ("F16", "BF16", "F32", "F64")


class StagedVariant(NamedTuple):
    """The tensors of a variant, in an arena of their own. `nonfinite`: those with NaN or infinities."""

    arena: Arena
    identity: Identity
    source: str
    bytes_read: int
    seconds: float
    nonfinite: Mapping[str, Nonfinite]


def stage_variant(
    rows: Sequence[NamedTensor],
    memory: Memory,
    workers: WorkerThreads,
    request: SwapRequest,
    admit: Admit | None = None,
    base: Sequence[NamedTensor] = (),
) -> StagedVariant:
    """Read and verify a variant: a PEFT directory, or a safetensors file with the FQNs of `rows`.

    request: only its path, `expect`, `allow_nonfinite` and `rate_limit` are used. admit: called last, with the weights
    id of the variant that was read. base: the weights over which calls choose it.

    Raises what `admit` raises, WeightFileError, WeightsMismatch, DigestMismatch, UnexpectedWeights, NonFiniteWeights,
    OutOfMemory, and Unsupported for a PEFT feature that the graph does not have.
    """
    start, job = time.perf_counter(), Job(request.rate_limit)
    folder, file = weights_in(as_location(request.path))
    config = read_config(folder)
    try:
        most = LEAST_HEADER + sum(1000 + 6 * len(row.name) for row in rows)
        with open_weights(request.path if config is None else file, most_header=most) as weights:
            if config is None:
                sources = _match_names(weights, rows)
            else:
                sources = match_peft(weights.tensors, rows, config, weights.where, [each.name for each in base])
            arena, findings = _read(weights, sources, memory, workers, job)
            labels = weights.stamp.labels if weights.stamp else {}
            location, where = weights.location, weights.where
            bytes_read = sum(tensor.nbytes for tensor in weights.tensors.values())
    except MemoryError as error:
        raise OutOfMemory(f"{printable(request.path)}: no memory for it ({error})") from error
    identity = identify(rows, findings.digests, labels, findings.nonfinite)
    check_expected(identity.weights_id, where, request)
    nonfinite = newly_nonfinite(rows, identity.nonfinite, {})
    refuse_nonfinite(nonfinite, request.allow_nonfinite, where)
    if admit is not None:
        admit(location, identity.weights_id)
    return StagedVariant(arena, identity, where, bytes_read, time.perf_counter() - start, nonfinite)


def _match_names(weights: WeightSet, rows: Sequence[NamedTensor]) -> list[RowSource]:
    """Match a file's tensors to the FQNs of the graph. Raises WeightsMismatch."""
    tensors, problems = weights.tensors, []
    for row in rows:
        stored = tensors.get(row.name)
        if stored is None:
            problems.append(f"{row.name}: missing, the graph expects {describe(row)}")
        elif stored.shape != row.shape or not _can_cast(stored.dtype, row.dtype):
            problems.append(f"{row.name}: the graph expects {describe(row)}, the file has {describe(stored)}")
    problems += [f"{name}: not in the graph" for name in sorted(tensors.keys() - {r.name for r in rows})]
    if problems:
        advice = f"A PEFT directory has {CONFIG_NAME}; any other file uses the graph's names."
        raise WeightsMismatch(weights.where, problems, advice)
    return [RowSource(row, row.name) for row in rows]


def _can_cast(dtype: str, target: str) -> bool:
    return dtype == target or {dtype, target} <= set(_FLOATS)


def _read(
    weights: WeightSet, sources: Sequence[RowSource], memory: Memory, workers: WorkerThreads, job: Job
) -> tuple[Arena, Findings]:
    """Read the tensors into a new arena that holds the rows."""
    if wrong := [s.key for s in sources if s.key and not _can_cast(weights.tensors[s.key].dtype, s.row.dtype)]:
        raise WeightsMismatch(
            weights.where, [f"{key}: not a floating-point tensor" for key in wrong], "Train it again."
        )
    arena = memory.arena(ArenaLayout(each.row for each in sources))
    as_is = [each for each in sources if _is_as_stored(each, weights)]
    changed = [each for each in sources if each not in as_is]
    stored = {each.key: weights.tensors[each.key] for each in changed if each.key is not None}
    raw = HostArena(ArenaLayout(NamedTensor(name=key, dtype=t.dtype, shape=t.shape) for key, t in stored.items()))
    with arena.writing(join=True):
        read = read_tensors(weights, {each.row.name: (str(each.key),) for each in as_is}, arena, workers, job)
        findings = Findings(
            {each.row.name: read.digests[str(each.key)] for each in as_is},
            {each.row.name: read.nonfinite[str(each.key)] for each in as_is if each.key in read.nonfinite},
        )
        read.add(read_tensors(weights, {key: (key,) for key in stored}, raw, workers, job))
        for each in changed:
            rows = _row_bytes(each, weights, raw)
            counts = count_nonfinite(each.row.dtype, rows)
            findings.add(Findings({each.row.name: block_digests(rows)}, {each.row.name: counts} if counts else {}))
            lay(arena, each.row, rows, job)
    if corrupt := digest_problems(weights.stamp, read.digests):
        raise DigestMismatch(weights.where, corrupt, DAMAGED)
    arena.synchronize()
    return arena, findings


def _is_as_stored(source: RowSource, weights: WeightSet) -> bool:
    """Return whether the bytes of a row are those of the file."""
    return source.key is not None and source.factor == 1.0 and same_type(weights.tensors[source.key], source.row)


def _row_bytes(source: RowSource, weights: WeightSet, raw: HostArena) -> memoryview:
    """Return the row-major bytes of a row: the values that were read, multiplied, cast and padded with zeros."""
    row = source.row
    padded = np.zeros(row.shape, numpy_dtype(row.dtype))
    if source.key is not None:
        stored = weights.tensors[source.key]
        values = as_array(TensorBytes(stored.dtype, stored.shape, raw.view(source.key)))
        with np.errstate(over="ignore", invalid="ignore"):  # values that are then not finite are refused later
            if source.factor != 1.0:
                wide: NDArray[Any] = values.astype(np.float64 if stored.dtype == "F64" else np.float32)
                factor: NDArray[Any] = np.asarray(source.factor, wide.dtype)
                values = wide * factor
            padded[tuple(map(slice, stored.shape))] = values.astype(padded.dtype)
    return array_content(padded).data
