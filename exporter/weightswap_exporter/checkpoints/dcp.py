"""Folders by torch.distributed.checkpoint.

`.metadata` is a pickle that says of each tensor which blocks it consists of, its chunks, and where each is: a range of
bytes in a `.distcp` file, in which `torch.save` has written the block. The pickle names a few classes of torch; nothing
of these is run. A chunk that is one run of the tensor's bytes is read in place; others go by way of the whole tensor.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from math import prod
from operator import itemgetter
from pathlib import Path, PurePosixPath
from reprlib import repr as shown
from typing import Any, NamedTuple

import torch

from weightswap_exporter.modules.tensors import is_empty_state
from weightswap_runtime.errors import MOST_PRINTED, CheckpointError
from weightswap_runtime.format.names import extra_state_of
from weightswap_runtime.sources.rectangles import Box, grid_problem
from weightswap_runtime.tensors import row_major

from .pickle_scan import scan
from .tensor import PIECE, CheckpointTensor, Files, Read, Stored, Window, dtype_of, read_into
from .torch_files import PICKLE_NAME, Record, check_description, is_damaged, read_records

METADATA_NAME = ".metadata"
CHUNKS_SUFFIX = ".distcp"
PART = 1 << 20  # largest size in bytes of a chunk that may be read whole for each part of it
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),  # torch 2.0
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
}
_AGAIN = "Save the checkpoint again, or copy it again."
_BYTES_OF_CHUNK = 16  # a pickle needs more to describe one; less means that tensors share a list of chunks
_MOST_AXES = 64  # of a tensor; nobody has more
_MOST_OF_PATH = 4096  # characters of a file's name


class Chunk(NamedTuple):
    """Block of a tensor in a file."""

    offsets: tuple[int, ...]  # in the tensor
    sizes: tuple[int, ...]
    file: str
    begin: int  # in the file, in bytes
    length: int


class ChunkedTensor(NamedTuple):
    """Tensor as described by the metadata."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    problems: tuple[str, ...]  # reasons why its chunks do not form the tensor
    holder: str = ""  # path of the mapping that it was saved in, such as `model`; empty for the top, and if unknown


class SavedState(NamedTuple):
    """Extra state (`Module.get_extra_state`) that is no tensor, but a pickle."""

    place: Chunk | None  # None if the metadata do not locate it
    holder: str  # as of a tensor


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
        self._runs = sorted(_runs(described), key=itemgetter(0))
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
        path = self.folder / chunk.file
        with self._files.open(path) as fd:
            stored, records = self._locate(fd, chunk)
            record = records["data/0"]
            place = chunk.begin + record.offset, record.size, record.crc
            if self._files.is_damaged(path, place, lambda: is_damaged(fd, record, stored.where, chunk.begin)):
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
        for run_begin, run_end, chunk in self._runs:
            first, last = max(begin, run_begin), min(end, run_end)
            if first < last:
                with self._files.open(self.folder / chunk.file) as fd:
                    self._stored(fd, chunk).read(memory[first - begin : last - begin], first - run_begin)

    def _stored(self, fd: int, chunk: Chunk) -> Stored:
        if chunk not in self._located:
            self._located[chunk] = self._locate(fd, chunk)[0]
        return self._located[chunk]._replace(fd=fd)

    def _locate(self, fd: int, chunk: Chunk) -> tuple[Stored, dict[str, Record]]:
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


def _runs(described: ChunkedTensor) -> Iterator[tuple[int, int, Chunk]]:
    """Yield the chunks that are one run of the tensor's bytes, each with the beginning and the end of the run: they are
    cut along one dimension, with one index in each dimension before it."""
    steps = row_major(described.shape)
    for chunk in () if described.problems else described.chunks:
        cut = next((index for index, size in enumerate(chunk.sizes) if size > 1), len(chunk.sizes))
        if chunk.sizes[cut + 1 :] == described.shape[cut + 1 :]:
            begin = sum(offset * step for offset, step in zip(chunk.offsets, steps, strict=True))
            size = described.dtype.itemsize
            yield begin * size, (begin + prod(chunk.sizes)) * size, chunk


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


# The metadata.


def read_metadata(path: Path) -> dict[str, ChunkedTensor | SavedState]:
    """Return the tensors and extra states of a checkpoint by name, without other entries. Raises CheckpointError."""
    if not path.is_file():  # opening a pipe would block
        raise CheckpointError(f"{path}: cannot be opened (not a regular file)")
    try:
        raw = path.read_bytes()
        scan(raw)
        document = _Unpickler(io.BytesIO(raw), str(path)).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise CheckpointError(f"{path}: not the metadata of a distributed checkpoint ({error}). {_AGAIN}") from error
    try:
        stored = _stored(document)
        entries = {
            name: entry
            for name, entry in _mapping(document.state_dict_metadata).items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
        if sum(len(entry.chunks) for entry in entries.values()) > len(raw) // _BYTES_OF_CHUNK:
            raise ValueError("several tensors are described by the same chunks")
        tensors = {
            name: _described(name, entry, stored.get(name, {}))._replace(holder=_holder(document, name))
            for name, entry in entries.items()
        }
        others = [name for name in document.state_dict_metadata if name not in entries and extra_state_of(name)]
        return {**tensors, **{name: _state(stored.get(name, {}), _holder(document, name)) for name in others}}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is not valid metadata of a checkpoint ({error}). {_AGAIN}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, where: str) -> None:
        super().__init__(file)
        self._where = where
        # made for each unpickler, as a pickle can set attributes of the classes that it names
        self._classes = {
            (module, name): type(name, (_Substitute,), {}) for module, names in _CLASSES.items() for name in names
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if module == "collections" and name == "OrderedDict":
            return dict
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout):
            return value
        raise CheckpointError(
            f"{self._where}: names {module}.{name}, which the metadata of a checkpoint does not need, and loading it "
            "could run any code; it was not loaded. Do not use this checkpoint unless you trust its source; if you "
            "do, save the state dict with torch.save or as .safetensors."
        )


class _Substitute:
    """Substitute for an object in the pickle: its attributes, without any code."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)
        else:
            self.args = state


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a dict, found a {type(value).__name__}")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MOST_AXES or not all(map(_is_size, value)):
        raise TypeError(f"expected sizes, found {shown(value)}")
    return value


def _stored(document: Any) -> dict[str, dict[str, Any]]:
    """Return the storage info of each chunk: name -> offsets in the tensor, as a text -> info.

    Anybody can find numbers whose hashes as a tuple are equal; the hashes of texts are random.
    """
    stored: dict[str, dict[str, Any]] = {}
    for index, info in _mapping(document.storage_data).items():
        offset = getattr(index, "offset", None)
        if not isinstance(index.fqn, str):
            raise TypeError(f"expected a name, found {shown(index.fqn)}")
        stored.setdefault(index.fqn, {})[str(offset if offset is None else _sizes(offset))] = info
    return stored


def _holder(document: Any, name: str) -> str:
    """Return the path of a tensor's mapping, from the keys that torch's planner has joined to its name."""
    planned = getattr(document, "planner_data", None)
    keys = planned.get(name) if isinstance(planned, Mapping) else None
    if not isinstance(keys, tuple) or not all(isinstance(key, str | int) for key in keys):
        return ""
    if len(keys) + sum(len(key) for key in keys if isinstance(key, str)) > len(name) + 1:  # one text in many keys
        return ""
    return ".".join(map(str, keys[:-1]))


def _described(name: str, entry: Any, stored: Mapping[str, Any]) -> ChunkedTensor:
    properties = entry.properties
    dtype = properties.args[0] if properties.args else properties.dtype
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has the dtype {shown(dtype)}")
    shape = _sizes(entry.size)
    blocks = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
    blocks = [block for block in blocks if prod(block[1])]
    missing = (offsets for offsets, _ in blocks if str(offsets) not in stored)
    found = [(_chunk(*block, info), info) for block in blocks if (info := stored.get(str(block[0]))) is not None]
    problems = chain(
        (f"the metadata does not locate its chunk at {list(offsets)}" for offsets in missing),
        _gaps(shape, blocks),
        (text for chunk, info in found for text in _misplaced(chunk, info)),
    )
    first = tuple(f"{name}: {text}" for text in islice(problems, MOST_PRINTED))
    return ChunkedTensor(dtype, shape, tuple(chunk for chunk, _ in found), first)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    begin, length = _sizes((info.offset, info.length))
    if not isinstance(info.relative_path, str) or len(info.relative_path) > _MOST_OF_PATH:
        raise TypeError(f"expected a file name, found {shown(info.relative_path)}")
    return Chunk(offsets, sizes, info.relative_path, begin, length)


def _state(stored: Mapping[str, Any], holder: str) -> SavedState:
    places = [_chunk((), (), info) for info in stored.values()]
    return SavedState(places[0] if places and not list(_misplaced(places[0], None)) else None, holder)


def _misplaced(chunk: Chunk, info: Any) -> Iterator[str]:
    path = PurePosixPath(chunk.file)
    if path.is_absolute() or ".." in path.parts or "\0" in chunk.file:
        yield f"is stored in {chunk.file!r}, outside the checkpoint's folder"
    if extensions := getattr(info, "transform_descriptors", None):
        yield f"was written with extensions ({shown(extensions)}); save without them"


# Whether the chunks make up the tensor.


def _gaps(shape: tuple[int, ...], blocks: list[Box]) -> Iterator[str]:
    """Yield reasons why the blocks do not cover the tensor exactly once."""
    for offsets, sizes in blocks:
        ends = [start + size for start, size in zip(offsets, sizes, strict=False)]
        if len(offsets) != len(shape) or len(sizes) != len(shape) or any(map(int.__gt__, ends, shape)):
            yield f"its chunk {list(sizes)} at {list(offsets)} extends beyond its shape {list(shape)}"
            return
    covered = sum(prod(sizes) for _, sizes in blocks)
    if covered != prod(shape):
        yield f"its chunks have {covered} elements, but its shape {list(shape)} has {prod(shape)}"
    elif covered and (problem := grid_problem(shape, blocks)):
        yield f"its chunks are no grid: {problem[0]}"
