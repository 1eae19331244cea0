"""Daily share of the long test run: every n-th test, and the next ones tomorrow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest


def left_for_other_days(items: Sequence[pytest.Item], share: int, day: int | None = None) -> set[pytest.Item]:
    """Return all slow tests but every `share`-th: of the parameters of tests with as many, and of all others.

    day: a number, instead of today's.
    """
    first = datetime.now(UTC).toordinal() if day is None else day
    by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            by_test[item.nodeid.partition("[")[0]].append(item)
    rows = [row for row in by_test.values() if len(row) >= share]
    rows.append([item for row in by_test.values() if len(row) < share for item in row])
    return {item for row in rows for number, item in enumerate(row) if (number + first) % share}
