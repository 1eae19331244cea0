"""Settings and limits of a server."""

from __future__ import annotations

from math import inf

import msgspec

from weightswap_runtime.errors import Unsupported, is_number

_MIB = 1 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server. Times are in seconds, sizes in bytes.

    host, http_port, grpc_port: the address to listen on. Port 0 takes any free port; grpc_port None disables gRPC.
    max_batch, max_delay: the most rows that one batch may have (1 disables batching), and how long the first request
      waits for others. A max_delay of 0 takes what is queued.
    batch_dim: the name of the signature's batch dimension.
    max_queue: the most requests that may wait for one model; more are refused with 503.
    max_body: the most bytes of a request body, decompressed, over HTTP or gRPC.
    max_bodies: the most bytes of all HTTP request bodies in flight; more are refused with 503.
    body_timeout: the time for a request's headers, for its body, and for a client that does not read its response.
    timeout: the time from a request's arrival to its response.
    max_connections: the most connections over HTTP, and the most concurrent calls over gRPC.
    max_streams, stream_timeout: the most generations that may be open, each with its own context, and for how long.
    grace: how long a stopping server waits for the requests it has accepted.
    traces: whether to make OpenTelemetry spans of requests and swaps, with the process's tracer provider.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int | None = None
    max_batch: int = 1
    max_delay: float = 0.0
    batch_dim: str = "batch"
    max_queue: int = 256
    max_body: int = 64 * _MIB
    max_bodies: int = 1024 * _MIB
    body_timeout: float = 30.0
    timeout: float = 60.0
    max_connections: int = 1024
    max_streams: int = 16
    stream_timeout: float = 300.0
    grace: float = 30.0
    traces: bool = False

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
