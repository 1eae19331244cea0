"""The Open Inference Protocol over HTTP: its endpoints, which decode requests for the service and encode its answers.

Calls of models are answered by an ASGI application of their own, so that they do not pay for routing and Starlette's
objects.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weightswap_runtime import __version__
from weightswap_server.canary import HEADER
from weightswap_server.errors import Failure
from weightswap_server.methods import ServedMethod
from weightswap_server.protocol import (
    HEADER_LENGTH,
    MOST_JSON,
    PARAMETER,
    Answer,
    Answered,
    ErrorDocument,
    GenerateRequest,
    GenerateResponse,
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
    Welcome,
    check_wanted,
    decoded,
    read_request,
    version_of,
    write_outputs,
)
from weightswap_server.service.generations import OpenGeneration, event_stream, whole
from weightswap_server.service.service import Service

from .bodies import JSON, Bodies, Headers, json_response, no_such_endpoint, refusal
from .listening import ON_DISCONNECT

_PATH = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_MODEL = "/v2/models/{name}"
_PLACES = {
    "ready": "/v2/health/ready",
    "model": "/v2/models/NAME",
    "infer": "/v2/models/NAME/infer",
    "metrics": "/metrics",
    "openapi": "/openapi.json",
}
_LENGTH = HEADER_LENGTH.encode()
_Parts = tuple[list[tuple[bytes, bytes]], bytes]  # headers, body
_TEMPLATE = "#/components/schemas/{name}"
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. Documents are msgspec types, or JSON schemas."""

    method: str
    path: str  # with parameters such as {name}
    handler: Handler | None  # None: it is only described; another application answers
    summary: str
    answer: Any = None  # the document of a success; None: it has no body
    body: Any = None  # the document of a request
    needed: bool = True  # whether a request must have that
    status: int = 200  # of a success
    media: str = JSON  # of the answer
    body_media: str = JSON
    unready: bool = False  # it may answer 503 with another document than that of errors
    query: str = ""  # the name of an optional parameter


def http_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a server."""
    bodies = Bodies(service.settings)
    return _InferEndpoint(service, bodies, _Endpoints(service, bodies).app())


def application(
    endpoints: Iterable[Endpoint],
    bodies: Bodies,
    refuse: Callable[[Request, Exception, float], Response],
    no_such_endpoint: Callable[[Request, HTTPException], Awaitable[Response]],
    files: Iterable[Route] = (),
) -> Starlette:
    """Return an application of a table of endpoints. refuse: takes a request, its error, its arrival."""

    def with_errors(handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            arrived = time.perf_counter()
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                return refuse(request, error, arrived)
            finally:
                bodies.release(request.scope)

        return answer

    routes = [
        Route(endpoint.path, with_errors(endpoint.handler), methods=[endpoint.method])
        for endpoint in endpoints
        if endpoint.handler is not None
    ]
    exception_handlers: Any = {HTTPException: no_such_endpoint}
    app = Starlette(routes=[*files, *routes], exception_handlers=exception_handlers)
    app.router.redirect_slashes = False
    return app


async def metrics_response(service: Service) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(await asyncio.to_thread(service.all_metrics), media_type="text/plain; version=0.0.4; charset=utf-8")


class _InferEndpoint:
    """An ASGI application that calls models, and passes everything else on to `others`."""

    def __init__(self, service: Service, bodies: Bodies, others: ASGIApp) -> None:
        self._service, self._bodies, self._others = service, bodies, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = None
        if scope["type"] == "http":
            path = _PATH.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
        if path is None:
            await self._others(scope, receive, send)
        elif scope["method"] != "POST":
            failure = no_such_endpoint(scope, 405, "Method Not Allowed")
            await refusal(failure, {"allow": "POST"})(scope, receive, send)
        else:
            await self._answer(path[1], path[2] or "", scope, receive, send)

    async def _answer(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, headers = time.perf_counter(), Headers(scope["headers"])
        try:
            response_headers, body = await self._infer(name, version, headers, scope, receive)
        except (ClientDisconnect, CancelledError):
            await Response(status_code=400)(scope, receive, send)
        except Exception as error:
            failure = self._service.refused(name, error, arrived, headers.text("traceparent"))
            await refusal(failure)(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": response_headers})
            await send({"type": "http.response.body", "body": body})
        finally:
            self._bodies.release(scope)

    async def _infer(self, name: str, version: str, headers: Headers, scope: Scope, receive: Receive) -> _Parts:
        _, method = self._service.method(name, version)
        has_tail = _LENGTH in headers
        parser = partial(
            read_request, header_length=headers.text(HEADER_LENGTH) if has_tail else None, check=method.arguments
        )
        body = await self._bodies.body(scope, receive, headers, None if has_tail else MOST_JSON)
        request, tensors = await self._bodies.parse(body, parser)
        for output in request.outputs or ():
            check_wanted(output.name, output.parameters or ())
        binary = _binary(request, method)
        call = self._service.call(
            name,
            version,
            tensors,
            outputs=[output.name for output in request.outputs or ()],
            in_json=[output for output, is_binary in binary.items() if not is_binary],
            variants=(request.parameters or {}).get(PARAMETER),
            routing=headers.text(HEADER),
            traceparent=headers.text("traceparent"),
        )
        scope[ON_DISCONNECT] = call.answer.cancel  # drops the call if it has not begun
        answer = await self._service.answer(call)
        nbytes = sum(content.nbytes for _, content in answer.outputs)
        response = await self._bodies.compute(nbytes, partial(_response, name, request, binary, answer))
        self._service.answered(call, answer)
        return response


def _binary(request: InferRequest, method: ServedMethod) -> dict[str, bool]:
    """Return which outputs are requested, and whether as bytes."""
    default = (request.parameters or {}).get("binary_data_output") is True
    wanted = {}
    for output in request.outputs or ():
        own = (output.parameters or {}).get("binary_data")
        wanted[output.name] = default if own is None else own is True
    return wanted or {output.name: default for output in method.outputs}


def _response(name: str, request: InferRequest, binary: Mapping[str, bool], answer: Answer) -> _Parts:
    documents, tail = write_outputs(answer.outputs, binary)
    answered = Answered(answer.generation, answer.weights_id, answer.variant)
    head = msgspec.json.encode(InferResponse(name, version_of(answer), documents, answered, request.id or ""))
    if not tail:
        return [(b"content-length", b"%d" % len(head)), (b"content-type", JSON.encode())], head
    body = b"".join([head, *tail])
    return [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
        (_LENGTH, b"%d" % len(head)),
    ], body


class _Endpoints:
    """The handlers of all endpoints but `infer`."""

    def __init__(self, service: Service, bodies: Bodies) -> None:
        self._service, self._bodies = service, bodies
        self._description = msgspec.json.encode(openapi("weightswap", self._table(), service.names, ErrorDocument))

    def app(self) -> Starlette:
        return application(self._table(), self._bodies, self.refuse, self.no_such_endpoint)

    def _table(self) -> list[Endpoint]:
        get, post = partial(Endpoint, "GET"), partial(Endpoint, "POST")
        generate = partial(post, summary="Continue a prompt.", answer=GenerateResponse, body=GenerateRequest)
        table = [
            get("/", self.welcome, "What this is.", Welcome),
            get("/v2/health/live", self.live, "Whether the server runs."),
            get("/v2/health/ready", self.ready, "Whether all models are ready.", unready=True),
            get("/v2", self.server, "The server.", ServerMetadata),
            post("/v2/repository/index", self.index, "The models.", list[IndexEntry], {"type": "object"}, needed=False),
            generate(f"{_MODEL}/generate", self.generate),
            generate(f"{_MODEL}/generate_stream", self.generate_stream, media="text/event-stream"),
            get("/metrics", self.metrics, "Metrics for Prometheus.", {"type": "string"}, media="text/plain"),
            get("/openapi.json", self.description, "This document.", {"type": "object"}),
        ]
        for path in (_MODEL, f"{_MODEL}/versions/{{version}}"):
            table += [
                get(path, self.model, "A model.", ModelMetadata),
                get(f"{path}/ready", self.model_ready, "Whether a model is ready.", unready=True),
                post(f"{path}/infer", None, "Call a model.", InferResponse, InferRequest),
            ]
        return table

    def refuse(self, request: Request, error: Exception, arrived: float) -> Response:
        name, parent = request.path_params.get("name", ""), request.headers.get("traceparent", "")
        return refusal(self._service.refused(name, error, arrived, parent))

    async def no_such_endpoint(self, request: Request, error: HTTPException) -> Response:
        return refusal(no_such_endpoint(request.scope, error.status_code, error.detail), error.headers)

    async def welcome(self, request: Request) -> Response:
        server = self._service.server_metadata()
        return json_response(Welcome(server.name, server.version, self._service.names, _PLACES))

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        return _is_ready(self._service.ready, "the server has models that are not ready, or is stopping")

    async def model_ready(self, request: Request) -> Response:
        served = self._service.find(request.path_params["name"], request.path_params.get("version", ""))
        return _is_ready(served.ready, "no weights yet, or not warm")

    async def server(self, request: Request) -> Response:
        return json_response(self._service.server_metadata())

    async def model(self, request: Request) -> Response:
        parameters = request.path_params
        return json_response(self._service.model_metadata(parameters["name"], parameters.get("version", "")))

    async def index(self, request: Request) -> Response:
        await self._bodies.body_of(request)
        return json_response(self._service.index())

    async def metrics(self, request: Request) -> Response:
        return await metrics_response(self._service)

    async def description(self, request: Request) -> Response:
        return Response(self._description, media_type=JSON)

    async def generate(self, request: Request) -> Response:
        return json_response(await whole(await self._generation(request)))

    async def generate_stream(self, request: Request) -> Response:
        return await event_stream(self._service, await self._generation(request))

    async def _generation(self, request: Request) -> OpenGeneration:
        name = request.path_params["name"]
        self._service.find(name)
        body = await self._bodies.body_of(request)
        document = await self._bodies.parse(body, partial(decoded, kind=GenerateRequest))
        generation = OpenGeneration(self._service, name, "", document, request.headers.get("traceparent", ""))
        request.scope[ON_DISCONNECT] = generation.close
        return generation


def _is_ready(ready: bool, why: str) -> Response:
    return Response() if ready else refusal(Failure(503, "", why))


# The OpenAPI 3.1 description of a plane.


def openapi(
    title: str, endpoints: Iterable[Endpoint], models: Sequence[str], error: type[Any], **components: Any
) -> dict[str, Any]:
    """Return an OpenAPI document. models: the values of `{name}` in paths. error: the document of every error."""
    paths: dict[str, Any] = {}
    kinds = {error}
    for endpoint in endpoints:
        kinds |= {kind for kind in (endpoint.answer, endpoint.body) if not isinstance(kind, dict | None)}
        path = paths.setdefault(endpoint.path, {})
        if names := re.findall(r"{(\w+)}", endpoint.path):
            path["parameters"] = [_path_parameter(name, models) for name in names]
        path[endpoint.method.lower()] = _operation(endpoint, error)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
    info = {"title": title, "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas, **components}}


def _path_parameter(name: str, models: Sequence[str]) -> dict[str, Any]:
    values = {"enum": list(models)} if name == "name" else {}
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **values}}


def _operation(endpoint: Endpoint, error: type[Any]) -> dict[str, Any]:
    success: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.answer is not None:
        success["content"] = _content(endpoint.answer, endpoint.media)
    responses = {str(endpoint.status): success, "default": {"description": "An error.", "content": _content(error)}}
    if endpoint.unready:
        responses["503"] = {"description": "Not ready.", "content": _content({"type": "object"})}
    described: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.body is not None:
        content = _content(endpoint.body, endpoint.body_media)
        described["requestBody"] = {"required": endpoint.needed, "content": content}
    if endpoint.query:
        query = {"name": endpoint.query, "in": "query", "required": False, "schema": {"type": "string"}}
        described["parameters"] = [query]
    return described


def _content(kind: Any, media: str = JSON) -> dict[str, Any]:
    schema = kind if isinstance(kind, dict) else msgspec.json.schema_components([kind], ref_template=_TEMPLATE)[0][0]
    return {media: {"schema": schema}}
