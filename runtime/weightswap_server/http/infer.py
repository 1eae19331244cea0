"""The endpoint that calls models, and takes most requests: plain ASGI, before Starlette's routing, for speed.

POST /v2/models/NAME/infer, and /v2/models/NAME/versions/VERSION/infer
"""

from __future__ import annotations

import re
import time
from concurrent.futures import CancelledError
from functools import partial

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightswap_server.canary.canary import HEADER
from weightswap_server.protocol.documents import HEADER_LENGTH, MOST_JSON, Answered, InferRequest, InferResponse
from weightswap_server.protocol.tensors_on_the_wire import Answer, read_request, select, version_of, write_outputs
from weightswap_server.protocol.variant_text import PARAMETER, read_variants
from weightswap_server.service.service import Service

from .bodies import Bodies, Headers
from .listening import ON_DISCONNECT
from .refusals import JSON, no_such_endpoint, refusal

_PATH = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_LENGTH = HEADER_LENGTH.encode()
_Parts = tuple[list[tuple[bytes, bytes]], bytes]  # headers, body


class InferEndpoint:
    """An ASGI application that calls models; `others` is the application of all other endpoints."""

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
        variants = read_variants(request.parameters.get(PARAMETER))
        traceparent, wish = headers.text("traceparent"), headers.text(HEADER)
        served, call = self._service.call(name, version, tensors, traceparent, wish, variants)
        if request.outputs:
            call.method.check_outputs([output.name for output in request.outputs])
        scope[ON_DISCONNECT] = call.answer.cancel  # drops the call if it has not begun
        answer = await self._service.answer(served, call)
        nbytes = sum(content.nbytes for _, content in answer.outputs)
        response = await self._bodies.compute(nbytes, partial(_response, name, request, answer))
        self._service.metrics.answered(name, answer.weights_id)
        return response


def _response(name: str, request: InferRequest, answer: Answer) -> _Parts:
    requested = request.outputs or []
    outputs = select(answer.outputs, [output.name for output in requested])
    default = request.parameters.get("binary_data_output") is True
    binary = {output.name: output.parameters.get("binary_data", default) is True for output in requested}
    documents, tail = write_outputs(outputs, binary or dict.fromkeys(dict(outputs), default))
    answered = Answered(answer.generation, answer.weights_id, answer.variant)
    head = msgspec.json.encode(InferResponse(name, version_of(answer), documents, answered, request.id))
    if not tail:
        return [(b"content-length", b"%d" % len(head)), (b"content-type", JSON.encode())], head
    body = b"".join([head, *tail])
    return [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
        (_LENGTH, b"%d" % len(head)),
    ], body
