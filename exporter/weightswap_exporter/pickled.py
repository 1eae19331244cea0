"""Checkpoints that `torch.save` wrote. Only `torch.load(weights_only=True)` opens them; nothing else is unpickled."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch

from weightswap_runtime.errors import CheckpointError, WeightFileError
from weightswap_runtime.weightset import read_index

from .stored import Files, Stored
from .values import Values, dtype_of, values_of

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX_SUFFIX = ".bin.index.json"
_MAPS = Path("/proc/self/maps")
_UNWANTED = re.compile(r"GLOBAL (\S+)")


class _Mapped(NamedTuple):
    """A range of addresses that shows an open file from `offset` on."""

    start: int
    end: int
    offset: int
    fd: int
    path: Path


class Pickled(NamedTuple):
    """What open files hold. The tensors of `tree` are mapped; `values_of` tells how to read them from the files."""

    tree: Mapping[Any, Any]
    mapped: tuple[_Mapped, ...]

    def values_of(self, tensor: torch.Tensor) -> Values:
        """Where a tensor's values are. One that torch has put elsewhere stays there."""
        address = tensor.data_ptr()
        for start, end, offset, fd, path in self.mapped if tensor.numel() else ():
            if start <= address < end:
                shape, stride = tuple(tensor.shape), tuple(tensor.stride())
                stored = Stored(str(path), fd, address - start + offset, tensor.dtype, shape, stride)
                return Values(dtype_of(tensor.dtype), shape, stored, stored.load)
        return values_of(tensor)


@contextmanager
def open_pickled(path: Path, files: Files) -> Iterator[Pickled]:
    """Open a file that `torch.save` wrote. In the format before torch 1.6 it is read whole. Raises CheckpointError."""
    with files.open(path) as fd:
        yield Pickled(_load(path), tuple(_mapped(fd, path)))


@contextmanager
def open_pickled_shards(index: Path, files: Files) -> Iterator[Pickled]:
    """Open an index, such as `pytorch_model.bin.index.json`, with its shards. Raises CheckpointError."""
    try:
        weight_map = read_index(index, ".bin")
    except WeightFileError as error:
        raise CheckpointError(str(error)) from error
    with ExitStack() as stack:
        names = sorted(set(weight_map.values()))
        shards = {name: stack.enter_context(open_pickled(index.parent / name, files)) for name in names}
        if problems := list(_index_problems(weight_map, shards)):
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError(
                f"{index}: contradicts its shards: {'; '.join(problems[:5])}{more}. Save it again, or copy it again."
            )
        tree = {key: value for shard in shards.values() for key, value in shard.tree.items()}
        yield Pickled(tree, tuple(mapped for shard in shards.values() for mapped in shard.mapped))


def _index_problems(weight_map: Mapping[str, str], shards: Mapping[str, Pickled]) -> Iterator[str]:
    for key, name in weight_map.items():
        if key not in shards[name].tree:
            yield f"{key!r} is not in {name}"
    for name, shard in shards.items():
        for key in shard.tree:
            if weight_map.get(key) != name:
                other = f"it says {weight_map[key]}" if key in weight_map else "it does not list that"
                yield f"{name} has {key!r}, {other}"


def _mapped(fd: int, path: Path) -> Iterator[_Mapped]:
    """Where this process has mapped a file. Empty on systems without /proc: mapped tensors are then read in place."""
    if not _MAPS.exists():
        return
    inode, name = str(os.fstat(fd).st_ino), os.path.realpath(path)  # some file systems show another inode there
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        addresses, _, offset, _, *file = line.split(maxsplit=5)
        if file[0] == inode or file[1:] == [name]:
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield _Mapped(start, end, int(offset, 16), fd, path)


def _load(path: Path) -> Mapping[Any, Any]:
    zipped = is_zipfile(path)
    if zipped:
        _check_byte_order(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
    except pickle.UnpicklingError as error:
        named = _UNWANTED.search(str(error))
        raise CheckpointError(
            f"{path}: holds more than tensors{f' (it names {named[1]})' if named else ''}, and unpickling it could run "
            "anything, so it was not opened. Save model.state_dict() alone, or a .safetensors file."
        ) from error
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path}: not a checkpoint that torch.load can open ({reason}). Save it again, or copy it again."
        ) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: holds a {type(loaded).__qualname__}, expected a state dict")
    return loaded


def _check_byte_order(path: Path) -> None:
    """torch would turn the bytes in memory; we read them from the file."""
    try:
        with ZipFile(path) as archive:
            orders = {archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")}
    except (BadZipFile, OSError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged ({error}). Save it again, or copy it again.") from error
    if orders - {sys.byteorder.encode()}:
        raise CheckpointError(f"{path}: written on a machine of another byte order; save it as .safetensors there")
