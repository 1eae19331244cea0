"""Error responses, in the protocol's form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from weightswap_server.errors import Failure
from weightswap_server.protocol.documents import ErrorDocument

JSON = "application/json"
_RETRY_AFTER = "1"


def refusal(failure: Failure, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response of a failure."""
    retry = {"retry-after": _RETRY_AFTER} if failure.retry else {}
    content = msgspec.json.encode(ErrorDocument(failure.text))
    return Response(content, failure.status, {**(headers or {}), **retry}, JSON)


def no_such_endpoint(scope: Scope, status: int, detail: str) -> Failure:
    """Return the failure of a request with an unknown path or method."""
    return Failure(status, "", f"{scope['method']} {scope['path']}: {detail}; see /openapi.json for what there is")
