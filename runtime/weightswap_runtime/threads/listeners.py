"""Callbacks of the application for events. Their exceptions are logged and not raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import RLock
from typing import Generic, ParamSpec

from weightswap_runtime.errors import Unsupported

from .forks import renew_in_children

P = ParamSpec("P")
Stop = Callable[[], None]


class Listeners(Generic[P]):
    """Callbacks, called in order, in the thread that calls `tell`."""

    def __init__(self, log: logging.Logger) -> None:
        self.all: tuple[Callable[P, object], ...] = ()
        self._log = log
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        self._changing = RLock()  # for signal handlers

    def add(self, listener: Callable[P, object]) -> Stop:
        """Add a callback. Return a function that removes it again and is idempotent. Raises Unsupported."""
        if not callable(listener):
            raise Unsupported(f"{listener!r} is not callable; give a function")
        entry: list[Callable[P, object]] = [listener]
        with self._changing:
            self.all += (listener,)

        def stop() -> None:
            with self._changing:
                if entry:
                    remaining = list(self.all)
                    remaining.remove(entry.pop())
                    self.all = tuple(remaining)

        return stop

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self.all:
            try:
                listener(*args, **kwargs)
            except Exception:
                self._log.exception("%r failed", listener)
