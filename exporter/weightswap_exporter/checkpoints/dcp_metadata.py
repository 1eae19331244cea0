"""The `.metadata` file of a torch.distributed.checkpoint folder: a pickle, read without executing code.

torch reads it with `pickle.load`, which executes any code in the file. Here each class that such a file may name is
replaced by an inert record class, made for one reading; any other name is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path, PurePosixPath
from reprlib import repr as shown  # short even for values that contain themselves
from typing import Any, NamedTuple

import torch

from weightswap_runtime.errors import CheckpointError

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


def read_metadata(path: Path) -> dict[str, ChunkedTensor]:
    """Return the tensors of a checkpoint by name, without entries of other kinds. Raises CheckpointError."""
    if not path.is_file():  # opening a pipe would block
        raise CheckpointError(f"{path}: cannot be opened (not a regular file)")
    try:
        with path.open("rb") as file:
            document = _Unpickler(file, str(path)).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise CheckpointError(f"{path}: not the metadata of a distributed checkpoint ({error}). {_AGAIN}") from error
    try:
        stored = _stored(document)
        return {
            name: _described(name, entry, stored.get(name, {}))._replace(holder=_holder(document, name))
            for name, entry in _mapping(document.state_dict_metadata).items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
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


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise TypeError(f"expected sizes, found {shown(value)}")
    return value


def _stored(document: Any) -> dict[str, dict[tuple[int, ...] | None, Any]]:
    """Return the storage info of each chunk: name -> offsets in the tensor -> info."""
    stored: dict[str, dict[tuple[int, ...] | None, Any]] = {}
    for index, info in _mapping(document.storage_data).items():
        offset = getattr(index, "offset", None)
        stored.setdefault(index.fqn, {})[None if offset is None else _sizes(offset)] = info
    return stored


def _holder(document: Any, name: str) -> str:
    """Return the path of a tensor's mapping, from the keys that torch's planner has joined to its name."""
    planned = getattr(document, "planner_data", None)
    keys = planned.get(name) if isinstance(planned, Mapping) else None
    if not isinstance(keys, tuple) or not all(isinstance(key, str | int) for key in keys):
        return ""
    return ".".join(map(str, keys[:-1]))


def _described(name: str, entry: Any, stored: Mapping[tuple[int, ...] | None, Any]) -> ChunkedTensor:
    properties = entry.properties
    dtype = properties.args[0] if properties.args else properties.dtype
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has the dtype {shown(dtype)}")
    shape = _sizes(entry.size)
    blocks = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
    blocks = [block for block in blocks if prod(block[1])]
    missing = [offsets for offsets, _ in blocks if offsets not in stored]
    problems = [f"{name}: the metadata does not locate its chunk at {list(offsets)}" for offsets in missing]
    chunks = [_chunk(*block, stored[block[0]]) for block in blocks if block[0] in stored]
    problems += [f"{name}: {text}" for text in _gaps(shape, blocks)]
    problems += [f"{name}: {text}" for chunk in chunks for text in _misplaced(chunk, stored[chunk.offsets])]
    return ChunkedTensor(dtype, shape, tuple(chunks), tuple(problems))


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    begin, length = _sizes((info.offset, info.length))
    if not isinstance(info.relative_path, str):
        raise TypeError(f"expected a file name, found {shown(info.relative_path)}")
    return Chunk(offsets, sizes, info.relative_path, begin, length)


def _misplaced(chunk: Chunk, info: Any) -> Iterator[str]:
    path = PurePosixPath(chunk.file)
    if path.is_absolute() or ".." in path.parts or "\0" in chunk.file:
        yield f"is stored in {chunk.file!r}, outside the checkpoint's folder"
    if extensions := getattr(info, "transform_descriptors", None):
        yield f"was written with extensions ({', '.join(map(str, extensions))}); save without them"


def _gaps(shape: tuple[int, ...], blocks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[str]:
    """Yield reasons why the blocks do not cover the tensor exactly once."""
    for offsets, sizes in blocks:
        ends = [start + size for start, size in zip(offsets, sizes, strict=False)]
        if len(offsets) != len(shape) or len(sizes) != len(shape) or any(map(int.__gt__, ends, shape)):
            yield f"its chunk {list(sizes)} at {list(offsets)} extends beyond its shape {list(shape)}"
            return
    covered = sum(prod(sizes) for _, sizes in blocks)
    if covered != prod(shape):
        yield f"its chunks have {covered} elements, but its shape {list(shape)} has {prod(shape)}"
    elif shape and blocks and (overlap := _overlap(blocks)):
        yield f"its chunks at {list(overlap[0])} and {list(overlap[1])} overlap"


def _overlap(blocks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return two blocks that overlap, or None. Sorts them along the dimension with the most cuts."""
    axis = max(range(len(blocks[0][0])), key=lambda axis: len({offsets[axis] for offsets, _ in blocks}))
    blocks = sorted(blocks, key=lambda block: block[0][axis])
    for position, (offsets, sizes) in enumerate(blocks):
        for later in range(position + 1, len(blocks)):
            others, other_sizes = blocks[later]
            if others[axis] >= offsets[axis] + sizes[axis]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, others, other_sizes, strict=True)):
                return offsets, others
    return None
