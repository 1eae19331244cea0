"""Functions of the application that are told what happens. What they raise goes to the log and no further."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import RLock
from typing import Generic, ParamSpec

from .errors import Unsupported
from .forks import renew_in_children

P = ParamSpec("P")
Stop = Callable[[], None]


class Hooks(Generic[P]):
    """Tells each hook in turn, in the thread that tells. Truthy while there are any."""

    def __init__(self, log: logging.Logger) -> None:
        self.hooks: tuple[Callable[P, object], ...] = ()
        self._log = log
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        self._changing = RLock()  # for signal handlers

    def add(self, hook: Callable[P, object]) -> Stop:
        """Tell `hook` from now on, until the function that is returned is called; a second time that does nothing."""
        if not callable(hook):
            raise Unsupported(f"{hook!r} cannot be called; give a function")
        entry: list[Callable[P, object]] = [hook]
        with self._changing:
            self.hooks += (hook,)

        def stop() -> None:
            with self._changing:
                if entry:
                    self.hooks = _without(self.hooks, entry.pop())

        return stop

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for hook in self.hooks:
            try:
                hook(*args, **kwargs)
            except Exception:
                self._log.exception("%r failed", hook)


def _without(hooks: tuple[Callable[P, object], ...], gone: Callable[P, object]) -> tuple[Callable[P, object], ...]:
    place = hooks.index(gone)
    return hooks[:place] + hooks[place + 1 :]
