"""Background threads, which are stopped at the end of the interpreter instead of finishing their work."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its exit function waits for its threads: ours, registered later, runs first
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

PATIENCE = 5.0  # seconds to wait at the end of the interpreter for work that cannot be interrupted
_ending = False


class Work(Protocol):
    """Work of a daemon thread."""

    def is_alive(self) -> bool: ...

    def stop(self) -> None:
        """Let it end soon."""
        ...

    def join(self, timeout: float) -> object:
        """Wait for its end."""
        ...


_known: weakref.WeakSet[Work] = weakref.WeakSet()


def stop_at_end(work: Work) -> None:
    """Register a daemon thread's work to be stopped, and awaited for a while, at the end of the interpreter.

    (A daemon thread that is in C++ code when the interpreter ends may abort the process.) Other threads are ignored.
    """
    if threading.current_thread().daemon:
        _known.add(work)


class Background(threading.Thread):
    """A daemon thread. At the end of the interpreter `stop` is called and the thread joined, with a timeout."""

    def __init__(self, run: Callable[[], None], name: str, stop: Callable[[], None]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.stop = stop
        _known.add(self)


def is_lost() -> bool:
    """Return whether the interpreter is ending and does not wait for the calling thread."""
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


threading._register_atexit(_end)  # type: ignore[attr-defined]  # functions of atexit run only after threads were joined
