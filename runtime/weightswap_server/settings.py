"""Settings of a server, and its limits."""

from __future__ import annotations

from math import inf

import msgspec

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.options import is_number

_MIB = 1 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits are per server; times are seconds, sizes bytes.

    host, http_port, grpc_port: where it listens; port 0 is any that is free, grpc_port None is no gRPC.
    max_batch, max_delay: how many rows of requests one call may have, 1 for no batching, and how long the first waits
      for others; 0 takes what is queued.
    batch_dim: the name of the signature's dimension that is the batch.
    max_queue: requests that wait for a model; more are refused with 503.
    max_body: the bytes of a request, decompressed, over HTTP or gRPC.
    max_bodies: those of all requests over HTTP that are under way; more are refused with 503.
    body_timeout: for the bytes of a request's headers, for those of its body, and for a client that does not read.
    timeout: from a request's arrival to its answer.
    max_connections: over HTTP; and calls at once over gRPC.
    max_streams, stream_timeout: how many generations may be open, each with a context of its own, and for how long.
    grace: how long a stop waits for what was accepted.
    traces: spans of requests and swaps for OpenTelemetry, by the tracer provider that the process has.
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
        """Raise Unsupported for numbers that cannot be meant."""
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
