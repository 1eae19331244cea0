"""The endpoints of the admin plane. Every request needs a token, those to unknown paths, too."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from weightswap_runtime import __version__
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.variants.resident import VariantReceipt
from weightswap_runtime.messages import encode_json
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_server.errors import BadRequest, UnknownModel, log
from weightswap_server.http.app import Handler, application, metrics_response
from weightswap_server.http.bodies import Bodies
from weightswap_server.http.refusals import JSON
from weightswap_server.protocol.tensors_on_the_wire import decoded
from weightswap_server.service.service import Service

from . import triton
from .audit import AuditLog, audited, peer, user_of
from .documents import (
    AddVariantRequest,
    AdminError,
    CanaryRequest,
    Change,
    Changed,
    CommitRequest,
    FollowRequest,
    IndexRequest,
    LoadRequest,
    RemoveVariantRequest,
    RollbackRequest,
    ServerStatus,
    StageRequest,
    WatchRequest,
)
from .errors import AdminFailure, Forbidden, Unauthorised, admin_failure_of
from .event_stream import EventStream
from .load_series import LoadSeries
from .openapi import description
from .operations import ModelOperations
from .operator_page import page_routes
from .settings import AdminSettings
from .uploads import UploadDirectory

T = TypeVar("T")
Work = Callable[[ModelOperations, Any, str], SwapReceipt | VariantReceipt | None]
NO_STORE = {"cache-control": "no-store"}

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
        self._bodies = Bodies(settings.http)
        self._started = time.time()
        self.ending = False

    def app(self) -> Starlette:
        """Return the application, without the token guard."""
        model, repository = "/admin/models/{name}", "/v2/repository"
        endpoints: list[tuple[str, str, Handler]] = [
            ("/admin/status", "GET", self._status),
            ("/admin/events", "GET", self._events),
            ("/admin/uploads", "GET", self._list_uploads),
            ("/admin/uploads/{file}", "PUT", self._upload),
            ("/admin/uploads/{file}", "DELETE", self._remove_upload),
            (model, "GET", self._model),
            (f"{model}/history", "GET", self._history),
            *((f"{model}/{change}", "POST", partial(self._change, change)) for change in CHANGES),
            (f"{repository}/index", "POST", self._triton_index),
            (f"{repository}/models/{{name}}/load", "POST", self._triton_load),
            (f"{repository}/models/{{name}}/unload", "POST", self._triton_unload),
            ("/metrics", "GET", self._metrics),
            ("/openapi.json", "GET", self._openapi),
        ]
        return application(endpoints, self._bodies, self._refuse, self._no_such_endpoint, page_routes())

    def refuse(self, scope: Scope) -> Response:
        """Return the response to a request without a token, and note it in the audit log."""
        self._audit.deny(peer(scope), f"{scope['method']} {scope['path']}"[:200])
        error = refusal(admin_failure_of(Unauthorised("a bearer token is required (Authorization: Bearer TOKEN)")))
        error.headers["www-authenticate"] = 'Bearer realm="weightswap"'
        error.headers["connection"] = "close"  # its body was not read
        return error

    def _refuse(self, request: Request, error: Exception, arrived: float) -> Response:
        return refusal(admin_failure_of(error))

    async def _no_such_endpoint(self, request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}; see /openapi.json for what there is"
        answer = refusal(AdminFailure(error.status_code, text, ""))
        answer.headers.update(error.headers or {})
        return answer

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
            models=[operations.status() for operations in self._models.values()],
            processes=self._service.processes(),
        )

    async def _model(self, request: Request) -> Response:
        return document(await in_thread(self._operations(request).status))

    async def _history(self, request: Request) -> Response:
        return document(await in_thread(self._operations(request).history))

    async def _metrics(self, request: Request) -> Response:
        return await metrics_response(self._service)

    async def _openapi(self, request: Request) -> Response:
        return document(description(list(self._models), {name: kind for name, (kind, _) in CHANGES.items()}))

    async def _events(self, request: Request) -> Response:
        with_load = "load" in request.query_params
        stream = EventStream(self._models, self._load, self._server_status, lambda: self.ending)
        return StreamingResponse(stream.lines(with_load), media_type="text/event-stream", headers=NO_STORE)

    async def _change(self, change: str, request: Request) -> Response:
        operations = self._operations(request)
        kind, work = CHANGES[change]
        arguments = await self._document(request, kind)
        run = partial(work, operations, arguments, user_of(request))
        receipt = await audited(self._audit, request, change, operations, arguments, run)
        status = await in_thread(operations.status)
        return document(Changed(model=operations.name, receipt=receipt.as_dict() if receipt else None, status=status))

    async def _document(self, request: Request, kind: type[T]) -> T:
        """Read the document of a request. An empty body is a document without fields."""
        return decoded(await self._bodies.body_of(request) or b"{}", kind)

    async def _list_uploads(self, request: Request) -> Response:
        return document(await in_thread(self._upload_directory.listing))

    async def _upload(self, request: Request) -> Response:
        name, uploads = request.path_params["file"], self._upload_directory
        length, digest = request.headers.get("content-length"), request.headers.get("x-weightswap-blake3", "")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("uploads must not be compressed")
        upload = uploads.receive(name, _pieces(request), int(length) if length is not None else None, digest)
        arguments = {"file": name, "size": length, "blake3": digest}
        return document(await audited(self._audit, request, "upload", None, arguments, upload), 201)

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
        return document([entry for entry in self._service.index() if entry.state == "READY" or not only_ready])

    async def _triton_load(self, request: Request) -> Response:
        operations = self._operations(request)
        staging = triton.staging_of(await self._document(request, LoadRequest))
        load = partial(triton.load, operations, staging, user_of(request))
        await audited(self._audit, request, "load", operations, staging, load)
        return Response()

    async def _triton_unload(self, request: Request) -> Response:
        operations = self._operations(request)
        await self._bodies.body_of(request)
        await audited(self._audit, request, "unload", operations, None, partial(triton.unload, operations))
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


def document(content: Any, status: int = 200) -> Response:
    """Return a JSON response that browsers and proxies do not cache."""
    return Response(encode_json(content), status, NO_STORE, JSON)


def refusal(failure: AdminFailure) -> Response:
    """Return the error response of a failure."""
    headers = {**NO_STORE, "retry-after": "1"} if failure.status == 503 else NO_STORE
    return Response(encode_json(AdminError(error=failure.text, kind=failure.kind)), failure.status, headers, JSON)
