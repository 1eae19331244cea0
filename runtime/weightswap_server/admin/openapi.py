"""OpenAPI 3.1 description of the admin plane, with the schemas of its documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightswap_server.http.openapi import content, document, operation, parameter
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
    """Return the document at /openapi.json of an admin plane. changes: the request documents, by change."""
    name, file = parameter("name", enum=list(models)), parameter("file")
    model, repository = "/admin/models/{name}", "/v2/repository"
    paths: dict[str, Any] = {
        "/admin/status": {"get": operation("The server, and all its models.", ServerStatus)},
        "/admin/events": {"get": _events()},
        "/admin/uploads": {"get": operation("What was uploaded.", Uploads)},
        "/admin/uploads/{file}": {"put": _upload(), "delete": _removal(), "parameters": [file]},
        model: {"get": operation("A model.", ModelStatus), "parameters": [name]},
        f"{model}/history": {"get": operation("Commits and refusals.", History), "parameters": [name]},
        f"{repository}/index": {"post": operation("The models.", list[IndexEntry], body=IndexRequest, required=False)},
        f"{repository}/models/{{name}}/load": {
            "post": operation("Answer again.", None, body=LoadRequest, required=False),
            "parameters": [name],
        },
        f"{repository}/models/{{name}}/unload": {"post": operation("Answer nobody.", None), "parameters": [name]},
        "/metrics": {"get": operation("Metrics for Prometheus.", {"type": "string"}, media="text/plain")},
        "/openapi.json": {"get": operation("This document.", {"type": "object"})},
    }
    for change, kind in changes.items():
        described = operation(f"Change a model: {change}.", Changed, body=kind)
        paths[f"{model}/{change}"] = {"post": described, "parameters": [name]}
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    openapi = document("weightswap admin", paths, [*_ANSWERS, *changes.values()], securitySchemes=schemes)
    return {**openapi, "security": [{"token": []}]}


def _events() -> dict[str, Any]:
    load = {"name": "load", "in": "query", "required": False, "schema": {"type": "string"}}
    return operation("Events, as they happen.", {}, media="text/event-stream") | {"parameters": [load]}


def _upload() -> dict[str, Any]:
    created = {"description": "Uploaded.", "content": content(Uploaded)}
    body = {"required": True, "content": content({"type": "string"}, "application/octet-stream")}
    return {"summary": "Upload a weight file.", "responses": {"201": created}, "requestBody": body}


def _removal() -> dict[str, Any]:
    return {"summary": "Remove an upload.", "responses": {"204": {"description": "Removed."}}}
