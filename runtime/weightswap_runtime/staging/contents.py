"""The content of a weight file without a model: `read_weights`, and checks of every byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from weightswap_runtime.errors import DigestMismatch, MissingExtra, Unsupported
from weightswap_runtime.format.delta import delta_stamp
from weightswap_runtime.format.identity import Counts
from weightswap_runtime.format.names import patterns, select
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Scratch
from weightswap_runtime.tensors import DTYPES, TensorBytes, as_array
from weightswap_runtime.threads import WorkerThreads

from .reading import Findings, batches, new_piece, read_pieces, read_scratch
from .request import DAMAGED, digest_problems

Framework = Literal["numpy", "torch"]


def read_weights(
    path: str | os.PathLike[str], only: str | Sequence[str] | None = None, *, framework: Framework = "numpy"
) -> dict[str, Any]:
    """Read tensors by name from a weight file, or a checkpoint in safetensors files (also sharded, or a directory).

    only: patterns of the names in the file, such as "encoder.*" (`*` also matches dots); only their bytes are read.
    framework: "numpy" returns writable arrays, "torch" tensors on the CPU; each has its own memory. numpy arrays of
    bfloat16 and 8-bit floats have dtypes of ml_dtypes. Digests are checked if the file has them.

    Tensors that lie in the parts of ranks have the shapes that the parts add up to: too small without the last one.

    Raises WeightFileError, DigestMismatch, and Unsupported for patterns that match nothing and for dtypes with
    elements of less than a byte.
    """
    with open_weights(path) as weights:
        names = sorted(weights.tensors)
        if only is not None:
            names = sorted(select(names, patterns(only), weights.where))
        convert = _converter(framework)
        _check_dtypes(weights, names)
        memory = {name: Scratch([weights.tensors[name].nbytes]) for name in names}
        pieces = [new_piece(weights, name, scratch, scratch.slots[0]) for name, scratch in memory.items()]
        read_pieces(pieces, WorkerThreads(), Job())
        weights.check_unchanged(proven=weights.stamp is not None)
        if problems := digest_problems(weights.stamp, {piece.key: piece.digests for piece in pieces}):
            raise DigestMismatch(weights.where, problems, DAMAGED)
        stored = weights.tensors
        return {name: convert(free.memory, stored[name].dtype, stored[name].shape) for name, free in memory.items()}


def check_content(path: str | os.PathLike[str]) -> dict[str, Counts]:
    """Read every byte of a weight file, and return the numbers of NaN and infinities, by name. Needs little memory.

    The result of a delta is not computed: only its header is read. Raises WeightFileError and DigestMismatch.
    """
    with open_weights(path) as weights:
        return {} if delta_stamp(weights) else check_tensors(weights, WorkerThreads())


def check_tensors(weights: WeightSet, workers: WorkerThreads) -> dict[str, Counts]:
    """Read every byte of an open set as `check_content` does, and leave it open."""
    findings = Findings({}, {})
    for batch in batches(weights, [(None, name) for name in sorted(weights.tensors)]):
        findings.add(read_scratch(weights, [name for _, name in batch], workers, Job())[1])
    weights.check_unchanged(proven=weights.stamp is not None)
    if problems := digest_problems(weights.stamp, findings.digests):
        raise DigestMismatch(weights.where, problems, DAMAGED)
    return findings.nonfinite


def _check_dtypes(weights: WeightSet, names: Sequence[str]) -> None:
    for name in names:
        if DTYPES[dtype := weights.tensors[name].dtype].torch is None:
            raise Unsupported(f"{weights.where}: {name} is {dtype}, which neither numpy nor torch has")


def _converter(framework: Framework) -> Callable[[memoryview, str, tuple[int, ...]], Any]:
    if framework == "numpy":
        return lambda memory, dtype, shape: as_array(TensorBytes(dtype, shape, memory))
    if framework != "torch":
        raise Unsupported(f'framework={framework!r}: expected "numpy" or "torch"')
    try:
        from weightswap_runtime.torch_tensors import as_tensor
    except ImportError as error:
        raise MissingExtra('read_weights(framework="torch")', "torch") from error
    return as_tensor
