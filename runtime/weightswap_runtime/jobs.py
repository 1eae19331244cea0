"""Work and who does it: claims of threads, what a fork leaves of them, callbacks, and jobs that can be cancelled."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from threading import RLock, local
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from .errors import ModelFailed, StageCancelled, Unsupported, is_number
from .threads import is_lost

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

    def leave(self) -> None:
        """Leave the claim to a thread that is about to begin. A child that is forked before then does not have it."""
        self.thread = object()

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


L = TypeVar("L")
T = TypeVar("T")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: L) -> L:
    """Return the lock; in a forked child it is free if a thread held it that the child does not have."""
    _locks.add(lock)
    return lock


class Renewable(Protocol):
    """An object with what a fork invalidates, such as another library's threads."""

    def _renew(self) -> None: ...


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Call `thing._renew()` in every child that is forked from now on, before anything else runs there."""
    _renewables.add(thing)


def _after_fork() -> None:
    global _process, _survivor
    _process, _survivor = os.getpid(), this_thread()
    for lock in list(_locks):
        # one of the surviving thread, which forked within a listener, is still held: the thread will release it
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):
            lock._at_fork_reinit()
    for thing in list(_renewables):
        thing._renew()


os.register_at_fork(after_in_child=_after_fork)


class Uninterrupted:
    """A block in which work is done as a whole, whatever interrupt arrives: an exception that a signal handler raises.

    Signal handlers run in the main thread alone, so there `run` lets another thread do the work. The interrupt is
    raised at the end of the block, when what the work has done is noted. The work itself may look for it with `check`,
    which first calls another such function.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._interrupt: BaseException | None = None

    def __enter__(self) -> Uninterrupted:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._interrupt is not None and self._interrupt is not error:
            raise self._interrupt

    def check(self) -> None:
        """Raise what ends a wait."""
        self._check()
        if self._interrupt is not None:
            raise self._interrupt

    def run(self, work: Callable[[], T]) -> T:
        """Do the work; when it has ended, return its result or raise its error."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        once = _Once(work)
        ended = False
        while not ended:
            try:  # twice, as another signal's interrupt may leave the handler of the first
                while not ended:
                    try:
                        ended = once.do_in_thread()
                    except BaseException as error:
                        self._interrupt = error
            except BaseException as error:
                self._interrupt = error
        if once.errors:
            raise once.errors.pop()
        return once.results.pop()


class _Once(Generic[T]):
    """Work that is done once, in a thread. Its parts are in C: an interrupt may leave a Thread or an Event broken."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._process = _process
        self._to_do = [work]  # for one thread: an interrupt may hide from its starter that it has started
        self.results: list[T] = []
        self.errors: list[BaseException] = []
        self._ended = threading.Lock()
        self._ended.acquire()

    def do_in_thread(self) -> bool:
        """Return True when a thread has done the work. After an interrupt, call it again."""
        while not (self.results or self.errors):
            if self._process != _process:
                self.errors.append(ModelFailed("the process was forked during a commit; load the model in the child"))
            elif self._to_do:
                try:
                    _thread.start_new_thread(self._do, ())
                except RuntimeError as error:
                    if not str(error).startswith("can't"):  # it is a signal handler's
                        raise
                    self._do()  # no thread can be started. If an interrupt divides it, the model says that it failed
            self._ended.acquire(timeout=POLL_SECONDS)
        return True

    def _do(self) -> None:
        try:
            work = self._to_do.pop()
        except IndexError:  # another thread has it
            return
        try:
            self.results.append(work())
        except BaseException as error:
            self.errors.append(error)
        self._ended.release()


P = ParamSpec("P")
Stop = Callable[[], None]


class Listeners(Generic[P]):
    """Callbacks, called in order, in the thread that calls `notify`."""

    def __init__(self, log: logging.Logger) -> None:
        self.all: tuple[Callable[P, object], ...] = ()
        self._log = log
        self._changing = fork_safe(RLock())  # reentrant, for signal handlers

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

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self.all:
            try:
                listener(*args, **kwargs)
            except Exception:
                self._log.exception("%r failed", listener)


LONGEST_BURST = 0.05  # seconds' worth of bytes that a rate-limited staging moves at once


class Progress(NamedTuple):
    """Progress of a staging. `phase`: waiting, opening, reading, copying, verifying, or its outcome. Sizes in bytes."""

    phase: str
    bytes_done: int
    bytes_total: int


def check_rate_limit(rate_limit: float | None) -> None:
    """Raise Unsupported for an invalid number of bytes per second."""
    if rate_limit is not None and not (is_number(rate_limit) and rate_limit > 0):
        raise Unsupported(f"rate_limit={rate_limit!r}: expected bytes per second, more than 0, or None")


class Job:
    """Shared state of the threads that work on one staging. `rate_limit` in bytes per second; None: unlimited.
    `yields`: whether they let calls go first.

    The threads do all their reading and copying in `steps`, and all other work in pieces of a few milliseconds.
    """

    def __init__(self, rate_limit: float | None = None, *, yields: bool = False) -> None:
        check_rate_limit(rate_limit)
        self.rate_limit = rate_limit
        # threads that yield, and begin anew for each piece of a limited staging, are often stopped while they have the
        # interpreter's lock, for which calls wait
        self.yields = yields and rate_limit is None
        self._lock = fork_safe(threading.Lock())
        self.cancelled = False
        self.abandoned = False  # set by a listener, in the staging's own thread
        self.progress = Progress("waiting", 0, 0)
        self._free_at = 0.0  # time.monotonic() at which the next piece may begin

    def unit(self, most: int) -> int:
        """Return how many bytes to move at once: `most`, or fewer if that is too large a burst for the rate limit."""
        return most if self.rate_limit is None else min(most, max(1, int(self.rate_limit * LONGEST_BURST)))

    def begin(self, phase: str, total: int | None = None) -> None:
        """Enter a phase; with `total`, count from 0 again. Raises StageCancelled."""
        self.check()
        with self._lock:
            _, done, before = self.progress
            self.progress = Progress(phase, done, before) if total is None else Progress(phase, 0, total)

    def end(self, phase: str) -> None:
        with self._lock:
            self.progress = self.progress._replace(phase=phase)

    def steps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of pieces of bytes `begin` to `end`, each once the rate allows it; then count it as done.

        Raises StageCancelled.
        """
        step = self.unit(max(1, end - begin))
        for start in range(begin, end, step):
            stop = min(start + step, end)
            self._wait_for_turn(stop - start)
            yield start, stop
            with self._lock:
                phase, done, total = self.progress
                self.progress = Progress(phase, done + stop - start, total)
        self.check()

    def _wait_for_turn(self, nbytes: int) -> None:
        self.check()
        if self.rate_limit is None:
            return
        with self._lock:
            # unused time is lost: a staging that was slow does not catch up in a burst
            turn = max(self._free_at, time.monotonic())
            self._free_at = turn + nbytes / self.rate_limit
        while (remaining := turn - time.monotonic()) > 0:
            time.sleep(min(remaining, POLL_SECONDS))
            self.check()

    def check(self) -> None:
        """Raise StageCancelled if the staging was cancelled, or the interpreter is ending without this thread."""
        if self.cancelled:
            raise StageCancelled("the staging was cancelled; nothing was changed")
        if is_lost():
            raise StageCancelled("the interpreter is shutting down")

    def cancel(self) -> None:
        self.cancelled = True
