"""How long a call may keep one of gRPC's threads waiting for its client."""

from __future__ import annotations

import time
from threading import Event, Thread

import grpc

_LOOK = 0.25  # seconds between two looks


class Patience:
    """Cancels calls whose clients have not sent, or read, in time. One thread looks: a timer for each call costs more
    than the call."""

    def __init__(self) -> None:
        self._until: dict[grpc.ServicerContext, float] = {}
        self._ended = Event()
        Thread(target=self._look, name="weightswap-patience", daemon=True).start()

    def expect(self, context: grpc.ServicerContext, seconds: float) -> None:
        """The client is to do its part in so many seconds from now."""
        self._until[context] = time.monotonic() + seconds

    def met(self, context: grpc.ServicerContext) -> None:
        """It has, or nothing is expected of it any more."""
        self._until.pop(context, None)

    def end(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK):
            now = time.monotonic()
            for context, until in self._until.copy().items():
                if now > until:
                    self.met(context)
                    context.cancel()
