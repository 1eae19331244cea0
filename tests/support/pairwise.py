"""Tests with many parameters: every pair of values by default, every combination in the long run."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

Pairs = frozenset[Hashable]


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Of each test that is marked `pairwise`, leave enough combinations that every pair of values occurs."""
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") and not item.get_closest_marker("slow"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        chosen = covering([_pairs(item) for item in group])
        for number in set(range(len(group))) - chosen:
            group[number].add_marker(pytest.mark.slow)


def _pairs(item: pytest.Item) -> Pairs:
    values = [(name, id(value)) for name, value in item.callspec.params.items()]  # type: ignore[attr-defined]
    return frozenset(itertools.combinations(values, 2))


def covering(combinations: Sequence[Pairs]) -> set[int]:
    """The numbers of combinations that have every pair together, few of them: the one with most new pairs first."""
    left = set().union(*combinations)
    numbers = random.Random(0).sample(range(len(combinations)), len(combinations))
    chosen = set()
    while left:
        best = max(numbers, key=lambda number: len(combinations[number] & left))
        chosen.add(best)
        left -= combinations[best]
    return chosen
