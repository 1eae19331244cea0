"""The admin plane over HTTP: its endpoints, those of Triton's repository extension, events, and the operator's page."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from weightswap_runtime import __version__
from weightswap_runtime.errors import encode_json
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.variants import VariantReceipt
from weightswap_runtime.staging.given import MEMORY, GivenWeights, as_arriving
from weightswap_runtime.threads import in_thread
from weightswap_server.errors import (
    BadRequest,
    BodyTooLarge,
    Failure,
    Forbidden,
    Unauthorised,
    UnknownModel,
    admin_failure_of,
    log,
)
from weightswap_server.http.app import Endpoint, application, metrics_response, openapi
from weightswap_server.http.bodies import NO_STORE, Bodies, no_such_endpoint, refusal, uncached
from weightswap_server.protocol import IndexEntry, decoded
from weightswap_server.service.service import Service

from .access import AdminSettings
from .audit import AuditLog, audited, peer, user_of
from .documents import (
    AddVariantRequest,
    AdminError,
    CanaryRequest,
    Change,
    Changed,
    CommitRequest,
    FollowRequest,
    History,
    IndexRequest,
    LoadRequest,
    ModelStatus,
    RemoveVariantRequest,
    RollbackRequest,
    SendRequest,
    ServerStatus,
    StageRequest,
    Uploaded,
    Uploads,
    WatchRequest,
)
from .journal import LoadSeries
from .operations import ModelOperations
from .trainers import Trainers
from .uploads import Body, UploadDirectory

T = TypeVar("T")
Work = Callable[[ModelOperations, Any, str], SwapReceipt | VariantReceipt | str | None]
_BINARY = "application/octet-stream"
_INTERVAL, _KEEP_ALIVE = 0.25, 15.0  # seconds between two checks, and of silence before a comment is sent
_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

CHANGES: dict[str, tuple[type[Any], Work]] = {
    "stage": (StageRequest, ModelOperations.stage),
    "commit": (CommitRequest, ModelOperations.commit),
    "discard": (Change, ModelOperations.discard),
    "swap": (StageRequest, ModelOperations.swap),
    "canary": (CanaryRequest, ModelOperations.canary),
    "rollback": (RollbackRequest, ModelOperations.rollback),
    "add_variant": (AddVariantRequest, ModelOperations.add_variant),
    "remove_variant": (RemoveVariantRequest, ModelOperations.remove_variant),
    "hold": (Change, ModelOperations.hold),
    "release": (Change, ModelOperations.release),
    "follow": (FollowRequest, ModelOperations.follow),
    "watch": (WatchRequest, ModelOperations.watch),
    "unfollow": (Change, ModelOperations.unfollow),
}
"""Changes of a model, as POST /admin/models/NAME/CHANGE: the request document, and the method that does it."""

RECEIVED: dict[str, Callable[[ModelOperations, StageRequest, str, GivenWeights], SwapReceipt | None]] = {
    "stage": ModelOperations.stage,
    "swap": ModelOperations.swap,
}
"""Those whose weights may come in the body, as PUT with a SendRequest as `options` in the query."""


class AdminEndpoints:
    """The handlers of all endpoints."""

    def __init__(
        self,
        service: Service,
        models: Mapping[str, ModelOperations],
        load: LoadSeries,
        audit: AuditLog,
        uploads: UploadDirectory | None,
        settings: AdminSettings,
    ) -> None:
        self._service, self._models, self._load = service, models, load
        self._audit, self._uploads = audit, uploads
        self._bodies, self._settings = Bodies(settings.http), settings
        self._trainers = Trainers(models, self._bodies, audit, settings.staged_timeout)
        self._started = time.time()
        self.ending = False

    def app(self) -> Starlette:
        """Return the application, without the token guard."""
        return application(self._table(), self._bodies, self._refuse, self._no_such_endpoint, page_routes())

    def _table(self) -> list[Endpoint]:
        model, triton, upload = "/admin/models/{name}", "/v2/repository", "/admin/uploads/{file}"
        get, post = partial(Endpoint, "GET"), partial(Endpoint, "POST")
        put = partial(Endpoint, "PUT", status=201, body_media=_BINARY)
        return [
            get("/admin/status", self._status, "The server, and all its models.", ServerStatus),
            get("/admin/events", self._events, "Events, as they happen.", {}, media="text/event-stream", query="load"),
            get("/admin/uploads", self._list_uploads, "What was uploaded.", Uploads),
            put(upload, self._upload, "Upload a weight file.", Uploaded, {"type": "string"}),
            Endpoint("DELETE", upload, self._remove_upload, "Remove an upload.", status=204),
            get(model, self._model, "A model.", ModelStatus),
            get(f"{model}/history", self._history, "Commits and refusals.", History),
            *(
                post(f"{model}/{change}", partial(self._change, change), f"Change a model: {change}.", Changed, kind)
                for change, (kind, _) in CHANGES.items()
            ),
            *(
                Endpoint(
                    "PUT",
                    f"{model}/{change}",
                    partial(self._receive, change),
                    f"Change a model: {change} the weights in the body, as they arrive.",
                    Changed,
                    {"type": "string"},
                    body_media=_BINARY,
                    query="options",
                )
                for change in RECEIVED
            ),
            post(f"{triton}/index", self._triton_index, "The models.", list[IndexEntry], IndexRequest, needed=False),
            post(f"{triton}/models/{{name}}/load", self._triton_load, "Answer again.", None, LoadRequest, needed=False),
            post(f"{triton}/models/{{name}}/unload", self._triton_unload, "Answer nobody."),
            *self._trainers.table(),
            get("/metrics", self._metrics, "Metrics for Prometheus.", {"type": "string"}, media="text/plain"),
            get("/openapi.json", self._openapi, "This document.", {"type": "object"}),
        ]

    def refuse(self, scope: Scope) -> Response:
        """Return the response to a request without a valid token, and note it in the audit log."""
        self._audit.deny(peer(scope), f"{scope['method']} {scope['path']}"[:200])
        given = any(name == b"authorization" for name, _ in scope["headers"])
        what = "the bearer token is not valid; give" if given else "a bearer token is required:"
        error = _refusal(admin_failure_of(Unauthorised(f"{what} one of the server's (Authorization: Bearer TOKEN)")))
        error.headers["www-authenticate"] = 'Bearer realm="weightswap"'
        error.headers["connection"] = "close"  # its body was not read
        return error

    def _refuse(self, request: Request, error: Exception, arrived: float) -> Response:
        return _refusal(admin_failure_of(error))

    async def _no_such_endpoint(self, request: Request, error: HTTPException) -> Response:
        answer = _refusal(no_such_endpoint(request.scope, error.status_code, error.detail))
        answer.headers.update(error.headers or {})
        return answer

    async def _status(self, request: Request) -> Response:
        return uncached(await in_thread(self._server_status))

    def _server_status(self) -> ServerStatus:
        return ServerStatus(
            version=__version__,
            time=time.time(),
            pid=os.getpid(),
            started=self._started,
            ready=self._service.ready,
            stopping=self._service.stopping,
            models=[operations.status() for operations in self._models.values()],
            processes=self._service.processes(),
        )

    async def _model(self, request: Request) -> Response:
        return uncached(await in_thread(self._operations(request).status))

    async def _history(self, request: Request) -> Response:
        return uncached(await in_thread(self._operations(request).history))

    async def _metrics(self, request: Request) -> Response:
        return await metrics_response(self._service)

    async def _openapi(self, request: Request) -> Response:
        schemes = {"token": {"type": "http", "scheme": "bearer"}}
        described = openapi("weightswap admin", self._table(), list(self._models), AdminError, securitySchemes=schemes)
        return uncached({**described, "security": [{"token": []}]})

    async def _events(self, request: Request) -> Response:
        with_load = "load" in request.query_params
        stream = _EventStream(self._models, self._load, self._server_status, lambda: self.ending)
        return StreamingResponse(stream.lines(with_load), media_type="text/event-stream", headers=NO_STORE)

    async def _change(self, change: str, request: Request) -> Response:
        operations = self._operations(request)
        kind, work = CHANGES[change]
        arguments = await self._document(request, kind)
        return await self._do(request, change, operations, arguments, partial(work, operations, arguments))

    async def _receive(self, change: str, request: Request) -> Response:
        operations, length = self._operations(request), request.headers.get("content-length")
        options = decoded(request.query_params.get("options", "{}").encode(), SendRequest)
        arguments = StageRequest(source=f"{MEMORY}:{user_of(request)}", **msgspec.structs.asdict(options))
        if length is None:
            raise BadRequest("weights in a body must have a Content-Length")
        if int(length) > self._settings.max_uploads:
            raise BodyTooLarge(f"weights of {length} bytes; the limit is {self._settings.max_uploads}")
        body = Body(_pieces(request), int(length), self._settings.body_timeout, self._settings.upload_timeout)
        given = as_arriving(arguments.source, int(length), body.receive)
        try:
            receive = RECEIVED[change]
            return await self._do(
                request, change, operations, arguments, lambda by: receive(operations, arguments, by, given)
            )
        finally:
            body.close()

    async def _do(
        self, request: Request, change: str, operations: ModelOperations, arguments: Any, work: Callable[[str], Any]
    ) -> Response:
        run = partial(work, user_of(request))
        done = await audited(self._audit, request, change, operations, arguments, run)
        receipt, canary = (None, done) if isinstance(done, str) else (done.as_dict() if done else None, None)
        status = await in_thread(operations.status)
        return uncached(Changed(model=operations.name, receipt=receipt, canary=canary, status=status))

    async def _document(self, request: Request, kind: type[T]) -> T:
        """Read the document of a request. An empty body is a document without fields."""
        return decoded(await self._bodies.body_of(request) or b"{}", kind)

    async def _list_uploads(self, request: Request) -> Response:
        return uncached(await in_thread(self._upload_directory.listing))

    async def _upload(self, request: Request) -> Response:
        name, uploads = request.path_params["file"], self._upload_directory
        length, digest = request.headers.get("content-length"), request.headers.get("x-weightswap-blake3", "")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("uploads must not be compressed")
        upload = uploads.receive(name, _pieces(request), int(length) if length is not None else None, digest)
        arguments = {"file": name, "size": length, "blake3": digest}
        return uncached(await audited(self._audit, request, "upload", None, arguments, upload), 201)

    async def _remove_upload(self, request: Request) -> Response:
        name, uploads = request.path_params["file"], self._upload_directory
        await audited(self._audit, request, "remove upload", None, {"file": name}, lambda: uploads.remove(name))
        return Response(status_code=204)

    @property
    def _upload_directory(self) -> UploadDirectory:
        if self._uploads is None:
            raise Forbidden("this server does not accept uploads (--upload-dir)")
        return self._uploads

    async def _triton_index(self, request: Request) -> Response:
        only_ready = (await self._document(request, IndexRequest)).ready
        return uncached([entry for entry in self._service.index() if entry.state == "READY" or not only_ready])

    async def _triton_load(self, request: Request) -> Response:
        operations = self._operations(request)
        staging = staging_of(await self._document(request, LoadRequest))
        by = user_of(request)

        def load() -> None:
            if staging is not None:
                operations.swap(staging, by)
            operations.served.switch.unloaded = False

        await audited(self._audit, request, "load", operations, staging, load)
        return Response()

    async def _triton_unload(self, request: Request) -> Response:
        operations = self._operations(request)
        await self._bodies.body_of(request)

        def unload() -> None:  # it stays in memory, and its weights can change
            operations.served.switch.unloaded = True

        await audited(self._audit, request, "unload", operations, None, unload)
        return Response()

    def _operations(self, request: Request) -> ModelOperations:
        name = request.path_params["name"]
        if name not in self._models:
            raise UnknownModel(f"no model is named {name}; there are: {', '.join(self._models)}")
        return self._models[name]


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            if piece:
                yield piece
    except ClientDisconnect as error:
        log.info("an upload was interrupted")
        raise BadRequest("the upload was interrupted") from error


class _Config(msgspec.Struct):
    weights: str | None = None


def staging_of(request: LoadRequest) -> StageRequest | None:
    """Return the staging of the weights that a `load` names, if any. Raises BadRequest."""
    weights = request.parameters.weights
    if request.parameters.config is not None:
        try:
            weights = weights or decoded(request.parameters.config.encode(), _Config).weights
        except BadRequest as error:
            raise BadRequest(f"config: {error}; expected a JSON document, with a string as its weights") from error
    return StageRequest(source=weights) if weights else None


def _refusal(failure: Failure) -> Response:
    return refusal(failure, NO_STORE, AdminError(error=failure.text, kind=failure.kind, reason=failure.reason))


class _EventStream:
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
        sent_until = dict.fromkeys(self._models, 0) if with_load else {}
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

    def _loads(self, sent_until: dict[str, int]) -> list[bytes]:
        lines = []
        for name, number in sent_until.items():
            if points := self._load.after(name, number):
                sent_until[name] = points[-1][0]
                lines.append(event_line("load", {"model": name, "points": [point for _, point in points]}))
        return lines


def event_line(kind: str, data: Any) -> bytes:
    """Return one event in the text/event-stream format."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode_json(data))


def _files(folder: Path) -> dict[str, Path]:
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.suffix in _TYPES}
    return {"/" if name == "index.html" else f"/page/{name}": file for name, file in files.items()}


OPEN_PATHS = frozenset(_files(_FOLDER))


def page_routes(*others: Path) -> list[Route]:
    """Return a route for each file. Files of `others`, a page built on this one, replace those of the same name."""
    files = {path: file for folder in (_FOLDER, *others) for path, file in _files(folder).items()}

    async def send(request: Request) -> Response:
        file = files[request.url.path]
        return Response(file.read_bytes(), media_type=_TYPES[file.suffix], headers=_HEADERS)

    return [Route(path, send, methods=["GET"]) for path in files]
