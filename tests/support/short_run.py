"""Selection of parameters for the short test run: every pair of values, or a sample; the long run has all."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

Pairs = frozenset[Hashable]


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark superfluous combinations as slow.

    Tests marked `pairwise` keep enough combinations for every pair of values, `sampled(number)` that number of them.
    """
    for group in _marked("pairwise", items):
        _leave(group, covering([_pairs(item) for item in group]))
    for group in _marked("sampled", items):
        _leave(group, spread(len(group), group[0].get_closest_marker("sampled").args[0]))


def _marked(name: str, items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker(name) and not item.get_closest_marker("slow"):
            groups[item.nodeid.partition("[")[0]].append(item)
    return groups.values()


def _leave(group: Sequence[pytest.Item], chosen: set[int]) -> None:
    for number in set(range(len(group))) - chosen:
        group[number].add_marker(pytest.mark.slow)


def spread(total: int, count: int) -> set[int]:
    """Return evenly spaced numbers below `total`, beginning with the first."""
    count = min(total, count)
    return {number * total // count for number in range(count)}


def _pairs(item: pytest.Item) -> Pairs:
    values = [(name, id(value)) for name, value in item.callspec.params.items()]  # type: ignore[attr-defined]
    return frozenset(itertools.combinations(values, 2))


def covering(combinations: Sequence[Pairs]) -> set[int]:
    """Return the numbers of few combinations that cover every pair, greedily: the one with most new pairs first."""
    uncovered = set().union(*combinations)
    numbers = random.Random(0).sample(range(len(combinations)), len(combinations))
    chosen = set()
    while uncovered:
        best = max(numbers, key=lambda number: len(combinations[number] & uncovered))
        chosen.add(best)
        uncovered -= combinations[best]
    return chosen
