"""Monotonic reads: a client that has seen a revision gets no answer of an older one."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightswap_fleet.node.memory import RevisionPage
from weightswap_runtime.model.served import ServedModel
from weightswap_server.errors import Failure
from weightswap_server.http.bodies import refusal

from .errors import StaleReplica

MIN_REVISION = "weightswap-min-revision"  # request header: the least revision that may answer it
REVISION = "weightswap-revision"  # response header: the revision for later requests of the client
PATIENCE = 2.0  # seconds to wait for a commit that other nodes have already made
_POLL = 0.002  # seconds between two looks at the served revision


class Freshness:
    """The revision that a replica serves."""

    def __init__(self, revision_page: RevisionPage, model: ServedModel) -> None:
        self._revision_page, self._model = revision_page, model

    @property
    def revision(self) -> int:
        """The revision of a call that starts now, and not less than that of any call that has ended."""
        while True:
            generation = self._model.generation
            revision = self._revision_page.revision(generation)
            if self._model.generation == generation:  # otherwise its arena may have been overwritten
                return revision

    async def wait(self, revision: int) -> None:
        """Wait until a revision is served. Raises StaleReplica after PATIENCE seconds."""
        deadline = time.monotonic() + PATIENCE
        while self.revision < revision:
            if time.monotonic() >= deadline:
                raise StaleReplica(
                    f"this replica serves revision {self.revision}, but {revision} was requested; try again"
                )
            await asyncio.sleep(_POLL)


class FreshApp:
    """An ASGI application with the request header `MIN_REVISION` and the response header `REVISION`."""

    def __init__(self, app: ASGIApp, freshness: Freshness) -> None:
        self._app, self._freshness = app, freshness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_revision(message: Message) -> None:
            if message["type"] == "http.response.start":
                revision = str(self._freshness.revision).encode()
                message["headers"] = [*message.get("headers", ()), (REVISION.encode(), revision)]
            await send(message)

        failure = await self._failure(scope) if scope["type"] == "http" else None
        await (self._app if failure is None else refusal(failure))(scope, receive, send_with_revision)

    async def _failure(self, scope: Scope) -> Failure | None:
        """Wait for the requested revision. Returns a failure if it is not served here."""
        revision = next((value for name, value in scope["headers"] if name == MIN_REVISION.encode()), b"0")
        if not (revision.isdigit() and len(revision) < 20):
            return Failure(400, "", f"{MIN_REVISION}: expected a revision, as in the header {REVISION} of an answer")
        try:
            await self._freshness.wait(int(revision))
        except StaleReplica as error:
            return Failure(503, "", str(error))
        return None
