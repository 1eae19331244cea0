"""The admin plane over HTTP: which page does what. Everything needs a token, pages that are not there, too."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from weightswap_runtime import __version__
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.sources.location import redact
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_server.errors import BadRequest, UnknownModel, log
from weightswap_server.http.app import body_of
from weightswap_server.protocol.tensors_on_the_wire import decoded
from weightswap_server.service.service import Service

from . import triton
from .audit import AuditLog
from .desk import Desk
from .documents import (
    AdminError,
    CanaryRequest,
    Change,
    Changed,
    CommitRequest,
    FollowRequest,
    IndexRequest,
    LoadRequest,
    RollbackRequest,
    ServerStatus,
    StageRequest,
    WatchRequest,
    encoded,
)
from .errors import Forbidden, Refused, Unauthorised, refused
from .load_series import LoadSeries
from .openapi import description
from .operator_page import page_routes
from .settings import AdminSettings
from .tokens import Scope
from .uploads import UploadDirectory

_JSON = "application/json"
_LOOK, _QUIET = 0.25, 15.0  # seconds between two looks of an event stream; and until a line that says it is alive
T = TypeVar("T")
Page = Callable[[Request], Awaitable[Response]]
Work = Callable[[Desk, Any, str], SwapReceipt | None]

CHANGES: dict[str, tuple[type[Any], Work]] = {
    "stage": (StageRequest, Desk.stage),
    "commit": (CommitRequest, Desk.commit),
    "discard": (Change, Desk.discard),
    "swap": (StageRequest, Desk.swap),
    "canary": (CanaryRequest, Desk.canary),
    "rollback": (RollbackRequest, Desk.rollback),
    "hold": (Change, Desk.hold),
    "release": (Change, Desk.release),
    "follow": (FollowRequest, Desk.follow),
    "watch": (WatchRequest, Desk.watch),
    "unfollow": (Change, Desk.unfollow),
}
"""What may be asked of a model, as POST /admin/models/NAME/CHANGE: its document, and who does it."""


class AdminPages:
    """Each page, as a function from a request to an answer."""

    def __init__(
        self,
        service: Service,
        desks: Mapping[str, Desk],
        load: LoadSeries,
        audit: AuditLog,
        uploads: UploadDirectory | None,
        settings: AdminSettings,
    ) -> None:
        self._service, self._desks, self._load = service, desks, load
        self._audit, self._uploads = audit, uploads
        self._limits = settings.http
        self._started = time.time()
        self.ending = False

    def app(self) -> Starlette:
        """The application, without its guard."""
        model = "/admin/models/{name}"
        routes = [
            *page_routes(),
            Route("/admin/status", self._answering(self._status), methods=["GET"]),
            Route("/admin/events", self._answering(self._events), methods=["GET"]),
            Route("/admin/uploads", self._answering(self._list_uploads), methods=["GET"]),
            Route("/admin/uploads/{file}", self._answering(self._upload), methods=["PUT"]),
            Route("/admin/uploads/{file}", self._answering(self._remove_upload), methods=["DELETE"]),
            Route(model, self._answering(self._model), methods=["GET"]),
            Route(f"{model}/history", self._answering(self._history), methods=["GET"]),
            *(
                Route(f"{model}/{change}", self._answering(partial(self._change, change)), methods=["POST"])
                for change in CHANGES
            ),
            Route("/v2/repository/index", self._answering(self._triton_index), methods=["POST"]),
            Route("/v2/repository/models/{name}/load", self._answering(self._triton_load), methods=["POST"]),
            Route("/v2/repository/models/{name}/unload", self._answering(self._triton_unload), methods=["POST"]),
            Route("/metrics", self._answering(self._metrics), methods=["GET"]),
            Route("/openapi.json", self._answering(self._openapi), methods=["GET"]),
        ]
        handlers: Any = {HTTPException: self._no_such_page, Exception: self._failed}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    def refuse(self, scope: Scope) -> Response:
        """The answer to whoever has no token."""
        self._audit.deny(_peer(scope), f"{scope['method']} {scope['path']}"[:200])
        error = refusal(refused(Unauthorised("a bearer token is needed here (Authorization: Bearer TOKEN)")))
        error.headers["www-authenticate"] = 'Bearer realm="weightswap"'
        error.headers["connection"] = "close"  # whatever the body is
        return error

    def _answering(self, page: Page) -> Page:
        async def answer(request: Request) -> Response:
            try:
                return await page(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                return refusal(refused(error))

        return answer

    async def _no_such_page(self, request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}; /openapi.json says what there is"
        answer = refusal(Refused(error.status_code, text, ""))
        answer.headers.update(error.headers or {})
        return answer

    async def _failed(self, request: Request, error: Exception) -> Response:
        return refusal(refused(error))

    async def _status(self, request: Request) -> Response:
        return document(await in_thread(self._server_status))

    def _server_status(self) -> ServerStatus:
        return ServerStatus(
            version=__version__,
            time=time.time(),
            pid=os.getpid(),
            started=self._started,
            ready=self._service.ready,
            stopping=self._service.stopping,
            models=[desk.status() for desk in self._desks.values()],
            processes=self._service.processes(),
        )

    async def _model(self, request: Request) -> Response:
        return document(await in_thread(self._desk(request).status))

    async def _history(self, request: Request) -> Response:
        return document(await in_thread(self._desk(request).history))

    async def _metrics(self, request: Request) -> Response:
        return Response(
            await asyncio.to_thread(self._service.all_metrics), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _openapi(self, request: Request) -> Response:
        return document(description(list(self._desks), {name: kind for name, (kind, _) in CHANGES.items()}))

    async def _events(self, request: Request) -> Response:
        with_load = "load" in request.query_params
        return StreamingResponse(self._event_stream(with_load), media_type="text/event-stream", headers=_NO_STORE)

    async def _event_stream(self, with_load: bool) -> AsyncIterator[bytes]:
        """`status` at first and after each event, `event` for what happens, `staging` while something is staged.

        with_load: and `load`, with the points of the last minutes at first, then each as it comes, with a `status`.
        """
        seen = {name: desk.last_event for name, desk in self._desks.items()}
        counted = dict.fromkeys(self._desks, 0.0) if with_load else {}
        told = time.monotonic()
        yield _event("status", await in_thread(self._server_status))
        while not self.ending:
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
        found = []
        for name, desk in self._desks.items():
            for number, event in desk.events(seen[name]):
                seen[name] = number
                found.append(_event("event", {"model": name, **event}))
        return found

    def _stagings(self) -> list[bytes]:
        progresses = {name: desk.model.progress for name, desk in self._desks.items()}
        return [
            _event("staging", {"model": name, **progress._asdict()})
            for name, progress in progresses.items()
            if progress is not None
        ]

    def _loads(self, counted: dict[str, float]) -> list[bytes]:
        found = []
        for name, moment in counted.items():
            if points := self._load.after(name, moment):
                counted[name] = points[-1].time
                found.append(_event("load", {"model": name, "points": points}))
        return found

    async def _change(self, change: str, request: Request) -> Response:
        desk = self._desk(request)
        kind, work = CHANGES[change]
        asked = await self._asked(request, kind)
        receipt = await self._audited(request, change, desk, asked, lambda: work(desk, asked, _who(request)))
        found = Changed(
            model=desk.name, receipt=receipt.as_dict() if receipt else None, status=await in_thread(desk.status)
        )
        return document(found)

    def obey(self, desk: Desk, verdict: str, rule: str) -> None:
        """Do what the rule of a canary says, between two lines of the audit log. Raises what `Desk.obey` raises."""
        fields: dict[str, Any] = {
            "who": desk.staged_by,
            "peer": "",
            "call": f"{verdict} by rule",
            "model": desk.name,
            "arguments": {"rule": rule},
            "weights_before": desk.model.weights_id,
        }
        number, outcome = self._audit.begin(**fields), "refused"
        try:
            desk.obey(verdict, rule)
            outcome = "done"
        finally:
            self._audit.end(number, **fields, weights_after=desk.model.weights_id, outcome=outcome)

    async def _asked(self, request: Request, kind: type[T]) -> T:
        """The document of a request; an empty body is one without fields."""
        return decoded(await body_of(request, self._limits) or b"{}", kind)

    async def _audited(
        self, request: Request, call: str, desk: Desk | None, asked: Any, work: Callable[[], T] | Awaitable[T]
    ) -> T:
        """Do it, in a thread, between two lines of the audit log. It goes on if the client has gone."""
        arguments = _without_secrets(asked)
        fields = {
            "who": _who(request),
            "peer": _peer(request.scope),
            "call": call,
            "model": desk.name if desk else None,
            "arguments": arguments,
        }
        before = desk.model.weights_id if desk else None
        number = self._audit.begin(**fields, weights_before=before)
        outcome: dict[str, Any] = {"outcome": "broken off"}
        try:
            found = await (in_thread(work) if callable(work) else work)
            outcome = {"outcome": "done"}
        except Exception as error:
            told = refused(error)
            outcome = {"outcome": "refused", "error": told.kind, "message": told.text}
            raise
        finally:
            after = desk.model.weights_id if desk else None
            self._audit.end(number, **fields, weights_before=before, weights_after=after, **outcome)
        return found

    async def _list_uploads(self, request: Request) -> Response:
        return document(await in_thread(self._upload_directory.listing))

    async def _upload(self, request: Request) -> Response:
        name, uploads = request.path_params["file"], self._upload_directory
        length, digest = request.headers.get("content-length"), request.headers.get("x-weightswap-blake3", "")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("an upload is not compressed")
        coming = uploads.receive(name, _pieces(request), int(length) if length is not None else None, digest)
        asked = {"file": name, "size": length, "blake3": digest}
        return document(await self._audited(request, "upload", None, asked, coming), 201)

    async def _remove_upload(self, request: Request) -> Response:
        name, uploads = request.path_params["file"], self._upload_directory
        await self._audited(request, "remove upload", None, {"file": name}, lambda: uploads.remove(name))
        return Response(status_code=204)

    @property
    def _upload_directory(self) -> UploadDirectory:
        if self._uploads is None:
            raise Forbidden("this server takes no uploads (--upload-dir)")
        return self._uploads

    async def _triton_index(self, request: Request) -> Response:
        asked = await self._asked(request, IndexRequest)
        return document([entry for entry in self._service.index() if entry.state == "READY" or not asked.ready])

    async def _triton_load(self, request: Request) -> Response:
        desk = self._desk(request)
        asked = triton.load_request(await self._asked(request, LoadRequest))
        await self._audited(request, "load", desk, asked, lambda: triton.load(desk, asked, _who(request)))
        return Response()

    async def _triton_unload(self, request: Request) -> Response:
        desk = self._desk(request)
        await body_of(request, self._limits)
        await self._audited(request, "unload", desk, None, lambda: triton.unload(desk))
        return Response()

    def _desk(self, request: Request) -> Desk:
        name = request.path_params["name"]
        if name not in self._desks:
            raise UnknownModel(f"no model is called {name}; there are: {', '.join(self._desks)}")
        return self._desks[name]


_NO_STORE = {"cache-control": "no-store"}


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            if piece:
                yield piece
    except ClientDisconnect as error:
        log.info("an upload broke off")
        raise BadRequest("the upload broke off") from error


def _event(kind: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encoded(data))


def _who(request: Request) -> str:
    return str(request.state.who)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unix"


def _without_secrets(asked: Any) -> Any:
    """The arguments of a call as they are logged."""
    if isinstance(asked, msgspec.Struct):
        asked = msgspec.to_builtins(asked)
    if isinstance(asked, dict):
        return {name: _without_secrets(value) for name, value in asked.items()}
    return redact(asked) if isinstance(asked, str) else asked


def document(found: Any, status: int = 200) -> Response:
    """An answer that browsers and proxies do not keep."""
    return Response(encoded(found), status, _NO_STORE, _JSON)


def refusal(told: Refused) -> Response:
    """An answer that is an error."""
    headers = {**_NO_STORE, "retry-after": "1"} if told.status == 503 else _NO_STORE
    return Response(encoded(AdminError(error=told.text, kind=told.kind)), told.status, headers, _JSON)
