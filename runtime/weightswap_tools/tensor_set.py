"""Sets of named tensors that are looked at: files of ours, and checkpoints that installed distributions can read.

A distribution offers a `Reader` under the entry point group `weightswap.checkpoints`. It is asked for local paths alone
that the runtime does not know.
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

    nbytes: of its row-major, little-endian elements. file: where these are; the set's own path if that is not one
    file. offset: of the first in the file, in bytes; None where that cannot be said. tie_key: equal for tensors that
    are one. read_into: fills memory with the bytes from a place on, also in several threads; raises WeightswapError.
    whole: reading any part of it takes the memory of all of it.
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

    files: what the files are called in short. check: raises WeightswapError if a file was written to
    since it was opened, or if check sums tell that the bytes of tensors of these names are damaged. weights: the set as
    swaps open it, if they can. level: where in its file the set is, such as `model`, empty for the top; None for files
    without levels. others: what else could be named as the level, with the number of its tensors.
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
        """The path with the level."""
        return f"{self.where}, {self.level}" if self.level else self.where

    @property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """The names of a tensor that has several, by each of them: the others."""
        groups: dict[Hashable, list[str]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(tensor.tie_key, []).append(name)
        return {name: tuple(other for other in names if other != name) for names in groups.values() for name in names}


class SetRequest(NamedTuple):
    """Which of a checkpoint's levels to open: the one of this name; else the one that has the manifest's weights, by
    one of the readings; without either, the one with the most tensors.
    """

    level: str | None = None
    manifest: Manifest | None = None
    readings: Readings = UNAMBIGUOUS


Opener = Callable[[SetRequest], AbstractContextManager[TensorSet]]
Reader = Callable[[Path], Opener | None]  # None: nothing that this reader knows


@contextmanager
def open_set(path: str | os.PathLike[str], request: SetRequest | None = None) -> Iterator[TensorSet]:
    """Open a path or URL as `open_weights` does, or a checkpoint that an installed reader knows. Values are not read.

    What the request says is for readers alone.

    Raises WeightFileError, CheckpointError, WeightsMismatch for a checkpoint without the weights that are asked for,
    Unsupported, and MissingExtra if nothing that is installed reads what is there.
    """
    location = as_location(path)
    opener = _opener(location) if isinstance(location, Path) and not _is_ours(location) else None
    if opener is not None:
        with opener(request or SetRequest()) as found:
            yield found
        return
    with open_weights(path) as weights:
        yield _ours(weights)


def check_levels(asked: Iterable[str | None], sets: Sequence[TensorSet]) -> None:
    """Raise Unsupported if a level was asked for where no set could have one."""
    if any(level is not None for level in asked) and all(found.level is None for found in sets):
        where = " and ".join(dict.fromkeys(found.where for found in sets))
        raise Unsupported(f"{where}: only pickled and distributed checkpoints have levels; leave --level out")


def _ours(weights: WeightSet) -> TensorSet:
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


def _is_ours(path: Path) -> bool:
    """Whether the runtime opens what is there; what is not there is also its to refuse."""
    names = local_names(path)
    if names is not None:
        return any(name == MANIFEST_NAME or name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)
    return path.name.endswith((SUFFIX, INDEX_SUFFIX)) or not is_file(path) or _begins_with_a_header(path)


def _begins_with_a_header(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return True  # it cannot be opened, and `open_weights` says why


def _opener(path: Path) -> Opener | None:
    """What opens a path that the runtime does not know. Raises MissingExtra."""
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
