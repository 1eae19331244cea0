"""The module hierarchy in the names of tensors: `encoder.layers.0.weight` belongs to `encoder.layers.0`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_NUMBERED = re.compile("([^0-9]*)([0-9]*)")
MOST_LEVELS = 32  # further dots belong to the tensor's own name, as a file can hold arbitrary names


@dataclass(frozen=True, eq=False)
class Branch:
    """A module: its path from the root, the full names of its own tensors, and its submodules.

    Tensors and submodules keep the order in which they were added.
    """

    parts: tuple[str, ...] = ()
    names: list[str] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)

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


def split_name(name: str) -> tuple[list[str], str]:
    """Split a tensor's name into the path of its module and its own name there."""
    *path, own = name.split(".", MOST_LEVELS)
    return path, own


def natural(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """Return a sort key that puts `layers.10` after `layers.9` and `h10` after `h9`. Keys of different names differ."""
    parts = [(text, number.lstrip("0")) for text, number in _NUMBERED.findall(name)]
    return [(text, len(number), number) for text, number in parts], name


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
    numbers = name.isascii() and name.isdecimal() and other.isascii() and other.isdecimal()
    return numbers and max(len(name), len(other)) < 10 and int(other) == int(name) + 1
