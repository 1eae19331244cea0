"""Events of all models, sent by the server as they happen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from weightswap_runtime.messages import encode_json
from weightswap_runtime.threads.awaiting import in_thread

from .desk import Desk
from .documents import ServerStatus
from .load_series import LoadSeries

_LOOK, _QUIET = 0.25, 15.0  # seconds between two looks, and until a line that says that the stream is alive


class EventStream:
    """What one listener is told, until `ended()`."""

    def __init__(
        self,
        desks: Mapping[str, Desk],
        load: LoadSeries,
        server_status: Callable[[], ServerStatus],
        ended: Callable[[], bool],
    ) -> None:
        self._desks, self._load, self._server_status, self._ended = desks, load, server_status, ended

    async def lines(self, with_load: bool) -> AsyncIterator[bytes]:
        """`status` at first and after each event, `event` for what happens, `staging` while something is staged.

        with_load: and `load`, with the points of the last minutes at first, then each as it comes, with a `status`.
        """
        seen = {name: desk.journal.last_event for name, desk in self._desks.items()}
        counted = dict.fromkeys(self._desks, 0.0) if with_load else {}
        told = time.monotonic()
        yield _event("status", await in_thread(self._server_status))
        while not self._ended():
            lines = [*self._news(seen), *self._loads(counted)]
            if lines:
                lines.append(_event("status", await in_thread(self._server_status)))
            lines += self._stagings()
            if not lines and time.monotonic() > told + _QUIET:
                lines = [b": \n\n"]
            if lines:
                told = time.monotonic()
                yield b"".join(lines)
            await asyncio.sleep(_LOOK)

    def _news(self, seen: dict[str, int]) -> list[bytes]:
        news = []
        for name, desk in self._desks.items():
            for number, event in desk.journal.events(seen[name]):
                seen[name] = number
                news.append(_event("event", {"model": name, **event}))
        return news

    def _stagings(self) -> list[bytes]:
        progresses = {name: desk.model.progress for name, desk in self._desks.items()}
        return [
            _event("staging", {"model": name, **progress._asdict()})
            for name, progress in progresses.items()
            if progress is not None
        ]

    def _loads(self, counted: dict[str, float]) -> list[bytes]:
        loads = []
        for name, moment in counted.items():
            if points := self._load.after(name, moment):
                counted[name] = points[-1].time
                loads.append(_event("load", {"model": name, "points": points}))
        return loads


def _event(kind: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode_json(data))
