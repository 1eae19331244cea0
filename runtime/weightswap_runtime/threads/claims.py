"""Claims, which a thread holds until it ends them, or until nothing refers to them any more."""

from __future__ import annotations

import os
import weakref
from threading import local

POLL_SECONDS = 0.02  # within which an abandoned claim or a cancellation is noticed
_local = local()


def this_thread() -> object:
    """Return a token of the calling thread: always the same in one thread, and another in every other thread.

    (A thread's identifier is reused after its end, and a pin may outlive its thread.)
    """
    try:
        return _local.token
    except AttributeError:
        return _local.__dict__.setdefault("token", object())  # a signal handler may have set it in between


class Claim:
    """A claim of one thread, held until it is ended or garbage-collected."""

    __slots__ = ("__weakref__", "process", "thread")

    def __init__(self) -> None:
        self.thread = this_thread()
        self.process = _process

    def adopt(self) -> None:
        """Move the claim to the calling thread."""
        self.thread = this_thread()

    def end(self) -> None:
        """End the claim. Idempotent."""
        self.process = -1

    @property
    def holds(self) -> bool:
        """False once the claim has ended. After a fork only the claims of the surviving thread hold in the child."""
        return self.process == _process or (self.process != -1 and self.thread is _survivor)


ClaimReference = weakref.ref[Claim]
_process = os.getpid()
_survivor: object = None  # the token of the thread that survived the last fork


def _after_fork() -> None:
    global _process, _survivor
    _process, _survivor = os.getpid(), this_thread()


os.register_at_fork(after_in_child=_after_fork)
