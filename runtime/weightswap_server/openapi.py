"""The server's own description: OpenAPI 3.1, with the schemas of the documents in `protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weightswap_runtime import __version__

from .protocol import (
    ErrorDocument,
    GenerateRequest,
    GenerateResponse,
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
)

_DOCUMENTS = (
    ErrorDocument,
    list[IndexEntry],
    InferRequest,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
    GenerateRequest,
    GenerateResponse,
)
_TEMPLATE = "#/components/schemas/{name}"


def description(models: Sequence[str]) -> dict[str, Any]:
    """The document at /openapi.json of a server with these models."""
    found, components = msgspec.json.schema_components(_DOCUMENTS, ref_template=_TEMPLATE)
    error, index, infer, inferred, model, server, generate, generated = found
    name, version = _parameter("name", enum=list(models)), _parameter("version")
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": _operation("Whether the server runs.", None)},
        "/v2/health/ready": {"get": _operation("Whether all models are ready.", None, unready=True)},
        "/v2": {"get": _operation("The server.", server)},
        "/v2/repository/index": {"post": _operation("The models.", index, body={"type": "object"}, needed=False)},
        "/metrics": {"get": _operation("Metrics for Prometheus.", {"type": "string"}, media="text/plain")},
        "/openapi.json": {"get": _operation("This document.", {"type": "object"})},
    }
    for prefix, parameters in (("", [name]), ("/versions/{version}", [name, version])):
        path = f"/v2/models/{{name}}{prefix}"
        paths[path] = {"get": _operation("A model.", model), "parameters": parameters}
        ready = _operation("Whether a model is ready.", None, unready=True)
        paths[f"{path}/ready"] = {"get": ready, "parameters": parameters}
        paths[f"{path}/infer"] = {"post": _operation("Call a model.", inferred, body=infer), "parameters": parameters}
    for last, media in (("generate", "application/json"), ("generate_stream", "text/event-stream")):
        operation = _operation("Continue a prompt.", generated, body=generate, media=media)
        paths[f"/v2/models/{{name}}/{last}"] = {"post": operation, "parameters": [name]}
    for path in paths.values():
        for operation in path.values():
            if isinstance(operation, dict):
                operation["responses"]["default"] = {"description": "An error.", "content": _content(error)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "weightswap", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _parameter(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **more}}


def _content(schema: Any, media: str = "application/json") -> dict[str, Any]:
    return {media: {"schema": schema}}


def _operation(
    says: str,
    answer: Any,
    *,
    body: Any = None,
    needed: bool = True,
    unready: bool = False,
    media: str = "application/json",
) -> dict[str, Any]:
    done: dict[str, Any] = {"description": says}
    if answer is not None:
        done["content"] = _content(answer, media)
    found: dict[str, Any] = {"summary": says, "responses": {"200": done}}
    if unready:
        found["responses"]["503"] = {"description": "Not ready.", "content": _content({"type": "object"})}
    if body is not None:
        found["requestBody"] = {"required": needed, "content": _content(body)}
    return found
