"""Any set of tensors that can be viewed, be it one that swaps open or a checkpoint; and the tree of its names.

Swaps accept safetensors alone. Tools also look into checkpoints of trainers, by readers that other distributions (such
as the exporter) register as entry points: a reader returns what opens a path, or None if it does not know the format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_runtime.format.manifest import MANIFEST_NAME, Manifest
from weightswap_runtime.format.names import UNAMBIGUOUS, Readings
from weightswap_runtime.format.weight_set import (
    INDEX_SUFFIX,
    SUFFIX,
    FileSet,
    StoredTensor,
    is_torch_name,
    local_names,
    open_weights,
)
from weightswap_runtime.sources.location import as_location
from weightswap_runtime.sources.writing import is_file

GROUP = "weightswap.checkpoints"  # of entry points
MOST_LEVELS = 32  # further dots belong to the tensor's own name, as a file can hold arbitrary names
_NUMBERED = re.compile("([^0-9]*)([0-9]*)")


# Open sets.


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
    weights: FileSet | None = None
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


def _runtime_set(weights: FileSet) -> TensorSet:
    def tensor(name: str, stored: StoredTensor) -> SetTensor:
        def read_into(memory: memoryview, begin: int) -> None:
            stored.source.read_into([memory], stored.offset + begin)

        where = stored.source.where
        offset = stored.offset if where in files else None  # a tensor may be in several files
        return SetTensor(stored.dtype, stored.shape, stored.nbytes, where, offset, name, read_into)

    files = {file.where: file.path.name for file in weights.files}
    tensors = {name: tensor(name, stored) for name, stored in weights.tensors.items()}
    return TensorSet(weights.where, tensors, files, lambda _: weights.check_unchanged(), weights)


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


# Names, and the tree of modules that they spell.


def natural(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """Return a sort key that puts `layers.10` after `layers.9` and `h10` after `h9`. Keys of different names differ."""
    parts = [(text, number.lstrip("0")) for text, number in _NUMBERED.findall(name)]
    return [(text, len(number), number) for text, number in parts], name


def split_name(name: str) -> tuple[list[str], str]:
    """Split a tensor's name into the path of its module and its own name there."""
    *path, own = name.split(".", MOST_LEVELS)
    return path, own


@dataclass(frozen=True, eq=False)
class Branch:
    """A module. Its tensors and submodules keep the order in which they were added."""

    parts: tuple[str, ...] = ()  # its path from the root
    names: list[str] = field(default_factory=list)  # the full names of its own tensors
    branches: dict[str, Branch] = field(default_factory=dict)  # its submodules by their own names

    @property
    def name(self) -> str:
        """The last part of its path; empty for the model."""
        return self.parts[-1] if self.parts else ""

    @property
    def path(self) -> str:
        """The dotted path, such as `encoder.layers.0`; empty for the model."""
        return ".".join(self.parts)

    def walk(self) -> Iterator[Branch]:
        """Yield this module and all below it, parents first."""
        yield self
        for branch in self.branches.values():
            yield from branch.walk()

    def every_name(self) -> Iterator[str]:
        """Yield the full names of the tensors in this module and below."""
        for branch in self.walk():
            yield from branch.names

    def reach(self, path: Sequence[str]) -> Branch:
        """Return the module at a path below this one, creating missing modules on the way."""
        branch = self
        for part in path:
            if part not in branch.branches:
                branch.branches[part] = Branch((*branch.parts, part))
            branch = branch.branches[part]
        return branch


def grow(names: Iterable[str]) -> Branch:
    """Build the module hierarchy of these names, and return its root."""
    root = Branch()
    for name in names:
        path, _ = split_name(name)
        root.reach(path).names.append(name)
    return root


def sizes_below(root: Branch, sizes: Mapping[str, int]) -> dict[Branch, int]:
    """Return for each module the sum of the sizes of the tensors in it and below."""
    sums: dict[Branch, int] = {}
    for branch in reversed(list(root.walk())):
        own = sum(sizes[name] for name in branch.names)
        sums[branch] = own + sum(sums[below] for below in branch.branches.values())
    return sums


def totals(sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return for each module its path, and the number and total size of the tensors in it and below."""
    root = grow(sizes)
    sums = sizes_below(root, sizes)
    return [(branch.path, len([*branch.every_name()]), sums[branch]) for branch in root.walk()]


def fingerprints(
    root: Branch, describe: Callable[[str], Hashable], kind: Callable[[str], Hashable]
) -> dict[Branch, int]:
    """Return a number for each module, equal for modules with equal contents.

    describe: the properties of a tensor, given its full name, that have to be equal. kind: the same of a module, given
    its path, such as its class.
    """
    known: dict[Hashable, int] = {}
    marks: dict[Branch, int] = {}
    for branch in reversed(list(root.walk())):
        own = tuple((split_name(name)[1], describe(name)) for name in branch.names)
        below = tuple((name, marks[child]) for name, child in branch.branches.items())
        marks[branch] = known.setdefault((kind(branch.path), own, below), len(known))
    return marks


def runs(branches: Iterable[Branch], marks: Mapping[Branch, int]) -> list[list[Branch]]:
    """Group neighbours with equal fingerprints and consecutive numbers as names (`0`, `1`, …); others stay alone."""
    groups: list[list[Branch]] = []
    for branch in branches:
        if groups and follows(groups[-1][-1].name, branch.name) and marks[groups[-1][-1]] == marks[branch]:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


def follows(name: str, other: str) -> bool:
    """Return whether both names are numbers and `other` is the next one."""
    numbers = all(text.isascii() and text.isdecimal() and len(text) < 10 for text in (name, other))
    return numbers and int(other) == int(name) + 1
