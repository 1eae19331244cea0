"""The page that calls models, which most requests are for: answered in ASGI's own words, before any other is looked at.

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
from weightswap_server.protocol.documents import HEADER_LENGTH, Answered, InferRequest, InferResponse
from weightswap_server.protocol.tensors_on_the_wire import Answer, chosen, read_request, version_of, write_outputs
from weightswap_server.protocol.variant_text import PARAMETER, read_variants
from weightswap_server.service.service import Service

from .bodies import Bodies, Headers
from .listening import GONE
from .refusals import JSON, no_such_page, refusal

_PATH = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_LENGTH = HEADER_LENGTH.encode()
_Said = tuple[list[tuple[bytes, bytes]], bytes]  # headers, body


class InferPage:
    """An ASGI application that calls models; `others` is the one for all other pages."""

    def __init__(self, service: Service, bodies: Bodies, others: ASGIApp) -> None:
        self._service, self._bodies, self._others = service, bodies, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = None
        if scope["type"] == "http":
            path = _PATH.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
        if path is None:
            await self._others(scope, receive, send)
        elif scope["method"] != "POST":
            told = no_such_page(scope, 405, "Method Not Allowed")
            await refusal(told, {"allow": "POST"})(scope, receive, send)
        else:
            await self._answer(path[1], path[2] or "", scope, receive, send)

    async def _answer(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, headers = time.perf_counter(), Headers(scope["headers"])
        try:
            said, body = await self._infer(name, version, headers, scope, receive)
        except (ClientDisconnect, CancelledError):
            await Response(status_code=400)(scope, receive, send)
        except Exception as error:
            told = self._service.refused(name, error, arrived, headers.text("traceparent"))
            await refusal(told)(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": said})
            await send({"type": "http.response.body", "body": body})
        finally:
            self._bodies.let_go(scope)

    async def _infer(self, name: str, version: str, headers: Headers, scope: Scope, receive: Receive) -> _Said:
        self._service.find(name, version)
        reader = partial(read_request, header_length=headers.text(HEADER_LENGTH) if _LENGTH in headers else None)
        asked, tensors = await self._bodies.read(await self._bodies.whole(scope, receive, headers), reader)
        variants = read_variants(asked.parameters.get(PARAMETER))
        traceparent, wish = headers.text("traceparent"), headers.text(HEADER)
        served, call = self._service.call(name, version, tensors, traceparent, wish, variants)
        if asked.outputs:
            call.method.check_outputs([output.name for output in asked.outputs])
        scope[GONE] = call.answer.cancel  # who is gone before it began is not waited for
        answer = await self._service.answer(served, call)
        said = _said(name, asked, answer)
        self._service.metrics.answered(name, answer.weights_id)
        return said


def _said(name: str, asked: InferRequest, answer: Answer) -> _Said:
    """The headers and the body of an answer."""
    wanted = asked.outputs or []
    outputs = chosen(answer.outputs, [output.name for output in wanted])
    default = asked.parameters.get("binary_data_output") is True
    binary = {output.name: output.parameters.get("binary_data", default) is True for output in wanted}
    documents, tail = write_outputs(outputs, binary or dict.fromkeys(dict(outputs), default))
    said = Answered(answer.generation, answer.weights_id, answer.variant)
    head = msgspec.json.encode(InferResponse(name, version_of(answer), documents, said, asked.id))
    if not tail:
        return [(b"content-length", b"%d" % len(head)), (b"content-type", JSON.encode())], head
    body = b"".join([head, *tail])
    return [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
        (_LENGTH, b"%d" % len(head)),
    ], body
