"""OpenAPI 3.1 description of the server, with the schemas of the documents in `protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weightswap_runtime import __version__
from weightswap_server.protocol import (
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
    """Return the document at /openapi.json of a server with these models."""
    name, version = parameter("name", enum=list(models)), parameter("version")
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": operation("Whether the server runs.", None)},
        "/v2/health/ready": {"get": operation("Whether all models are ready.", None, unready=True)},
        "/v2": {"get": operation("The server.", ServerMetadata)},
        "/v2/repository/index": {
            "post": operation("The models.", list[IndexEntry], body={"type": "object"}, required=False)
        },
        "/metrics": {"get": operation("Metrics for Prometheus.", {"type": "string"}, media="text/plain")},
        "/openapi.json": {"get": operation("This document.", {"type": "object"})},
    }
    for prefix, parameters in (("", [name]), ("/versions/{version}", [name, version])):
        path = f"/v2/models/{{name}}{prefix}"
        paths[path] = {"get": operation("A model.", ModelMetadata), "parameters": parameters}
        ready = operation("Whether a model is ready.", None, unready=True)
        paths[f"{path}/ready"] = {"get": ready, "parameters": parameters}
        call = operation("Call a model.", InferResponse, body=InferRequest)
        paths[f"{path}/infer"] = {"post": call, "parameters": parameters}
    for last, media in (("generate", "application/json"), ("generate_stream", "text/event-stream")):
        continued = operation("Continue a prompt.", GenerateResponse, body=GenerateRequest, media=media)
        paths[f"/v2/models/{{name}}/{last}"] = {"post": continued, "parameters": [name]}
    return openapi_document("weightswap", paths, _DOCUMENTS)


def openapi_document(title: str, paths: dict[str, Any], kinds: Sequence[Any], **components: Any) -> dict[str, Any]:
    """Return an OpenAPI document. kinds: all document types; the first is that of errors, for every operation."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
    for path in paths.values():
        for described in path.values():
            if isinstance(described, dict):
                described["responses"]["default"] = {"description": "An error.", "content": content(kinds[0])}
    info = {"title": title, "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas, **components}}


def parameter(name: str, **more: Any) -> dict[str, Any]:
    """Return the description of a path parameter."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", **more}}


def content(kind: Any, media: str = "application/json") -> dict[str, Any]:
    """Return the description of a body. kind: a document type or a schema."""
    schema = kind if isinstance(kind, dict) else msgspec.json.schema_components([kind], ref_template=_TEMPLATE)[0][0]
    return {media: {"schema": schema}}


def operation(
    summary: str,
    answer: Any,
    *,
    body: Any = None,
    required: bool = True,
    unready: bool = False,
    media: str = "application/json",
) -> dict[str, Any]:
    """Return the description of an operation. unready: it may answer 503, too."""
    success: dict[str, Any] = {"description": summary}
    if answer is not None:
        success["content"] = content(answer, media)
    described: dict[str, Any] = {"summary": summary, "responses": {"200": success}}
    if unready:
        described["responses"]["503"] = {"description": "Not ready.", "content": content({"type": "object"})}
    if body is not None:
        described["requestBody"] = {"required": required, "content": content(body)}
    return described
