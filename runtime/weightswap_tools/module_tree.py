"""The hierarchy of modules that the names of tensors spell: `encoder.layers.0.weight` is in `encoder.layers.0`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_NUMBERED = re.compile("([^0-9]*)([0-9]*)")
MOST_LEVELS = 32  # below, the dots of a name are part of it: whoever wrote a file chose its names


@dataclass(frozen=True, eq=False)
class Branch:
    """A module: the names that lead to it from the model, the full names of what is directly in it, and its modules.

    Names and modules keep the order in which they came.
    """

    parts: tuple[str, ...] = ()
    names: list[str] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its own name; empty for the model."""
        return self.parts[-1] if self.parts else ""

    @property
    def path(self) -> str:
        """`encoder.layers.0`; empty for the model."""
        return ".".join(self.parts)

    def walk(self) -> Iterator[Branch]:
        """This module and all below, each before those that are in it."""
        yield self
        for branch in self.branches.values():
            yield from branch.walk()

    def every_name(self) -> Iterator[str]:
        """The full names in this module and below."""
        for branch in self.walk():
            yield from branch.names

    def reach(self, path: Sequence[str]) -> Branch:
        """The module at a path below this one; what is missing on the way is made."""
        branch = self
        for part in path:
            if part not in branch.branches:
                branch.branches[part] = Branch((*branch.parts, part))
            branch = branch.branches[part]
        return branch


def split_name(name: str) -> tuple[list[str], str]:
    """The modules that a tensor's name leads through, and its own name in the last of them."""
    *path, own = name.split(".", MOST_LEVELS)
    return path, own


def natural(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """A key to sort names by, so that `layers.10` follows `layers.9`, and `h10` follows `h9`. No two are equal."""
    parts = [(text, number.lstrip("0")) for text, number in _NUMBERED.findall(name)]
    return [(text, len(number), number) for text, number in parts], name


def grow(names: Iterable[str]) -> Branch:
    """The hierarchy of these names."""
    root = Branch()
    for name in names:
        path, _ = split_name(name)
        root.reach(path).names.append(name)
    return root


def sizes_below(root: Branch, sizes: Mapping[str, int]) -> dict[Branch, int]:
    """The sum of the sizes in each module and below."""
    sums: dict[Branch, int] = {}
    for branch in reversed(list(root.walk())):
        own = sum(sizes[name] for name in branch.names)
        sums[branch] = own + sum(sums[below] for below in branch.branches.values())
    return sums


def totals(sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The path of each module, how many of these tensors are in it or below, and the sum of their sizes."""
    root = grow(sizes)
    sums = sizes_below(root, sizes)
    return [(branch.path, len([*branch.every_name()]), sums[branch]) for branch in root.walk()]


def fingerprints(
    root: Branch, describe: Callable[[str], Hashable], kind: Callable[[str], Hashable]
) -> dict[Branch, int]:
    """A number for each module: equal for modules whose contents are alike.

    describe: what has to be equal of their tensors, by full name. kind: what has to be equal of the modules
    themselves, such as their class, by path.
    """
    known: dict[Hashable, int] = {}
    marks: dict[Branch, int] = {}
    for branch in reversed(list(root.walk())):
        own = tuple((split_name(name)[1], describe(name)) for name in branch.names)
        below = tuple((name, marks[found]) for name, found in branch.branches.items())
        marks[branch] = known.setdefault((kind(branch.path), own, below), len(known))
    return marks


def runs(branches: Iterable[Branch], marks: Mapping[Branch, int]) -> list[list[Branch]]:
    """Neighbours that are alike and have consecutive numbers for names (`0`, `1`, …) together, others alone."""
    groups: list[list[Branch]] = []
    for branch in branches:
        if groups and follows(groups[-1][-1].name, branch.name) and marks[groups[-1][-1]] == marks[branch]:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


def follows(name: str, other: str) -> bool:
    """Whether the names are a number and the next one."""
    numbers = name.isascii() and name.isdecimal() and other.isascii() and other.isdecimal()
    return numbers and max(len(name), len(other)) < 10 and int(other) == int(name) + 1
