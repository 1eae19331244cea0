"""Sets of named tensors to inspect and compare: weight files, and checkpoints that installed distributions can read.

A distribution registers a `Reader` in the entry point group `weightswap.checkpoints`. Readers are called only for local
paths that the runtime does not recognise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_runtime.format.manifest import MANIFEST_NAME, Manifest
from weightswap_runtime.format.name_matching import UNAMBIGUOUS, Readings
from weightswap_runtime.format.weight_set import (
    INDEX_SUFFIX,
    SUFFIX,
    StoredTensor,
    WeightSet,
    is_torch_name,
    local_names,
    open_weights,
)
from weightswap_runtime.sources.atomic import is_file
from weightswap_runtime.sources.location import as_location

GROUP = "weightswap.checkpoints"


class SetTensor(NamedTuple):
    """A tensor of a set.

    nbytes: the size of its row-major, little-endian elements. file: the path of the file that holds them, or of the set
    if that is not one file. offset: of the first element in the file, in bytes; None if unknown. tie_key: equal for
    tied tensors. read_into: fills memory with the bytes from an offset on; thread-safe; raises WeightswapError.
    whole: whether reading any part takes the memory of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int | None
    tie_key: Hashable
    read_into: Callable[[memoryview, int], None]
    whole: bool = False


class TensorSet(NamedTuple):
    """An open set.

    files: short names of the files, by path. check: raises WeightswapError if a file was written to since it was
    opened, or if the tensors of these names fail their checksums. weights: the set as swaps open it, or None if they
    cannot. level: the path of the set inside its file, such as `model`; empty for the top; None for files without
    levels. others: the other levels of the file, with their numbers of tensors.
    """

    where: str
    tensors: Mapping[str, SetTensor]
    files: Mapping[str, str]
    check: Callable[[Collection[str]], None]
    weights: WeightSet | None = None
    level: str | None = None
    others: Mapping[str, int] = MappingProxyType({})

    @property
    def full_where(self) -> str:
        """The path, followed by the level if there is one."""
        return f"{self.where}, {self.level}" if self.level else self.where

    @property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """The other names of each tensor, by name; empty for a tensor with one name."""
        groups: dict[Hashable, list[str]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(tensor.tie_key, []).append(name)
        return {name: tuple(other for other in names if other != name) for names in groups.values() for name in names}


class SetRequest(NamedTuple):
    """The choice of a checkpoint's level: the one of this name; else the one that holds the manifest's weights, under
    one of the readings; else the one with the most tensors.
    """

    level: str | None = None
    manifest: Manifest | None = None
    readings: Readings = UNAMBIGUOUS


Opener = Callable[[SetRequest], AbstractContextManager[TensorSet]]
Reader = Callable[[Path], Opener | None]  # None: the reader does not recognise the path


@contextmanager
def open_set(path: str | os.PathLike[str], request: SetRequest | None = None) -> Iterator[TensorSet]:
    """Open a path or URL as `open_weights` does, or a checkpoint with an installed reader. Reads no values.

    request: used by readers only.

    Raises WeightFileError, CheckpointError, Unsupported, WeightsMismatch for a checkpoint without the requested
    weights, and MissingExtra if no installed reader recognises the path.
    """
    location = as_location(path)
    opener = _opener(location) if isinstance(location, Path) and not _is_runtime_format(location) else None
    if opener is not None:
        with opener(request or SetRequest()) as opened:
            yield opened
        return
    with open_weights(path) as weights:
        yield _runtime_set(weights)


def check_levels(levels: Iterable[str | None], sets: Sequence[TensorSet]) -> None:
    """Raise Unsupported if a level is given but no set has levels."""
    if any(level is not None for level in levels) and all(opened.level is None for opened in sets):
        where = " and ".join(dict.fromkeys(opened.where for opened in sets))
        raise Unsupported(f"{where}: only pickled and distributed checkpoints have levels; leave --level out")


def _runtime_set(weights: WeightSet) -> TensorSet:
    tensors = {
        name: SetTensor(
            stored.dtype, stored.shape, stored.nbytes, stored.file.where, stored.offset, name, partial(_read, stored)
        )
        for name, stored in weights.tensors.items()
    }
    files = {file.where: file.path.name for file in weights.files}
    return TensorSet(weights.where, tensors, files, lambda _: weights.check_unchanged(), weights)


def _read(stored: StoredTensor, memory: memoryview, begin: int) -> None:
    stored.file.source.read_into([memory], stored.offset + begin)


def _is_runtime_format(path: Path) -> bool:
    """Return whether the runtime opens the path, or reports that it is missing."""
    names = local_names(path)
    if names is not None:
        return any(name == MANIFEST_NAME or name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)
    return path.name.endswith((SUFFIX, INDEX_SUFFIX)) or not is_file(path) or _has_safetensors_header(path)


def _has_safetensors_header(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return True  # `open_weights` raises the error


def _opener(path: Path) -> Opener | None:
    """Return the opener of the first reader that recognises the path, or None. Raises MissingExtra."""
    missing: ImportError | None = None
    for point in sorted(entry_points(group=GROUP)):
        try:
            reader: Reader = point.load()
        except ImportError as error:
            missing = missing or error
            continue
        if opener := reader(path):
            return opener
    if is_torch_name(path.name) or any(map(is_torch_name, local_names(path) or ())):
        raise MissingExtra(f"{path}: reading a checkpoint that torch wrote", "export") from missing
    return None
