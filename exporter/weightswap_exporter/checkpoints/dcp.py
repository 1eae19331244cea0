"""Reading of torch.distributed.checkpoint folders in one process: each tensor from the chunks of all ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightswap_exporter.models.tensors import is_empty_state
from weightswap_runtime.errors import CheckpointError
from weightswap_runtime.format.name_matching import extra_state_of
from weightswap_runtime.tensors.dtypes import row_major

from .dcp_metadata import METADATA_NAME, Chunk, ChunkedTensor, SavedState, read_metadata
from .stored import Files, Stored, Window, read_into
from .tensor import PIECE, CheckpointTensor, Read, dtype_of
from .zip_records import PICKLE_NAME, Records, check_description, is_damaged, read_records

PART = 1 << 20  # largest size in bytes of a chunk that may be read whole for each part of it
_AGAIN = "Save the checkpoint again, or copy it again."


def open_dcp(folder: Path, files: Files) -> tuple[dict[str, CheckpointTensor], dict[str, str], list[str]]:
    """Return the tensors of a checkpoint by their flat names, the path of the mapping that each was in, and the names
    of extra states that are no tensors and say something.

    `files` opens the chunks' files. Raises CheckpointError.
    """
    metadata = read_metadata(folder / METADATA_NAME)
    tensors = {}
    extra: dict[str, bool] = {}
    for name, described in metadata.items():
        state = extra_state_of(name)
        if state and (state != name or isinstance(described, SavedState)):  # a dict is saved item by item
            place = described.place if isinstance(described, SavedState) else None
            extra[state] = extra.get(state, False) or state != name or place is None or _says(folder, files, place)
        elif isinstance(described, ChunkedTensor):
            tensors[name] = _values(_AssembledTensor(folder, files, name, described))
    holders = {name: described.holder for name, described in metadata.items()}
    return tensors, holders, [name for name, says in extra.items() if says]


def _says(folder: Path, files: Files, place: Chunk) -> bool:
    """Return whether an extra state says something, also if it cannot be read: it may be of any class."""
    try:
        with files.open(folder / place.file) as fd:
            file = io.BufferedReader(Window(fd, place.begin, place.length))
            check_description(fd, read_records(file), str(folder / place.file), place.begin)
            file.seek(0)
            return not is_empty_state(torch.load(file, map_location="meta", weights_only=True))
    except Exception:
        return True


def _values(tensor: _AssembledTensor) -> CheckpointTensor:
    described = tensor.described
    names = {chunk.file for chunk in described.chunks}
    return CheckpointTensor(
        dtype=dtype_of(described.dtype),
        shape=described.shape,
        tie_key=(tensor.folder, tensor.name),
        load=tensor.load,
        problems=tensor.problems,
        lacking=tensor.lacking,
        parts=tensor.parts,
        file=tensor.folder / names.pop() if len(names) == 1 else None,
    )


class _AssembledTensor:
    """Tensor that is assembled from the chunks in its metadata."""

    def __init__(self, folder: Path, files: Files, name: str, described: ChunkedTensor) -> None:
        self.folder, self.name, self.described = folder, name, described
        self._files = files
        self._runs = sorted(_runs(described), key=attrgetter("begin"))
        self._located: dict[Chunk, Stored] = {}

    def lacking(self) -> list[str]:
        """Return reasons why it cannot be read that the metadata and the files' sizes show."""
        described = self.described
        return [*described.problems] or [text for chunk in described.chunks for text in self._lost(chunk)]

    def problems(self) -> list[str]:
        """Return the problems of `lacking()`, or else chunks that cannot be read or are damaged."""
        problems = self.lacking()
        for chunk in () if problems else self.described.chunks:
            try:
                problems += self._damage(chunk)
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def _lost(self, chunk: Chunk) -> Iterator[str]:
        path = self.folder / chunk.file
        if not path.exists():
            yield f"{path}: missing, but the metadata names it. {_AGAIN}"
        elif (size := path.stat().st_size) < chunk.begin + chunk.length:
            yield f"{path}: cut off: it has {size} bytes, but the metadata places tensors beyond them. {_AGAIN}"

    def _damage(self, chunk: Chunk) -> Iterator[str]:
        with self._files.open(self.folder / chunk.file) as fd:
            stored, records = self._locate(fd, chunk)
            if is_damaged(fd, records["data/0"], stored.where, chunk.begin):
                yield f"{stored.where} is damaged: its CRC-32 does not match the one in the file. {_AGAIN}"

    def load(self) -> torch.Tensor:
        """Read the tensor. Raises CheckpointError."""
        whole = torch.empty(self.described.shape, dtype=self.described.dtype)
        for chunk in self.described.chunks:
            region = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
            with self._files.open(self.folder / chunk.file) as fd:
                _read_chunk(self._locate(fd, chunk)[0], region)
        return whole

    def parts(self) -> Read | None:
        """Return `read`, or None if it would read a large chunk whole for each part. Raises CheckpointError."""
        chunks = self.described.chunks
        if len(self._runs) < len(chunks):
            return None
        return self.read if all(chunk.length < PART or self._is_row_major(chunk) for chunk in chunks) else None

    def _is_row_major(self, chunk: Chunk) -> bool:
        with self._files.open(self.folder / chunk.file) as fd:
            return self._stored(fd, chunk).is_row_major

    def read(self, memory: memoryview, begin: int) -> None:
        """Fill memory with row-major bytes from `begin` on, if each chunk is one run. Raises CheckpointError."""
        end = begin + len(memory)
        for run in self._runs:
            first, last = max(begin, run.begin), min(end, run.end)
            if first < last:
                with self._files.open(self.folder / run.chunk.file) as fd:
                    self._stored(fd, run.chunk).read(memory[first - begin : last - begin], first - run.begin)

    def _stored(self, fd: int, chunk: Chunk) -> Stored:
        if chunk not in self._located:
            self._located[chunk] = self._locate(fd, chunk)[0]
        return self._located[chunk]._replace(fd=fd)

    def _locate(self, fd: int, chunk: Chunk) -> tuple[Stored, Records]:
        """Return the place of a chunk's values in its file. Each chunk is a zip by `torch.save` of one tensor."""
        name, described = self.name, self.described
        where = f"{self.folder / chunk.file}: the chunk of {name} at byte {chunk.begin}"
        file = io.BufferedReader(Window(fd, chunk.begin, chunk.length))
        try:
            records = read_records(file)  # refuses compressed records, which could expand to any size
            if PICKLE_NAME not in records or [key for key in records if key.startswith("data/")] != ["data/0"]:
                raise CheckpointError(f"{where} must have one storage, as torch.save writes for a tensor. {_AGAIN}")
            check_description(fd, records, where, chunk.begin)
            file.seek(0)
            # reads the tensor's description alone, as a meta tensor has no values
            meta: Any = torch.load(file, map_location="meta", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise any error
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(
                f"{where} cannot be read ({reason}). The file is damaged or cut off. {_AGAIN}"
            ) from error
        if not isinstance(meta, torch.Tensor) or meta.dtype != described.dtype or tuple(meta.shape) != chunk.sizes:
            raise CheckpointError(f"{where} is not the {described.dtype} {list(chunk.sizes)} of the metadata")
        if meta.is_conj() or meta.is_neg():
            raise CheckpointError(f"{where} is a conjugate or negative view; save {name}.resolve_conj().resolve_neg()")
        record = records["data/0"]
        offset = int(meta.storage_offset()) * meta.dtype.itemsize
        stored = Stored(where, fd, chunk.begin + record.offset + offset, meta.dtype, chunk.sizes, meta.stride())
        if offset + stored.span > record.size:
            raise CheckpointError(f"{where} extends beyond the {record.size} bytes stored for it")
        return stored, records


class _Run(NamedTuple):
    """Chunk that is one run of a tensor's bytes, from `begin` to `end`."""

    begin: int
    end: int
    chunk: Chunk


def _runs(described: ChunkedTensor) -> Iterator[_Run]:
    """Yield the chunks that are runs: cut along one dimension, with one index in each dimension before it."""
    steps = row_major(described.shape)
    for chunk in () if described.problems else described.chunks:
        cut = next((index for index, size in enumerate(chunk.sizes) if size > 1), len(chunk.sizes))
        if chunk.sizes[cut + 1 :] == described.shape[cut + 1 :]:
            begin = sum(offset * step for offset, step in zip(chunk.offsets, steps, strict=True))
            size = described.dtype.itemsize
            yield _Run(begin * size, (begin + prod(chunk.sizes)) * size, chunk)


def _read_chunk(stored: Stored, region: torch.Tensor) -> None:
    """Read a chunk into its region of the tensor; a few rows at a time if the region is not contiguous."""
    if stored.stride != row_major(stored.shape):
        region.copy_(stored.load())
    elif region.is_contiguous():
        read_into(stored.fd, region.view(-1).view(torch.uint8).numpy().data, stored.offset, stored.where)
    else:
        row = prod(stored.shape[1:]) * stored.dtype.itemsize
        count = max(1, PIECE // row)
        for first in range(0, stored.shape[0], count):
            part = region[first : first + count]
            part.copy_(stored._replace(offset=stored.offset + first * row, shape=tuple(part.shape)).load())
