"""Claims: what a thread holds until it ends it, or until nobody refers to it any more."""

from __future__ import annotations

import os
import weakref
from threading import local

POLL_SECONDS = 0.02  # how soon it is noticed that something was left behind, or cancelled
_own = local()


def this_thread() -> object:
    """The same for every call of a thread, and another for every other thread.

    (The number of a thread goes to another one after its end, and a pin may outlive its thread.)
    """
    try:
        return _own.token
    except AttributeError:
        return _own.__dict__.setdefault("token", object())  # a signal handler may have come between


class Claim:
    """Something that is held until it is ended, or forgotten."""

    __slots__ = ("__weakref__", "process", "thread")

    def __init__(self) -> None:
        self.thread = this_thread()
        self.process = _process

    def adopt(self) -> None:
        """Let it be the calling thread's."""
        self.thread = this_thread()

    def end(self) -> None:
        """End it; a second time does nothing."""
        self.process = -1

    @property
    def holds(self) -> bool:
        """False once it has ended. Claims of other threads do not survive a fork, as the threads do not."""
        return self.process == _process or (self.process != -1 and self.thread is _survivor)


ClaimReference = weakref.ref[Claim]
_process = os.getpid()
_survivor: object = None  # the thread that the last fork has left


def _after_fork() -> None:
    global _process, _survivor
    _process, _survivor = os.getpid(), this_thread()


os.register_at_fork(after_in_child=_after_fork)
