"""The admin plane's own description: OpenAPI 3.1, with the schemas of its documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weightswap_server.http.openapi import TEMPLATE, content, document, operation, parameter
from weightswap_server.protocol.documents import IndexEntry

from .documents import (
    AdminError,
    Changed,
    History,
    IndexRequest,
    LoadRequest,
    ModelStatus,
    ServerStatus,
    Uploaded,
    Uploads,
)

_ANSWERS = (
    AdminError,
    ServerStatus,
    ModelStatus,
    History,
    Changed,
    Uploads,
    Uploaded,
    list[IndexEntry],
    IndexRequest,
    LoadRequest,
)


def description(models: Sequence[str], changes: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The document at /openapi.json of an admin plane with these models, and changes by their documents."""
    kinds = list(dict.fromkeys(changes.values()))
    found, components = msgspec.json.schema_components([*_ANSWERS, *kinds], ref_template=TEMPLATE)
    error, server, model, history, changed, uploads, uploaded, index, indexing, loading = found[: len(_ANSWERS)]
    asked = dict(zip(kinds, found[len(_ANSWERS) :], strict=True))
    name, file = parameter("name", enum=list(models)), parameter("file")
    one, repository = "/admin/models/{name}", "/v2/repository"
    paths: dict[str, Any] = {
        "/admin/status": {"get": operation("The server, and all its models.", server)},
        "/admin/events": {"get": _events()},
        "/admin/uploads": {"get": operation("What was uploaded.", uploads)},
        "/admin/uploads/{file}": {"put": _upload(uploaded), "delete": _removal(), "parameters": [file]},
        one: {"get": operation("A model.", model), "parameters": [name]},
        f"{one}/history": {"get": operation("Commits and refusals.", history), "parameters": [name]},
        f"{repository}/index": {"post": operation("The models.", index, body=indexing, needed=False)},
        f"{repository}/models/{{name}}/load": {
            "post": operation("Answer again.", None, body=loading, needed=False),
            "parameters": [name],
        },
        f"{repository}/models/{{name}}/unload": {"post": operation("Answer nobody.", None), "parameters": [name]},
        "/metrics": {"get": operation("Metrics for Prometheus.", {"type": "string"}, media="text/plain")},
        "/openapi.json": {"get": operation("This document.", {"type": "object"})},
    }
    for change, kind in changes.items():
        does = operation(f"Change a model: {change}.", changed, body=asked[kind])
        paths[f"{one}/{change}"] = {"post": does, "parameters": [name]}
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    whole = document("weightswap admin", paths, error, {"schemas": components, "securitySchemes": schemes})
    return {**whole, "security": [{"token": []}]}


def _events() -> dict[str, Any]:
    load = {"name": "load", "in": "query", "required": False, "schema": {"type": "string"}}
    return operation("What happens, as it does.", {}, media="text/event-stream") | {"parameters": [load]}


def _upload(uploaded: Any) -> dict[str, Any]:
    done = {"description": "It is there.", "content": content(uploaded)}
    body = {"required": True, "content": content({"type": "string"}, "application/octet-stream")}
    return {"summary": "Upload a weight file.", "responses": {"201": done}, "requestBody": body}


def _removal() -> dict[str, Any]:
    return {"summary": "Remove an upload.", "responses": {"204": {"description": "It is gone."}}}
