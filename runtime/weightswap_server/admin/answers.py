"""How the admin plane answers: documents that nobody keeps, and errors."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from .documents import AdminError, encoded
from .errors import Refused

_JSON = "application/json"
NO_STORE = {"cache-control": "no-store"}


def document(found: Any, status: int = 200) -> Response:
    """An answer that browsers and proxies do not keep."""
    return Response(encoded(found), status, NO_STORE, _JSON)


def refusal(told: Refused) -> Response:
    """An answer that is an error."""
    headers = {**NO_STORE, "retry-after": "1"} if told.status == 503 else NO_STORE
    return Response(encoded(AdminError(error=told.text, kind=told.kind)), told.status, headers, _JSON)
