"""Tensors of a weight file as arrays, for tools: no artifact, no model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .arena import Scratch
from .digests import tensor_digest
from .dtypes import DTYPES
from .errors import DigestMismatch, MissingExtra, Unsupported
from .job import Job
from .reading import Piece, new_piece, read_pieces
from .selection import patterns, select
from .staging import DAMAGED, digest_problems
from .weightset import WeightSet, open_weights
from .workers import Workers

Framework = Literal["numpy", "torch"]


def read_weights(
    path: str | os.PathLike[str], only: str | Sequence[str] | None = None, *, framework: Framework = "numpy"
) -> dict[str, Any]:
    """Read tensors by name from a weight file, or a checkpoint in safetensors files (also sharded, or a directory).

    only: patterns of the names in the file, such as "encoder.*" (`*` also matches dots); only their bytes are read.
    framework: "numpy" gives writable arrays, "torch" tensors on the CPU; each has memory of its own. numpy has no
    bfloat16 and no 8-bit floats. Digests, where the file has them, are checked.

    Raises WeightFileError, DigestMismatch, and Unsupported for patterns that match nothing and for such dtypes.
    """
    with open_weights(path) as weights:
        names = sorted(weights.tensors)
        if only is not None:
            names = sorted(select(names, patterns(only), weights.where))
        converted = _converter(framework)
        _check_dtypes(weights, names, framework)
        memory = {name: Scratch([weights.tensors[name].nbytes]) for name in names}
        pieces = [new_piece(weights, name, scratch, scratch.slots[0]) for name, scratch in memory.items()]
        read_pieces(pieces, Workers(), Job())
        weights.check_unchanged(proven=weights.stamp is not None)
        _check_digests(weights, pieces)
        return {name: converted(weights, name, scratch.memory) for name, scratch in memory.items()}


def _check_digests(weights: WeightSet, pieces: Sequence[Piece]) -> None:
    found = {piece.key: tensor_digest(piece.digests) for piece in pieces}
    if weights.stamp and (problems := digest_problems(weights.stamp, found)):
        raise DigestMismatch(weights.where, problems, DAMAGED)


def _check_dtypes(weights: WeightSet, names: Sequence[str], framework: Framework) -> None:
    lacking = [name for name in names if framework == "numpy" and DTYPES[weights.tensors[name].dtype].numpy is None]
    if lacking:
        dtype = weights.tensors[lacking[0]].dtype
        raise Unsupported(f'{weights.where}: {lacking[0]} is {dtype}, which numpy has not; say framework="torch"')


def _converter(framework: Framework) -> Any:
    if framework == "numpy":
        return _as_array
    if framework != "torch":
        raise Unsupported(f'framework={framework!r}: expected "numpy" or "torch"')
    try:
        from .tensors import as_tensor
    except ImportError as error:
        raise MissingExtra('read_weights(framework="torch")', "torch") from error

    def convert(weights: WeightSet, name: str, memory: memoryview) -> Any:
        stored = weights.tensors[name]
        return as_tensor(memory, stored.dtype, stored.shape)

    return convert


def _as_array(weights: WeightSet, name: str, memory: memoryview) -> np.ndarray:
    stored = weights.tensors[name]
    return np.frombuffer(memory, DTYPES[stored.dtype].numpy).reshape(stored.shape)
