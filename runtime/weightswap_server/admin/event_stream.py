"""Events of all models, sent by the server as they happen."""

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

_LOOK, _QUIET = 0.25, 15.0  # seconds between two looks, and until a line that says that the stream is alive


class EventStream:
    """What one listener is told, until `ended()`."""

    def __init__(
        self,
        models: Mapping[str, ModelOperations],
        load: LoadSeries,
        server_status: Callable[[], ServerStatus],
        ended: Callable[[], bool],
    ) -> None:
        self._models, self._load, self._server_status, self._ended = models, load, server_status, ended

    async def lines(self, with_load: bool) -> AsyncIterator[bytes]:
        """`status` at first and after each event, `event` for what happens, `staging` while something is staged.

        with_load: and `load`, with the points of the last minutes at first, then each as it comes, with a `status`.
        """
        seen = {name: each.journal.last_event for name, each in self._models.items()}
        counted = dict.fromkeys(self._models, 0.0) if with_load else {}
        told = time.monotonic()
        yield event_line("status", await in_thread(self._server_status))
        while not self._ended():
            lines = [*self._news(seen), *self._loads(counted)]
            if lines:
                lines.append(event_line("status", await in_thread(self._server_status)))
            lines += self._stagings()
            if not lines and time.monotonic() > told + _QUIET:
                lines = [b": \n\n"]
            if lines:
                told = time.monotonic()
                yield b"".join(lines)
            await asyncio.sleep(_LOOK)

    def _news(self, seen: dict[str, int]) -> list[bytes]:
        news = []
        for name, operations in self._models.items():
            for number, event in operations.journal.events(seen[name]):
                seen[name] = number
                news.append(event_line("event", {"model": name, **event}))
        return news

    def _stagings(self) -> list[bytes]:
        return [
            event_line("staging", {"model": name, **progress._asdict()})
            for name, each in self._models.items()
            if (progress := each.model.progress) is not None
        ]

    def _loads(self, counted: dict[str, float]) -> list[bytes]:
        loads = []
        for name, moment in counted.items():
            if points := self._load.after(name, moment):
                counted[name] = points[-1].time
                loads.append(event_line("load", {"model": name, "points": points}))
        return loads


def event_line(kind: str, data: Any) -> bytes:
    """One event, as a browser's EventSource reads it."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode_json(data))
