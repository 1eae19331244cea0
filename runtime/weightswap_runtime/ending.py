"""Threads in the background, and the end of the interpreter, which stops them instead of waiting for their work."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - at the end it waits for its threads: what is registered later comes first
import threading
import time
import weakref
from collections.abc import Callable

PATIENCE = 5.0  # seconds, at the end of the interpreter, for what cannot be stopped in the middle
_known: weakref.WeakSet[Background] = weakref.WeakSet()
_ending = False


class Background(threading.Thread):
    """A daemon thread. At the end of the interpreter `stop` is called, and its own end waited for a while.

    (A daemon thread that is left in the middle of C++ when the interpreter goes may abort the process.)
    """

    def __init__(self, run: Callable[[], None], name: str, stop: Callable[[], None]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.stop = stop
        _known.add(self)


def is_lost() -> bool:
    """Whether the interpreter is ending and does not wait for the calling thread."""
    return _ending and threading.current_thread().daemon


def _end() -> None:
    global _ending  # noqa: PLW0603
    _ending = True
    threads = [thread for thread in list(_known) if thread.is_alive()]
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


threading._register_atexit(_end)  # type: ignore[attr-defined]  # the functions of atexit are called after threads' end
