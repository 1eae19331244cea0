"""Nobody goes back: who has seen a revision is not answered by an older one."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightswap_fleet.errors import StaleReplica
from weightswap_fleet.node.node_memory import Board
from weightswap_runtime.live.model import Model
from weightswap_server.errors import Failure
from weightswap_server.http.refusals import refusal

MIN_REVISION = "weightswap-min-revision"  # of a request: an older revision may not answer it
REVISION = "weightswap-revision"  # of an answer: what its client may ask for from then on
PATIENCE = 2.0  # seconds for a commit that others have done already
_POLL = 0.002


class Freshness:
    """Which revision a replica serves."""

    def __init__(self, board: Board, model: Model) -> None:
        self._board, self._model = board, model

    @property
    def revision(self) -> int:
        """Of what a call gets that begins now; at least that of what one got that has ended."""
        while True:
            generation = self._model.generation
            revision = self._board.revision(generation)
            if self._model.generation == generation:  # else its arena may have been another's by then
                return revision

    async def wait(self, revision: int) -> None:
        """Wait until it is served. Raises StaleReplica where it is not within PATIENCE seconds."""
        deadline = time.monotonic() + PATIENCE
        while self.revision < revision:
            if time.monotonic() >= deadline:
                raise StaleReplica(
                    f"this replica serves revision {self.revision}, and {revision} was asked for; try again"
                )
            await asyncio.sleep(_POLL)


class FreshApp:
    """An ASGI application whose requests may ask for a revision, and whose answers say theirs."""

    def __init__(self, app: ASGIApp, freshness: Freshness) -> None:
        self._app, self._freshness = app, freshness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                revision = str(self._freshness.revision).encode()
                message["headers"] = [*message.get("headers", ()), (REVISION.encode(), revision)]
            await send(message)

        told = await self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if told is None else refusal(told))(scope, receive, say)

    async def _refusal(self, scope: Scope) -> Failure | None:
        """Why a request is not answered here; after a wait, where that helps."""
        asked = next((value for name, value in scope["headers"] if name == MIN_REVISION.encode()), b"0")
        if not (asked.isdigit() and len(asked) < 20):
            return Failure(400, "", f"{MIN_REVISION}: expected a revision, as {REVISION} of an answer says it")
        try:
            await self._freshness.wait(int(asked))
        except StaleReplica as error:
            return Failure(503, "", str(error))
        return None
