"""The page of a fleet: which weights each replica serves, and how a commit passes over them. It changes nothing.

It tells whoever may open it what is served, and asks for no token: it listens on this machine alone, unless it is told
otherwise, and answers to no other name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.errors import WeightswapError, text_of
from weightswap_runtime.messages import encode_json
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_server.admin.event_stream import event_line
from weightswap_server.admin.operator_page import page_routes
from weightswap_server.http.listening import listening

from .documents import NodeStatus, TrialReport

_FOLDER = Path(__file__).parent / "page"
_LOOK, _QUIET = 0.2, 1.0  # seconds between two looks, and until it is said that nothing is new
_PLACE = 5.0  # seconds between two readings of a place of which the nodes tell nothing new


class Watched(Protocol):
    """A fleet, as those who look at it see it: a `Fleet`. What it tells may raise a WeightswapError."""

    name: str

    @property
    def desired(self) -> DesiredState: ...

    @property
    def nodes(self) -> Mapping[str, NodeStatus]: ...

    @property
    def trial(self) -> TrialReport | None: ...


def standing(
    fleet: str, desired: DesiredState, nodes: Mapping[str, NodeStatus], trial: TrialReport | None
) -> dict[str, Any]:
    """How a fleet stands, as plain values. agrees: whether all nodes serve what is desired."""
    return {
        "fleet": fleet,
        "agrees": all(each.weights_id == desired.weights_id for each in nodes.values()),
        "desired": desired.as_dict(),
        "nodes": [
            {name: value for name, value in each._asdict().items() if name != "spec"}
            for _, each in sorted(nodes.items())
        ],
        "trial": trial.as_dict() if trial is not None else None,
    }


def serve_page(fleet: Watched, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until it is interrupted. ready: is called with its address. Raises OSError for a taken port."""
    with listening(host, port) as listener:
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
        hosts = ["*"] if host not in ("127.0.0.1", "::1", "localhost") else ["127.0.0.1", "[::1]", "localhost"]
        config = uvicorn.Config(page_app(fleet, hosts), log_config=None, lifespan="off", ws="none")
        config.timeout_graceful_shutdown = 1
        ready(address)
        uvicorn.Server(config).run([listener])


def page_app(fleet: Watched, hosts: list[str]) -> Starlette:
    """The page and its stream of events. hosts: by which names it may be asked, else other pages could read it."""

    async def events(_: Request) -> StreamingResponse:
        lines = _Looking(fleet).lines()
        return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})

    routes = [*page_routes(_FOLDER), Route("/fleet/events", events, methods=["GET"])]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


class _Looking:
    """What one who looks at the page is told."""

    def __init__(self, fleet: Watched) -> None:
        self._fleet = fleet
        self._trial: TrialReport | None = None
        self._read: tuple[float, object] = (0.0, None)  # when the place was, and what the nodes knew of it
        self._state = DesiredState()

    async def lines(self) -> AsyncIterator[bytes]:
        """`status`, whenever something is new and each second; `problem` while nobody tells how it stands."""
        before, told = b"", 0.0
        while True:
            kind, found = await in_thread(self._look)
            line = encode_json(found)
            if line != before or time.monotonic() > told + _QUIET:
                before, told = line, time.monotonic()
                yield event_line(kind, {**found, "time": time.time()})
            await asyncio.sleep(_LOOK)

    def _look(self) -> tuple[str, dict[str, Any]]:
        try:
            nodes = self._fleet.nodes
            known = max((max(each.read, each.revision) for each in nodes.values()), default=0)
            if self._read[1] != known or time.monotonic() > self._read[0] + _PLACE:
                self._state = self._fleet.desired
                self._read = time.monotonic(), known
            goes_on = self._trial is not None and not self._trial.outcome
            if goes_on or any(each.trying for each in nodes.values()):
                self._trial = self._fleet.trial
            return "status", standing(self._fleet.name, self._state, nodes, self._trial)
        except WeightswapError as error:
            return "problem", {"error": text_of(error)}
