"""Which tensor of one set is which of the other: by name, or by content where a name is only in one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from typing import NamedTuple

from weightswap_runtime.tensors.dtypes import DTYPES, TensorType
from weightswap_tools.module_tree import natural

from .sides import Side
from .streaming import Tensor, digests_of

FEWEST_COMMON = 0.1  # of the smaller set's names; below that they are those of something else


class TensorPair(NamedTuple):
    """A tensor of either set, or of both: under one name, or under two if it was renamed."""

    name: str
    before: Tensor | None
    after: Tensor | None
    renamed_from: str | None = None

    @property
    def present(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.before, self.after) if tensor is not None)

    @property
    def comparable(self) -> bool:
        """Whether each element has its counterpart."""
        if self.before is None or self.after is None or self.before.shape != self.after.shape:
            return False
        whole = all(DTYPES[tensor.dtype].bits % 8 == 0 for tensor in self.present)
        return whole or self.before.dtype == self.after.dtype


class Pairs(NamedTuple):
    """Every tensor of either set, once: those of both, the removed, the added, each in the order of their names.

    aliases: names that one set alone has, of tensors which it has under a name of both, too; with that name.
    """

    pairs: tuple[TensorPair, ...]
    aliases: tuple[Mapping[str, str], Mapping[str, str]]


def pair(before: Side, after: Side) -> Pairs:
    """Match names, then contents: a tensor that is missing and one that is new are one if their bytes are equal.

    A tied tensor of one set, of whose names the other has only some, is compared under those.
    Of several with the same bytes (of biases that are zero, such as) the names are matched in their natural order.
    Raises WeightFileError.
    """
    common = sorted(before.tensors.keys() & after.tensors.keys(), key=natural)
    pairs = [TensorPair(name, before.tensors[name], after.tensors[name]) for name in common]
    aliases = tuple(_aliases(side, set(common)) for side in (before, after))
    gone, new = (side.tensors.keys() - {*common, *found} for side, found in zip((before, after), aliases, strict=True))
    renames = dict(_renames(before, after, gone, new))
    pairs += [TensorPair(to, before.tensors[name], after.tensors[to], name) for name, to in renames.items()]
    removed, added = (sorted(names, key=natural) for names in (gone - renames.keys(), new - set(renames.values())))
    pairs += [TensorPair(name, before.tensors[name], None) for name in removed]
    pairs += [TensorPair(name, None, after.tensors[name]) for name in added]
    return Pairs(tuple(pairs), (aliases[0], aliases[1]))


def _aliases(side: Side, common: Set[str]) -> dict[str, str]:
    names = sorted(side.ties.keys() - common, key=natural)
    known = ((name, next((other for other in side.ties[name] if other in common), None)) for name in names)
    return {name: other for name, other in known if other is not None}


def strangers(before: Side, after: Side) -> bool:
    """Whether the names of two sets have next to nothing in common."""
    fewest = min(len(before.tensors), len(after.tensors))
    return len(before.tensors.keys() & after.tensors.keys()) < FEWEST_COMMON * fewest


def _renames(before: Side, after: Side, gone: Collection[str], new: Collection[str]) -> Iterator[tuple[str, str]]:
    types = {TensorType.of(before.tensors[name]) for name in gone} & {
        TensorType.of(after.tensors[name]) for name in new
    }
    left, right = (
        {name: side.tensors[name] for name in names if TensorType.of(side.tensors[name]) in types}
        for side, names in ((before, gone), (after, new))
    )
    there, here = _by_content(left, before.digests), _by_content(right, after.digests)
    for content, names in there.items():
        yield from zip(names, here.get(content, ()), strict=False)


def _by_content(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> dict[object, list[str]]:
    """Names, in natural order, by type and digest; computed where the file records none."""
    unknown = {name: tensor for name, tensor in tensors.items() if name not in digests}
    found = {name: digests[name] for name in tensors if name in digests} | digests_of(unknown)
    groups: dict[object, list[str]] = defaultdict(list)
    for name in sorted(found, key=natural):
        groups[(TensorType.of(tensors[name]), found[name])].append(name)
    return groups
