"""Timeouts of calls that keep one of gRPC's threads waiting for their client."""

from __future__ import annotations

import time
from threading import Event, Thread

import grpc

_INTERVAL = 0.25  # seconds between two checks


class ClientTimeouts:
    """Timeouts that cancel calls whose clients do not send, or read, in time. One thread checks all of them: a timer
    for each call would cost more than the call."""

    def __init__(self) -> None:
        self._deadlines: dict[grpc.ServicerContext, float] = {}
        self._closed = Event()
        Thread(target=self._check, name="weightswap-grpc-timeouts", daemon=True).start()

    def start(self, context: grpc.ServicerContext, seconds: float) -> None:
        """Cancel the call after so many seconds, unless `stop` or `start` is called before."""
        self._deadlines[context] = time.monotonic() + seconds

    def stop(self, context: grpc.ServicerContext) -> None:
        self._deadlines.pop(context, None)

    def close(self) -> None:
        self._closed.set()

    def _check(self) -> None:
        while not self._closed.wait(_INTERVAL):
            now = time.monotonic()
            for context, deadline in self._deadlines.copy().items():
                if now > deadline:
                    self.stop(context)
                    context.cancel()
