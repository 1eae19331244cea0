"""Settings and limits of a server."""

from __future__ import annotations

from math import inf

import msgspec

from weightswap_runtime.errors import Unsupported, is_number

_MIB = 1 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    http_port: int = 8000  # 0: any free one
    grpc_port: int | None = None  # None: no gRPC
    max_batch: int = 1  # the most rows of a batch; 1 disables batching
    max_delay: float = 0.0  # for which the first request of a batch waits for others; 0: it takes what is queued
    batch_dim: str = "batch"  # the name of the signature's batch dimension
    max_queue: int = 256  # requests that may wait for one model; more are refused with 503
    max_body: int = 64 * _MIB  # of a request, decompressed, over HTTP or gRPC
    max_bodies: int = 1024 * _MIB  # of all HTTP requests in flight; more are refused with 503
    body_timeout: float = (
        30.0  # for a request's headers, for its body, and for a client that does not read its response
    )
    timeout: float = 60.0  # from a request's arrival to its response
    max_connections: int = 1024  # over HTTP, and concurrent calls over gRPC
    max_streams: int = 16  # generations that may be open, each with a context of its own
    stream_timeout: float = 300.0  # for a generation
    grace: float = 30.0  # for which a stopping server waits for the requests that it has accepted
    traces: bool = False  # make OpenTelemetry spans of requests and swaps, with the process's tracer provider

    def check(self) -> None:
        """Raise Unsupported for values out of range."""
        counts = ("max_batch", "max_queue", "max_body", "max_bodies", "max_connections", "max_streams")
        self._check_whole(counts, 1, inf)
        self._check_whole(("http_port",) if self.grpc_port is None else ("http_port", "grpc_port"), 0, 65535)
        for name in ("max_delay", "body_timeout", "timeout", "stream_timeout", "grace"):
            if not (is_number(value := getattr(self, name)) and value >= 0):
                raise Unsupported(f"{name}={value!r}: expected seconds, 0 or more")
        for name in ("body_timeout", "timeout", "stream_timeout"):
            if not getattr(self, name) > 0:
                raise Unsupported(f"{name}={getattr(self, name)}: expected more than 0 seconds")

    def _check_whole(self, names: tuple[str, ...], least: int, most: float) -> None:
        for name in names:
            if type(value := getattr(self, name)) is not int or not least <= value <= most:
                limits = f"{least} or more" if most == inf else f"from {least} to {most}"
                raise Unsupported(f"{name}={value!r}: expected a whole number, {limits}")
