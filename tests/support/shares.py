"""A share of the long run for each day: of many parameters of one test, every n-th, tomorrow the next ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime

import pytest


def left_for_other_days(items: Iterable[pytest.Item], share: int, day: int | None = None) -> set[pytest.Item]:
    """All but every `share`-th of the parameters of each slow test. day: a number, in place of today's."""
    first = datetime.now(UTC).toordinal() if day is None else day
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for siblings in tests.values()
        if len(siblings) >= share
        for number, item in enumerate(siblings)
        if (number + first) % share
    }
