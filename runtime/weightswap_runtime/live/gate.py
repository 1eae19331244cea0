"""The gate between calls and commits: a call leases the current version, a commit replaces it. And the turns of swaps.

A *version* is one set of weights in one session under one generation. In double residency a commit exchanges the
reference. In single residency it holds new calls, waits for the leases, and releases the calls after the copy.

An interrupt at any instruction leaves the old weights or the new ones, and no lease that does not end. So a commit in
place runs where none arrives (`jobs.Uninterrupted`), and leases and stagings are objects that exist before they take
effect and count only while they are referenced: what an interrupted frame has left behind ends with the frame.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Condition, Event, RLock

from weightswap_runtime.errors import ModelClosed, ModelFailed, NoWeights, StagingBusy, WaitTimeout, plural
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.jobs import POLL_SECONDS, Claim, ClaimReference, Job, fork_safe, renew_in_children, this_thread
from weightswap_runtime.sources.byte_source import Check

from .session import Session

PATIENCE = 1.0  # seconds for which new calls are held while a commit waits for a pin


class Pin(Claim):
    """A lease for several calls, of unknown length: a commit waits for an old one without holding new calls.

    `what`: its name in messages of timeouts.
    """

    __slots__ = ("_since",)
    what = "pin"

    def __init__(self) -> None:
        super().__init__()
        self._since = time.monotonic()

    @property
    def is_old(self) -> bool:
        return time.monotonic() - self._since > PATIENCE


@dataclass(frozen=True, eq=False)
class Version:
    """One generation of the model. `session` holds its weights, until they are overwritten."""

    session: Session
    generation: int
    identity: Identity

    @property
    def weights_id(self) -> str:
        return self.identity.weights_id

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.identity.labels)


class Gate:
    """A gate that grants leases on the current version. It holds its lock for a few hundred nanoseconds at a time."""

    def __init__(self) -> None:
        self._lock = fork_safe(RLock())  # reentrant: a signal handler may call the model while this thread holds it
        self._changed = Condition(self._lock)
        self._current: Version | None = None
        self._held_since: float | None = None  # time.perf_counter() from which on a commit holds new calls
        self._failure: str | None = None
        self._closed = False
        renew_in_children(self)

    def _renew(self) -> None:
        if self._held_since is not None:  # its thread is lost, and its copy as well
            self._held_since, self._failure = None, "the process was forked meanwhile"

    @property
    def current(self) -> Version | None:
        return self._current

    @property
    def is_held(self) -> bool:
        """Whether a commit holds new calls now."""
        return self._held_since is not None

    @property
    def failure(self) -> str | None:
        """The reason why calls are refused: the arena does not hold one set of weights. None if they are not."""
        return self._failure

    def acquire(self, lease: Claim) -> Version:
        """Lease the current version; return the lease with `release`.

        While a commit holds the calls, a thread that already has a lease may pass, to avoid a deadlock with the commit.
        Raises NoWeights, ModelFailed and ModelClosed.
        """
        with self._lock:
            while self._held_since is not None and not self._leased_by(lease.thread):
                self._changed.wait(POLL_SECONDS)
            if self._failure is not None:
                raise ModelFailed(f"an in-place commit failed ({self._failure}); swap or roll back to serve again")
            version = self._current
            if version is None:
                if self._closed:
                    raise ModelClosed
                raise NoWeights("the model was loaded without weights; call model.swap(path) first")
            version.session.leases[id(lease)] = weakref.ref(lease)
        return version

    def acquire_session(self, session: Session, lease: Claim) -> None:
        """Take one more lease on a session that the caller knows cannot be overwritten now."""
        with self._lock:
            session.leases[id(lease)] = weakref.ref(lease)

    def acquire_within(self, pin: Claim, session: Session, lease: Claim) -> bool:
        """Take one more lease on a session that a pin holds. Return False if the pin has ended."""
        with self._lock:
            if pin.holds:
                session.leases[id(lease)] = weakref.ref(lease)
            return pin.holds

    def release(self, session: Session, lease: Claim) -> None:
        """Return a lease, from any thread. A second call does nothing."""
        lease.end()
        with self._lock:
            if session.leases.pop(id(lease), None) and not session.leases:
                self._changed.notify_all()

    def leases(self, session: Session) -> int:
        """Return how many calls and pins hold `session` now."""
        with self._lock:
            return len(_held_leases(session))

    def wait_idle(self, session: Session, timeout: float | None, check: Callable[[], None] = lambda: None) -> None:
        """Wait until `session` is not leased. Raises WaitTimeout, and what `check` raises meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            _check_not_mine(session)
            while _is_leased(session, deadline):
                self._changed.wait(POLL_SECONDS)
                check()
                self._check_open()

    def exchange(self, version: Version) -> float:
        """Make `version` current at once; return the seconds for which this could have blocked a call.

        Raises ModelClosed, as do `hold` and `wait_idle`.
        """
        with self._lock:
            start = time.perf_counter()
            self._check_open()
            self._current = version
            self._failure = None
            return time.perf_counter() - start

    def check_not_pinned_here(self) -> None:
        """Raise WaitTimeout if this thread has a lease on the current version: a commit in place would wait for it."""
        if (current := self._current) is not None:
            with self._lock:
                _check_not_mine(current.session)

    @contextmanager
    def hold(
        self, session: Session, timeout: float | None, check: Callable[[], None] = lambda: None
    ) -> Iterator[float]:
        """Hold new calls and wait for the leases on `session`; yield the time.perf_counter() since when. Calls go on
        when the block ends.

        While a pin is old, calls are not held: a pin that is never released must not stop the service. Raises
        WaitTimeout, and what `check` raises meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            # while `_hold_idle` waits, it lets the lock go, so that another commit may hold the calls, too
            while self._held_since is not None or (since := self._hold_idle(session, deadline, check)) is None:
                self._changed.wait(POLL_SECONDS)
                check()
                self._check_open()
        try:
            yield since
        finally:
            with self._lock:
                self._let_go()

    def _hold_idle(self, session: Session, deadline: float | None, check: Callable[[], None]) -> float | None:
        """Hold new calls until `session` is idle; return since when. None, with no hold, if a pin is or becomes old."""
        self._held_since = since = time.perf_counter()
        is_idle = False
        try:
            self._check_open()
            while _is_leased(session, deadline):
                if any(isinstance(lease, Pin) and lease.is_old for lease in _held_leases(session)):
                    return None
                self._changed.wait(POLL_SECONDS)
                check()
                self._check_open()
            is_idle = True
        finally:
            if not is_idle:
                self._let_go()
        return since

    def _let_go(self) -> None:
        self._held_since = None
        self._changed.notify_all()

    def close(self) -> None:
        """Refuse every call from now on, and drop the current version. Leases that were granted stay valid."""
        with self._lock:
            self._closed = True
            self._current = self._failure = None
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed

    def fail(self, reason: str) -> None:
        """Refuse every call until the next `exchange`."""
        with self._lock:
            self._failure = reason

    def _leased_by(self, thread: object) -> bool:
        return self._current is not None and any(
            lease.thread is thread for lease in _held_leases(self._current.session)
        )


def _check_not_mine(session: Session) -> None:
    """Raise WaitTimeout if this thread has a lease, which would not end while it waits."""
    if any(lease.thread is this_thread() for lease in _held_leases(session)):
        raise WaitTimeout(
            "this thread itself has pinned the weights that would be overwritten; first leave the `with model.pin()` "
            'block, or close the context with on_swap="pin"'
        )


def _is_leased(session: Session, deadline: float | None) -> bool:
    """Return whether a session is leased. Raises WaitTimeout if it is and `deadline` has passed."""
    leases = _held_leases(session)
    if leases and deadline is not None and time.monotonic() >= deadline:
        held = Counter(lease.what if isinstance(lease, Pin) else "call" for lease in leases)
        holders = " and ".join(plural(number, what) for what, number in held.items())
        raise WaitTimeout(
            f"the weights that would be overwritten were still held by {holders} when the timeout expired. "
            "Release them, or give a longer timeout."
        )
    return bool(leases)


def _held_leases(session: Session) -> list[Claim]:
    """Return the leases that are held, and remove those that ended or were dropped without a release."""
    leases = []
    for key, reference in list(session.leases.items()):
        lease = reference()
        if lease is not None and lease.holds:
            leases.append(lease)
        elif session.leases.get(key) is reference:  # not another lease, which has the id of the dropped one by now
            del session.leases[key]
    return leases


class Turns:
    """The claim that keeps other stagings out until it ends, and the queue of whole swaps."""

    def __init__(self) -> None:
        self._renew()
        renew_in_children(self)
        self._claim_lock = fork_safe(RLock())  # reentrant, for signal handlers
        self._staging: ClaimReference | None = None

    def _renew(self) -> None:
        # Of the thread whose turn it is. Listeners run meanwhile: where one forks, and does not return in the child,
        # other threads there get another lock, as nobody will release this one.
        self._swap_lock = RLock()
        self._line: list[Event] = []  # places of those who wait in `wait_for_turn`, as they came

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Wait for the swaps of other threads, then hold the queue. Raises StagingBusy within a swap of this thread."""
        if self._swap_lock._is_owned():  # type: ignore[attr-defined]
            raise StagingBusy(
                "a listener runs before its swap has ended, so it cannot swap itself: let another thread do it "
                "after the listener has returned"
            )
        with self._swap_lock:
            yield

    @contextmanager
    def wait_for_turn(self, check: Check) -> Iterator[None]:
        """Wait as in `queue`, and call `check` meanwhile. For threads in which no signal handler runs.

        Those who wait in this way get their turns as they came, so that of several weights the last ones stay.
        """
        lock = self._swap_lock
        with nullcontext() if lock._is_owned() else self._in_line(check):  # type: ignore[attr-defined]
            while not lock.acquire(timeout=POLL_SECONDS):
                check()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _in_line(self, check: Check) -> Iterator[None]:
        """Wait until all who came before have left the line: among those who ask a lock now and then, anybody is next.

        The place in the line is held within the block.
        """
        line, place = self._line, Event()
        line.append(place)
        try:
            while line[0] is not place:
                place.wait(POLL_SECONDS)
                check()
            yield
        finally:
            line.remove(place)
            for first in line[:1]:
                first.set()

    @contextmanager
    def claimed(self) -> Iterator[Claim]:
        """Keep others from staging and committing within the block. Raises StagingBusy."""
        ticket = Claim()
        try:
            self.claim(ticket, None, None)
            yield ticket
        finally:
            ticket.end()

    def claim(self, ticket: Claim, wait: float | None, job: Job | None) -> None:
        """Keep others from staging until `ticket` ends.

        wait: seconds to wait for an open staging; None: do not wait. Raises StagingBusy, and StageCancelled.
        """
        deadline = time.monotonic() + (wait or 0.0)
        while not self._try_claim(ticket):
            if job is not None:
                job.check()
            if time.monotonic() >= deadline:
                raise StagingBusy(
                    "another staging of this model is open; commit or discard it first"
                    + (f" (waited {wait} s)" if wait else ', or pass busy="wait"')
                )
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _try_claim(self, ticket: Claim) -> bool:
        with self._claim_lock:
            other = self._staging() if self._staging else None
            if other is not None and other is not ticket and other.holds:
                return False
            self._staging = weakref.ref(ticket)
            return True
