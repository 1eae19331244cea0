"""Tables of endpoints, of which routes are made, and the OpenAPI 3.1 description of both planes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weightswap_runtime import __version__

from .bodies import JSON

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
