"""Checkpoints as sets of tensors, for the commands `weightswap inspect` and `weightswap diff`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from weightswap_runtime.tensors.dtypes import nbytes
from weightswap_tools.tensor_set import Opener, SetRequest, SetTensor, TensorSet

from .level_choice import check_tensors, choose_level, fullest_level, refuse
from .nested_state_dicts import Choice, NestedStateDict
from .reading_checkpoints import Checkpoint, find_opener, open_checkpoint
from .tensor import CheckpointTensor, copy_part


def reader(path: Path) -> Opener | None:
    """Return an opener for a checkpoint that `pack` takes; None for other files. See `weightswap_tools.tensor_set`.

    Raises CheckpointError for a folder without a checkpoint, and for a file that is only part of one.
    """
    return partial(_open, path) if find_opener(path) else None


@contextmanager
def _open(path: Path, request: SetRequest) -> Iterator[TensorSet]:
    with open_checkpoint(path, Choice(request.level)) as checkpoint:
        level = _choose(checkpoint, request)
        check_tensors(level, checkpoint.where)
        refuse(text for values in level.tensors.values() for text in values.lacking())
        yield TensorSet(
            checkpoint.where,
            {name: _set_tensor(values, checkpoint.where) for name, values in level.tensors.items()},
            {str(file): file.name for file in sorted({v.file for v in level.tensors.values() if v.file})},
            partial(_check, checkpoint, level),
            level=level.path,
            others={name: len(names) for name, names in checkpoint.mappings().items() if names and name != level.path},
        )


def _choose(checkpoint: Checkpoint, request: SetRequest) -> NestedStateDict:
    if request.manifest is None:
        return fullest_level(checkpoint, request.level)
    return choose_level(checkpoint, request.manifest, request.readings)[0]


def _set_tensor(values: CheckpointTensor, where: str) -> SetTensor:
    read = values.parts()
    return SetTensor(
        values.dtype,
        values.shape,
        nbytes(values.dtype, values.shape) or 0,
        str(values.file or where),
        values.offset,
        values.tie_key,
        read or (lambda memory, begin: copy_part(values.load(), memory, begin)),
        whole=read is None,
    )


def _check(checkpoint: Checkpoint, level: NestedStateDict, names: Collection[str]) -> None:
    checkpoint.check_unchanged()
    refuse(text for name in names for text in level.tensors[name].problems())
