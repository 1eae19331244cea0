"""Server-sent events of all models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from weightswap_runtime.messages import encode_json
from weightswap_runtime.threads.awaiting import in_thread

from .documents import ServerStatus
from .load_series import LoadSeries
from .operations import ModelOperations

_INTERVAL, _KEEP_ALIVE = 0.25, 15.0  # seconds between two checks, and of silence before a comment is sent


class EventStream:
    """The stream of one listener, until `ended()`."""

    def __init__(
        self,
        models: Mapping[str, ModelOperations],
        load: LoadSeries,
        server_status: Callable[[], ServerStatus],
        ended: Callable[[], bool],
    ) -> None:
        self._models, self._load, self._server_status, self._ended = models, load, server_status, ended

    async def lines(self, with_load: bool) -> AsyncIterator[bytes]:
        """Yield `status` first and after each event, `event` for each event, `staging` while weights are staged.

        with_load: also yield `load`, first with the points of the last minutes, then with each new one and a `status`.
        """
        seen = {name: operations.journal.last_event for name, operations in self._models.items()}
        sent_until = dict.fromkeys(self._models, 0.0) if with_load else {}
        sent_at = time.monotonic()
        yield event_line("status", await in_thread(self._server_status))
        while not self._ended():
            lines = [*self._events(seen), *self._loads(sent_until)]
            if lines:
                lines.append(event_line("status", await in_thread(self._server_status)))
            lines += self._stagings()
            if not lines and time.monotonic() > sent_at + _KEEP_ALIVE:
                lines = [b": \n\n"]
            if lines:
                sent_at = time.monotonic()
                yield b"".join(lines)
            await asyncio.sleep(_INTERVAL)

    def _events(self, seen: dict[str, int]) -> list[bytes]:
        lines = []
        for name, operations in self._models.items():
            for number, event in operations.journal.events(seen[name]):
                seen[name] = number
                lines.append(event_line("event", {"model": name, **event}))
        return lines

    def _stagings(self) -> list[bytes]:
        return [
            event_line("staging", {"model": name, **progress._asdict()})
            for name, operations in self._models.items()
            if (progress := operations.model.progress) is not None
        ]

    def _loads(self, sent_until: dict[str, float]) -> list[bytes]:
        lines = []
        for name, moment in sent_until.items():
            if points := self._load.after(name, moment):
                sent_until[name] = points[-1].time
                lines.append(event_line("load", {"model": name, "points": points}))
        return lines


def event_line(kind: str, data: Any) -> bytes:
    """Return one event in the text/event-stream format."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode_json(data))
