"""The page of a fleet: the weights of each replica, and the progress of a commit. It is read-only.

It needs no token, so by default it listens on localhost alone, and refuses requests with another host name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from weightswap_runtime.errors import WeightswapError, encode_json, text_of
from weightswap_runtime.following.desired_state import DesiredState
from weightswap_runtime.threads import in_thread
from weightswap_server.admin.app import event_line, page_routes
from weightswap_server.http.listening import GuardedProtocol, listening
from weightswap_server.settings import Settings

from .documents import NodeStatus, TrialReport

_FOLDER = Path(__file__).parent / "page"
_INTERVAL, _KEEP_ALIVE = 0.2, 1.0  # seconds between two checks, and until an unchanged status is sent again
_DESIRED_INTERVAL = 5.0  # seconds between two reads of the desired store, if the nodes report no new revision


class Watched(Protocol):
    """The part of a `Fleet` that the page reads. The properties may raise a WeightswapError."""

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
    """Return a fleet's status as plain values. agrees: True if all nodes serve the desired weights."""
    return {
        "fleet": fleet,
        "agrees": all(node.weights_id == desired.weights_id for node in nodes.values()),
        "desired": desired.as_dict(),
        "nodes": [
            {name: value for name, value in node._asdict().items() if name != "spec"}
            for _, node in sorted(nodes.items())
        ],
        "trial": trial.as_dict() if trial is not None else None,
    }


def serve_page(fleet: Watched, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until SIGINT. ready: called with its address. Raises OSError if the port is taken."""
    with listening(host, port) as listener:
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
        hosts = ["*"] if host not in ("127.0.0.1", "::1", "localhost") else ["127.0.0.1", "[::1]", "localhost"]
        http: Any = partial(GuardedProtocol, Settings())
        config = uvicorn.Config(page_app(fleet, hosts), http=http, log_config=None, lifespan="off", ws="none")
        config.timeout_graceful_shutdown = 1
        ready(address)
        uvicorn.Server(config).run([listener])


def page_app(fleet: Watched, hosts: list[str]) -> Starlette:
    """Return the page and its event stream. hosts: allowed host names; others would let DNS rebinding read it."""

    async def events(_: Request) -> StreamingResponse:
        lines = _FleetEvents(fleet).lines()
        return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})

    routes = [*page_routes(_FOLDER), Route("/fleet/events", events, methods=["GET"])]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


class _FleetEvents:
    """The event stream of one open page."""

    def __init__(self, fleet: Watched) -> None:
        self._fleet = fleet
        self._trial: TrialReport | None = None
        self._read: tuple[float, object] = (0.0, None)  # time of the last read, and the revision then
        self._state = DesiredState()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield `status` on each change and every second, or `problem` while the status is unknown."""
        before, sent_at = b"", 0.0
        while True:
            kind, document = await in_thread(self._read_status)
            line = encode_json(document)
            if line != before or time.monotonic() > sent_at + _KEEP_ALIVE:
                before, sent_at = line, time.monotonic()
                yield event_line(kind, {**document, "time": time.time()})
            await asyncio.sleep(_INTERVAL)

    def _read_status(self) -> tuple[str, dict[str, Any]]:
        try:
            nodes = self._fleet.nodes
            revision = max((max(node.read, node.revision) for node in nodes.values()), default=0)
            if self._read[1] != revision or time.monotonic() > self._read[0] + _DESIRED_INTERVAL:
                self._state = self._fleet.desired
                self._read = time.monotonic(), revision
            has_trial = self._trial is not None and not self._trial.outcome
            if has_trial or any(node.trying for node in nodes.values()):
                self._trial = self._fleet.trial
            return "status", standing(self._fleet.name, self._state, nodes, self._trial)
        except WeightswapError as error:
            return "problem", {"error": text_of(error)}
