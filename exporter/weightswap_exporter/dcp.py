"""Reading a torch.distributed.checkpoint directory: tensor by tensor, from the chunks of all ranks, in one process."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from weightswap_runtime.errors import CheckpointError

from .dcp_metadata import METADATA_NAME, Chunk, Described, read_metadata
from .stored import Files, Stored, Window, read_into, row_major, span
from .values import PIECE, Values, dtype_of

_LOCAL_HEADER = struct.Struct("<26xHH")


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
            with files.open(folder / chunk.file) as fd:
                _locate(fd, folder, name, found, chunk)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _load(folder: Path, files: Files, name: str, found: Described) -> torch.Tensor:
    whole = torch.empty(found.shape, dtype=found.dtype)
    for chunk in found.chunks:
        region = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        with files.open(folder / chunk.file) as fd:
            _read_chunk(_locate(fd, folder, name, found, chunk), region)
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


def _locate(fd: int, folder: Path, name: str, found: Described, chunk: Chunk) -> Stored:
    """Where in its file a chunk's values are: each chunk is what `torch.save` writes for one tensor."""
    where = f"{folder / chunk.file}: the chunk of {name} at byte {chunk.begin}"
    file = io.BufferedReader(Window(fd, chunk.begin, chunk.length))
    try:
        # nothing but the tensor's description is read; on the meta device it has no values
        meta: Any = torch.load(file, map_location="meta", weights_only=True)
        record = _record(file)
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{where} cannot be read ({reason}). The file is damaged or cut off: save the checkpoint again, or copy it "
            "again."
        ) from error
    if not isinstance(meta, torch.Tensor) or meta.dtype != found.dtype or tuple(meta.shape) != chunk.sizes:
        raise CheckpointError(f"{where} is not the {found.dtype} {list(chunk.sizes)} that the metadata promise")
    offset = int(meta.storage_offset()) * meta.dtype.itemsize
    stored = Stored(where, fd, chunk.begin + record[0] + offset, meta.dtype, chunk.sizes, meta.stride())
    if offset + span(stored.shape, stored.stride) * meta.dtype.itemsize > record[1]:
        raise CheckpointError(f"{where} reaches over the {record[1]} bytes that are stored for it")
    return stored


def _record(file: IO[bytes]) -> tuple[int, int]:
    """Offset and size of the only storage in a file that `torch.save` wrote."""
    with zipfile.ZipFile(file) as archive:
        records = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("it does not have one uncompressed storage")
    file.seek(records[0].header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return records[0].header_offset + _LOCAL_HEADER.size + name_length + extra_length, records[0].file_size
