"""Matching of the tensors of two sets: by name, or by content for names that only one set has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from typing import NamedTuple

from weightswap_runtime.tensors.dtypes import DTYPES, TensorType
from weightswap_tools.module_tree import natural

from .sides import Side
from .streaming import Tensor, digests_of

FEWEST_COMMON = 0.1  # of the smaller set's names; with fewer, a notice says so and advises --artifact


class TensorPair(NamedTuple):
    """A tensor of one or both sets, with its earlier name if it was renamed."""

    name: str
    before: Tensor | None
    after: Tensor | None
    renamed_from: str | None = None

    @property
    def present(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.before, self.after) if tensor is not None)

    @property
    def comparable(self) -> bool:
        """True if the two tensors can be compared element by element."""
        if self.before is None or self.after is None or self.before.shape != self.after.shape:
            return False
        whole = all(DTYPES[tensor.dtype].bits % 8 == 0 for tensor in self.present)
        return whole or self.before.dtype == self.after.dtype


class Pairs(NamedTuple):
    """Every tensor of either set, once: the common ones, the removed and the added, each ordered by name.

    aliases: for each set, the additional names of its tied tensors that the other set lacks, mapped to a common name.
    """

    pairs: tuple[TensorPair, ...]
    aliases: tuple[Mapping[str, str], Mapping[str, str]]


def pair(before: Side, after: Side) -> Pairs:
    """Match tensors by name, then by content: a removed and an added tensor with equal bytes are a renamed one.

    A tied tensor is compared under the names that both sets have. Several tensors with the same bytes, such as zero
    biases, are matched in the natural order of their names. Raises WeightFileError.
    """
    common = sorted(before.tensors.keys() & after.tensors.keys(), key=natural)
    pairs = [TensorPair(name, before.tensors[name], after.tensors[name]) for name in common]
    aliases = tuple(_aliases(side, set(common)) for side in (before, after))
    old, new = (side.tensors.keys() - {*common, *names} for side, names in zip((before, after), aliases, strict=True))
    renames = dict(_renames(before, after, old, new))
    pairs += [TensorPair(to, before.tensors[name], after.tensors[to], name) for name, to in renames.items()]
    removed, added = (sorted(names, key=natural) for names in (old - renames.keys(), new - set(renames.values())))
    pairs += [TensorPair(name, before.tensors[name], None) for name in removed]
    pairs += [TensorPair(name, None, after.tensors[name]) for name in added]
    return Pairs(tuple(pairs), (aliases[0], aliases[1]))


def _aliases(side: Side, common: Set[str]) -> dict[str, str]:
    names = sorted(side.ties.keys() - common, key=natural)
    known = ((name, next((other for other in side.ties[name] if other in common), None)) for name in names)
    return {name: other for name, other in known if other is not None}


def strangers(before: Side, after: Side) -> bool:
    """Return whether two sets have almost no names in common."""
    fewest = min(len(before.tensors), len(after.tensors))
    return len(before.tensors.keys() & after.tensors.keys()) < FEWEST_COMMON * fewest


def _renames(before: Side, after: Side, old: Collection[str], new: Collection[str]) -> Iterator[tuple[str, str]]:
    types = {TensorType.of(before.tensors[name]) for name in old} & {TensorType.of(after.tensors[name]) for name in new}
    removed, added = (
        {name: side.tensors[name] for name in names if TensorType.of(side.tensors[name]) in types}
        for side, names in ((before, old), (after, new))
    )
    old_names, new_names = _by_content(removed, before.digests), _by_content(added, after.digests)
    for content, names in old_names.items():
        yield from zip(names, new_names.get(content, ()), strict=False)


def _by_content(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> dict[object, list[str]]:
    """Return names, in natural order, by type and digest. Digests that the file does not record are computed."""
    unknown = {name: tensor for name, tensor in tensors.items() if name not in digests}
    known = {name: digests[name] for name in tensors if name in digests} | digests_of(unknown)
    groups: dict[object, list[str]] = defaultdict(list)
    for name in sorted(known, key=natural):
        groups[(TensorType.of(tensors[name]), known[name])].append(name)
    return groups
