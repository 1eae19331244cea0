"""Events: one JSON object per line on a child's standard output.

`at` is seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Event. `source` is the child's name; `kind` determines the fields."""

    source: str
    kind: str
    at: float
    fields: dict[str, Any]


def emit(kind: str, **fields: Any) -> None:
    """Send an event to the parent process; call it from one thread only."""
    print(json.dumps({"event": kind, "at": time.monotonic(), **fields}), flush=True)


def parse(source: str, line: str) -> Event:
    """Parse the event in one line of output. Raises ValueError."""
    fields = json.loads(line)
    return Event(source, fields.pop("event"), fields.pop("at"), fields)
