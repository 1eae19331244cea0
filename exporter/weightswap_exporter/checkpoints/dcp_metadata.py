"""The `.metadata` file of a torch.distributed.checkpoint folder: a pickle, read without executing code.

torch reads it with `pickle.load`, which executes any code in the file. Here each class that such a file may name is
replaced by an inert record class, made for one reading; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from itertools import chain, groupby, islice, product
from math import prod
from operator import itemgetter
from pathlib import Path, PurePosixPath
from reprlib import repr as shown  # short even for values that contain themselves
from typing import Any, NamedTuple

import torch

from weightswap_runtime.errors import MOST_PRINTED, CheckpointError
from weightswap_runtime.format.name_matching import extra_state_of

from .pickle_scan import scan

METADATA_NAME = ".metadata"
CHUNKS_SUFFIX = ".distcp"
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
_BYTES_OF_CHUNK = 16  # a pickle needs more to describe one
_MOST_AXES, _MOST_CUT = 64, 6
_MOST_OF_PATH = 4096
_Block = tuple[tuple[int, ...], tuple[int, ...]]


class Chunk(NamedTuple):
    """Block of a tensor: its offsets in the tensor, its sizes, and its range of bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class ChunkedTensor(NamedTuple):
    """Tensor as described by the metadata.

    problems: reasons why its chunks do not form the tensor. holder: path of the mapping that it was saved in, such as
    `model`; empty for the top, and if the metadata do not say it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    problems: tuple[str, ...]
    holder: str = ""


class SavedState(NamedTuple):
    """Extra state (`Module.get_extra_state`) that is no tensor: a pickle in a range of bytes in a file.

    place: None if the metadata do not locate it.
    """

    place: Chunk | None
    holder: str


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


class _Record:
    """Substitute for an object in the pickle: its attributes, without any code."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)
        else:
            self.args = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, where: str) -> None:
        super().__init__(file)
        self._where = where
        # made for each unpickler, as a pickle can set attributes of the classes that it names
        self._classes = {
            (module, name): type(name, (_Record,), {}) for module, names in _CLASSES.items() for name in names
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


def _gaps(shape: tuple[int, ...], blocks: list[_Block]) -> Iterator[str]:
    """Yield reasons why the blocks do not cover the tensor exactly once."""
    for offsets, sizes in blocks:
        ends = [start + size for start, size in zip(offsets, sizes, strict=False)]
        if len(offsets) != len(shape) or len(sizes) != len(shape) or any(map(int.__gt__, ends, shape)):
            yield f"its chunk {list(sizes)} at {list(offsets)} extends beyond its shape {list(shape)}"
            return
    covered = sum(prod(sizes) for _, sizes in blocks)
    if covered != prod(shape):
        yield f"its chunks have {covered} elements, but its shape {list(shape)} has {prod(shape)}"
    elif covered:
        yield from _overlaps(shape, blocks)


def _overlaps(shape: tuple[int, ...], blocks: list[_Block]) -> Iterator[str]:
    """Yield a problem if blocks that have as many elements as the tensor overlap, in time that does not explode.

    Summed with alternating signs, the corners of all blocks cancel out but for those of the whole, if and only if the
    blocks cover it once: the sum is the derivative of the number of blocks at each place.
    """
    cut = [axis for axis, size in enumerate(shape) if any(sizes[axis] != size for _, sizes in blocks)]
    if len(cut) > _MOST_CUT:
        yield f"its chunks are cut along {len(cut)} dimensions, expected at most {_MOST_CUT}"
        return
    corners = [corner for block in blocks for corner in _corners(block, cut, 1)]
    corners += _corners(((0,) * len(shape), shape), cut, -1)
    for place, signs in groupby(sorted(corners), key=itemgetter(0)):  # sorted: hashes of numbers can be made equal
        if sum(sign for _, sign in signs):
            found = dict(zip(cut, place, strict=True))
            yield f"its chunks overlap at {[found.get(axis, 0) for axis in range(len(shape))]}"
            return


def _corners(block: _Block, axes: list[int], sign: int) -> Iterator[tuple[tuple[int, ...], int]]:
    ends = [((block[0][axis], 1), (block[0][axis] + block[1][axis], -1)) for axis in axes]
    for corner in product(*ends):
        yield tuple(place for place, _ in corner), sign * prod(side for _, side in corner)
