"""The protocol over HTTP: which page does what, and what a request and its answer look like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from weightswap_server.canary.canary import HEADER
from weightswap_server.errors import Failure
from weightswap_server.protocol.documents import (
    HEADER_LENGTH,
    Answered,
    ErrorDocument,
    GenerateRequest,
    InferRequest,
    InferResponse,
)
from weightswap_server.protocol.tensors_on_the_wire import (
    Answer,
    chosen,
    decoded,
    read_request,
    version_of,
    write_outputs,
)
from weightswap_server.protocol.variant_text import PARAMETER, read_variants
from weightswap_server.service.generating import Generation, event_stream, whole
from weightswap_server.service.service import Service

from .bodies import Bodies, body_of
from .listening import GONE
from .openapi import description

_JSON = "application/json"
_RETRY_AFTER = "1"
Page = Callable[[Request], Awaitable[Response]]


def http_app(service: Service) -> Starlette:
    """The application of a server."""
    pages = _Pages(service)
    model = "/v2/models/{name}"
    routes = [
        (f"{model}/infer", "POST", pages.infer),  # first, as routes are tried in order
        ("/v2/health/live", "GET", pages.live),
        ("/v2/health/ready", "GET", pages.ready),
        ("/v2", "GET", pages.server),
        ("/v2/repository/index", "POST", pages.index),
        (model, "GET", pages.model),
        (f"{model}/ready", "GET", pages.model_ready),
        (f"{model}/generate", "POST", pages.generate),
        (f"{model}/generate_stream", "POST", pages.generate_stream),
        (f"{model}/versions/{{version}}", "GET", pages.model),
        (f"{model}/versions/{{version}}/ready", "GET", pages.model_ready),
        (f"{model}/versions/{{version}}/infer", "POST", pages.infer),
        ("/metrics", "GET", pages.metrics),
        ("/openapi.json", "GET", pages.openapi),
    ]
    handlers: Any = {HTTPException: pages.no_such_page, Exception: pages.failed}
    app = Starlette(
        routes=[Route(path, pages.answering(page), methods=[method]) for path, method, page in routes],
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False
    return app


class _Pages:
    """Each page, as a function from a request to an answer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies = Bodies(service.settings)
        self._description = msgspec.json.encode(description(service.names))

    def answering(self, page: Page) -> Page:
        """A page whose errors are answers, too."""

        async def answer(request: Request) -> Response:
            arrived = time.perf_counter()
            try:
                return await page(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                name, parent = request.path_params.get("name", ""), request.headers.get("traceparent", "")
                return refusal(self._service.refused(name, error, arrived, parent))
            finally:
                self._bodies.let_go(request)

        return answer

    async def failed(self, request: Request, error: Exception) -> Response:
        return refusal(self._service.refused("", error))

    async def no_such_page(self, request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}; /openapi.json says what there is"
        answer = refusal(Failure(error.status_code, "", text))
        answer.headers.update(error.headers or {})
        return answer

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        return _is_ready(self._service.ready, "the server has models that are not ready, or is stopping")

    async def model_ready(self, request: Request) -> Response:
        served = self._service.find(request.path_params["name"], request.path_params.get("version", ""))
        return _is_ready(served.ready, "no weights yet, or not warm")

    async def server(self, request: Request) -> Response:
        return _document(self._service.server_metadata())

    async def model(self, request: Request) -> Response:
        parameters = request.path_params
        return _document(self._service.model_metadata(parameters["name"], parameters.get("version", "")))

    async def index(self, request: Request) -> Response:
        await body_of(request, self._service.settings)
        return _document(self._service.index())

    async def metrics(self, request: Request) -> Response:
        return Response(
            await asyncio.to_thread(self._service.all_metrics), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def openapi(self, request: Request) -> Response:
        return Response(self._description, media_type=_JSON)

    async def infer(self, request: Request) -> Response:
        name, version = request.path_params["name"], request.path_params.get("version", "")
        self._service.find(name, version)
        headers = request.headers
        reader = partial(read_request, header_length=headers.get(HEADER_LENGTH))
        asked, tensors = await self._bodies.read(await self._bodies.whole(request), reader)
        traceparent, wish = headers.get("traceparent", ""), headers.get(HEADER, "")
        variants = read_variants(asked.parameters.get(PARAMETER))
        served, call = self._service.call(name, version, tensors, traceparent, wish, variants)
        chosen_names = [output.name for output in asked.outputs or ()]
        call.method.check_outputs(chosen_names)
        request.scope[GONE] = call.answer.cancel  # who is gone before it began is not waited for
        try:
            return _answer(name, asked, await self._service.answer(served, call))
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ClientDisconnect from error

    async def generate(self, request: Request) -> Response:
        return _document(await whole(await self._generation(request)))

    async def generate_stream(self, request: Request) -> Response:
        return await event_stream(self._service, await self._generation(request))

    async def _generation(self, request: Request) -> Generation:
        name = request.path_params["name"]
        self._service.find(name)
        asked = await self._bodies.read(await self._bodies.whole(request), partial(decoded, kind=GenerateRequest))
        return Generation(self._service, name, "", asked, request.headers.get("traceparent", ""))


def _answer(name: str, asked: InferRequest, answer: Answer) -> Response:
    wanted = asked.outputs or []
    outputs = chosen(answer.outputs, [output.name for output in wanted])
    default = asked.parameters.get("binary_data_output") is True
    binary = {output.name: output.parameters.get("binary_data", default) is True for output in wanted}
    documents, tail = write_outputs(outputs, binary or dict.fromkeys(dict(outputs), default))
    said = Answered(answer.generation, answer.weights_id, answer.variant)
    head = msgspec.json.encode(InferResponse(name, version_of(answer), documents, said, asked.id))
    if not tail:
        return Response(head, media_type=_JSON)
    headers = {HEADER_LENGTH: str(len(head)), "content-type": "application/octet-stream"}
    return Response(b"".join([head, *tail]), headers=headers)


def refusal(told: Failure) -> Response:
    """An answer that is an error, in the protocol's form."""
    headers = {"retry-after": _RETRY_AFTER} if told.retry else None
    return Response(msgspec.json.encode(ErrorDocument(told.text)), told.status, headers, _JSON)


def _document(document: Any) -> Response:
    return Response(msgspec.json.encode(document), media_type=_JSON)


def _is_ready(ready: bool, why: str) -> Response:
    return Response() if ready else refusal(Failure(503, "", why))
