"""Answers that are errors, in the protocol's form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from weightswap_server.errors import Failure
from weightswap_server.protocol.documents import ErrorDocument

JSON = "application/json"
_RETRY_AFTER = "1"


def refusal(told: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that tells of a failure."""
    retry = {"retry-after": _RETRY_AFTER} if told.retry else {}
    return Response(msgspec.json.encode(ErrorDocument(told.text)), told.status, {**(headers or {}), **retry}, JSON)


def no_such_page(scope: Scope, status: int, detail: str) -> Failure:
    """What is told of a path, or a method of one, that is not there."""
    return Failure(status, "", f"{scope['method']} {scope['path']}: {detail}; /openapi.json says what there is")
