"""Threads in the background, and the end of the interpreter, which stops them instead of waiting for their work."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - at the end it waits for its threads: what is registered later comes first
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

PATIENCE = 5.0  # seconds, at the end of the interpreter, for what cannot be stopped in the middle
_ending = False


class Work(Protocol):
    """What a daemon thread does."""

    def is_alive(self) -> bool: ...

    def stop(self) -> None:
        """Let it end soon."""
        ...

    def join(self, timeout: float) -> object:
        """Wait for its end."""
        ...


_known: weakref.WeakSet[Work] = weakref.WeakSet()


def stop_at_end(work: Work) -> None:
    """Stop work at the end of the interpreter, and wait for its end for a while, if it is a daemon thread's.

    (A daemon thread that is left in the middle of C++ when the interpreter goes may abort the process.)
    """
    if threading.current_thread().daemon:
        _known.add(work)


class Background(threading.Thread):
    """A daemon thread. At the end of the interpreter `stop` is called, and its own end waited for a while."""

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
    works = [work for work in list(_known) if work.is_alive()]
    for work in works:
        work.stop()
    deadline = time.monotonic() + PATIENCE
    for work in works:
        work.join(max(0.0, deadline - time.monotonic()))


threading._register_atexit(_end)  # type: ignore[attr-defined]  # the functions of atexit are called after threads' end
