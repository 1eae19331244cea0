"""The gate between calls and commits: a call leases the current version, a commit changes what is current.

A *version* is one set of weights in one session under one generation. In double residency a commit exchanges the
reference. In single residency it holds new calls, waits for the leases, and lets the calls go after the copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, get_ident
from typing import Generic, Protocol, TypeVar

from .errors import LeaseTimeout, ModelFailed, NoWeights


class Leasable(Protocol):
    """What a version lives in. `leases` counts the leases by thread; only the gate touches it."""

    leases: dict[int, int]


S = TypeVar("S", bound=Leasable)


@dataclass(frozen=True, eq=False)
class Version(Generic[S]):
    """One generation of the model. `session` is where it is (or, once overwritten, was)."""

    session: S
    generation: int
    weights_id: str
    labels: dict[str, str] = field(default_factory=dict)


class Gate(Generic[S]):
    """Hands out leases on the current version. One lock, held for a few hundred nanoseconds at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._current: Version[S] | None = None
        self._held = False
        self._failure: str | None = None

    @property
    def current(self) -> Version[S] | None:
        return self._current

    @property
    def failure(self) -> str | None:
        return self._failure

    def acquire(self) -> tuple[Version[S], int]:
        """Take a lease on the current version; give its session and the returned thread back to `release`.

        While a commit holds the calls, a thread that already has a lease is let through, or the two would wait for
        each other. Raises NoWeights and ModelFailed.
        """
        thread = get_ident()
        with self._lock:
            while self._held and not (self._current and thread in self._current.session.leases):
                self._changed.wait()
            if self._failure is not None:
                raise ModelFailed(f"an in-place commit broke off ({self._failure}); swap or roll back to serve again")
            version = self._current
            if version is None:
                raise NoWeights("the model was loaded without weights; call model.swap(path) first")
            leases = version.session.leases
            leases[thread] = leases.get(thread, 0) + 1
        return version, thread

    def acquire_session(self, session: S) -> int:
        """Take one more lease on a session that the caller knows cannot be overwritten now."""
        thread = get_ident()
        with self._lock:
            session.leases[thread] = session.leases.get(thread, 0) + 1
        return thread

    def release(self, session: S, thread: int) -> None:
        """Give a lease back; any thread may do that."""
        leases = session.leases
        with self._lock:
            if leases[thread] > 1:
                leases[thread] -= 1
            else:
                del leases[thread]
                if not leases:
                    self._changed.notify_all()

    def wait_idle(self, session: S, timeout: float | None) -> None:
        """Wait until nothing holds a lease on `session`. Raises LeaseTimeout."""
        with self._lock:
            self._wait_idle(session, timeout)

    def exchange(self, version: Version[S]) -> float:
        """Make `version` current at once; returns the seconds that a call could have been kept waiting."""
        with self._lock:
            start = time.perf_counter()
            self._current = version
            self._failure = None
            return time.perf_counter() - start

    @contextmanager
    def hold(self, session: S, timeout: float | None) -> Iterator[None]:
        """Hold new calls and wait for the leases on `session`; calls go on when the block ends. Raises LeaseTimeout."""
        with self._lock:
            while self._held:
                self._changed.wait()
            self._held = True
            try:
                self._wait_idle(session, timeout)
            except BaseException:
                self._let_go()
                raise
        try:
            yield
        finally:
            with self._lock:
                self._let_go()

    def fail(self, reason: str) -> None:
        """Refuse every call until the next `exchange`."""
        with self._lock:
            self._failure = reason

    def _let_go(self) -> None:
        self._held = False
        self._changed.notify_all()

    def _wait_idle(self, session: S, timeout: float | None) -> None:
        thread = get_ident()
        deadline = None if timeout is None else time.monotonic() + timeout
        while holders := session.leases:
            if thread in holders:
                raise LeaseTimeout(
                    "this thread itself has pinned the weights that would be overwritten; leave the `with model.pin()` "
                    "block first"
                )
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                count = sum(holders.values())
                raise LeaseTimeout(
                    f"{count} call(s) or pin(s) still hold the weights that would be overwritten, after {timeout} s. "
                    "Release them, or give a longer timeout."
                )
            self._changed.wait(left)
