"""Reading a torch.distributed.checkpoint directory: tensor by tensor, from the chunks of all ranks, in one process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from weightswap_runtime.errors import CheckpointError

from .dcp_metadata import METADATA_NAME, Chunk, Described, read_metadata
from .stored import Files, Stored, Window, read_into, row_major, span
from .values import PIECE, Values, dtype_of
from .zipped import Record, damaged_pickle, is_damaged, read_records

_AGAIN = "Save the checkpoint again, or copy it again."


def open_dcp(folder: Path, files: Files) -> dict[str, Values]:
    """The tensors of a checkpoint by their flat names; `files` opens the chunks' files. Raises CheckpointError."""
    return {
        name: Values(
            dtype=dtype_of(found.dtype),
            shape=found.shape,
            place=(folder, name),
            load=partial(_load, folder, files, name, found),
            problems=partial(_problems, folder, files, name, found),
        )
        for name, found in read_metadata(folder / METADATA_NAME).items()
    }


def _problems(folder: Path, files: Files, name: str, found: Described) -> list[str]:
    problems = list(found.problems)
    for chunk in () if problems else found.chunks:
        try:
            problems += _damage(folder, files, name, found, chunk)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _damage(folder: Path, files: Files, name: str, found: Described, chunk: Chunk) -> Iterator[str]:
    path = folder / chunk.file
    if not path.exists():
        yield f"{path}: missing, and the metadata name it. {_AGAIN}"
        return
    with files.open(path) as fd:
        stored, records = _locate(fd, folder, name, found, chunk)
        damaged = is_damaged(fd, records["data/0"], stored.where, chunk.begin)
        if damaged or damaged_pickle(fd, records, stored.where, chunk.begin):
            yield f"{stored.where} is damaged: its CRC-32 is not the one that the file records. {_AGAIN}"


def _load(folder: Path, files: Files, name: str, found: Described) -> torch.Tensor:
    whole = torch.empty(found.shape, dtype=found.dtype)
    for chunk in found.chunks:
        region = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        with files.open(folder / chunk.file) as fd:
            _read_chunk(_locate(fd, folder, name, found, chunk)[0], region)
    return whole


def _read_chunk(stored: Stored, region: torch.Tensor) -> None:
    """Read a chunk into its place in the tensor; a few rows at a time where it is not one run of memory."""
    if stored.stride != row_major(stored.shape):
        region.copy_(stored.load())
    elif region.is_contiguous():
        read_into(stored.fd, region.view(-1).view(torch.uint8).numpy().data, stored.offset, stored.where)
    else:
        for first, part in _row_groups(stored):
            region[first : first + part.shape[0]].copy_(part.load())


def _row_groups(stored: Stored) -> Iterator[tuple[int, Stored]]:
    row = prod(stored.shape[1:]) * stored.dtype.itemsize
    count = max(1, PIECE // row)
    for first in range(0, stored.shape[0], count):
        shape = (min(count, stored.shape[0] - first), *stored.shape[1:])
        yield first, stored._replace(offset=stored.offset + first * row, shape=shape)


def _locate(fd: int, folder: Path, name: str, found: Described, chunk: Chunk) -> tuple[Stored, dict[str, Record]]:
    """Where in its file a chunk's values are: each chunk is what `torch.save` writes for one tensor, a zip."""
    where = f"{folder / chunk.file}: the chunk of {name} at byte {chunk.begin}"
    file = io.BufferedReader(Window(fd, chunk.begin, chunk.length))
    try:
        # nothing but the tensor's description is read; on the meta device it has no values
        meta: Any = torch.load(file, map_location="meta", weights_only=True)
        records = read_records(file)
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{where} cannot be read ({reason}). The file is damaged or cut off. {_AGAIN}") from error
    if [key for key in records if key.startswith("data/")] != ["data/0"]:
        raise CheckpointError(f"{where} does not have one storage, as torch.save writes for a tensor. {_AGAIN}")
    if not isinstance(meta, torch.Tensor) or meta.dtype != found.dtype or tuple(meta.shape) != chunk.sizes:
        raise CheckpointError(f"{where} is not the {found.dtype} {list(chunk.sizes)} that the metadata promise")
    if meta.is_conj() or meta.is_neg():
        raise CheckpointError(f"{where} is a conjugate or negative view; save {name}.resolve_conj().resolve_neg()")
    record = records["data/0"]
    offset = int(meta.storage_offset()) * meta.dtype.itemsize
    stored = Stored(where, fd, chunk.begin + record.offset + offset, meta.dtype, chunk.sizes, meta.stride())
    if offset + span(stored.shape, stored.stride) * meta.dtype.itemsize > record.size:
        raise CheckpointError(f"{where} reaches over the {record.size} bytes that are stored for it")
    return stored, records
