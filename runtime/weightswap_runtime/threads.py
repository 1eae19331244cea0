"""Threads that never outlive their purpose: a pool's, background threads, and those that a task awaits.

Whoever gives up, by an error, an interrupt or a cancellation, returns only when no thread touches his memory any more.
"""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from threading import Condition
from typing import Any, Generic, Protocol, Self, TypeVar

from .errors import join_seconds

T = TypeVar("T")
MOST_THREADS = 16  # of a pool: so many processors a GPU's link needs at most
FEW = 4  # processors: from so many on a quarter is left to calls, as threads that copy fill the processors' caches, too
NICENESS = 10  # steps by which threads that yield are nicer: beside a busy one each has a tenth of a processor
PATIENCE = 5.0  # seconds to wait at the end of the interpreter for work that cannot be interrupted


class WorkerThreads:
    """A pool with threads for most of the processors that this process may use, including the caller's."""

    def __init__(self, threads: int | None = None, *, yields: bool = False) -> None:
        """threads: None: three for every four processors, and one for each if there are fewer; at most sixteen.
        yields: whether others go first where processors are busy, such as threads that call a model; the caller waits.
        Nothing for which others wait should be done so."""
        self.threads = threads or min(MOST_THREADS, _suiting(len(os.sched_getaffinity(0))))
        self.yields = yields
        self._start()

    def _start(self) -> None:
        size, prepare = (self.threads, _yield_to_others) if self.yields else (max(1, self.threads - 1), None)
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="weightswap", initializer=prepare)
        self._process = os.getpid()
        _pools.add(self._pool)

    def run_all(
        self, function: Callable[[T], None], items: Iterable[T], stop: Callable[[], None] = lambda: None
    ) -> None:
        """Call `function` on every item. Return, or raise the first error, only when no call is running any more.

        stop: called after an error, to end the calls that are running.
        """
        batch = _Batch(function, items, stop)
        if self._process != os.getpid():  # a forked child has the pool but not its threads
            self._start()
        waits = self.yields and len(batch) > 1  # one is sooner done than handed over
        helping: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # no thread can be started
                helpers = min(self.threads, len(batch)) - (not waits)
                helping.extend(self._pool.submit(batch.help) for _ in range(helpers))
            if waits:
                wait(helping, return_when=FIRST_COMPLETED)
            batch.work()  # what is left, and all if nobody helps
        except BaseException as interrupt:
            batch.fail(interrupt)
        finally:
            batch.close()
        error, batch.error = batch.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # a reference cycle through this frame would keep the memory of the error's frames


def _yield_to_others() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _suiting(processors: int) -> int:
    return processors if processors < FEW else processors * 3 // 4


class _Batch(Generic[T]):
    """Items that several threads work on. After `close()` no thread does."""

    def __init__(self, function: Callable[[T], None], items: Iterable[T], stop: Callable[[], None]) -> None:
        self._function, self._stop = function, stop
        self._items = deque(items)
        self._running = 0
        self._closed = False
        self._changed = Condition()
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def help(self) -> None:
        """Work on the batch in one of the pool's threads. They are counted; no signal handler ever runs in them."""
        with self._changed:
            if self._closed:
                return
            self._running += 1
        self.work()
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def work(self) -> None:
        """Call the function on items until none are left. An error ends the batch and is kept."""
        item: T | None = None
        try:
            while self.error is None:
                try:
                    item = self._items.popleft()
                except IndexError:  # other threads have taken the last ones
                    break
                self._function(item)
        except BaseException as error:
            self.fail(error)
        finally:
            item = None  # the error keeps this frame

    def fail(self, error: BaseException) -> None:
        """Let no more items be begun. The first error is kept."""
        self.error = self.error or error
        self._stop()

    def close(self) -> None:
        """Let no more threads join, and wait for those at work. An interrupt does not end the wait."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    while self._running:
                        self._changed.wait()
                break
            except BaseException as error:
                interrupt = error
        self._items.clear()  # another thread's error keeps its frames, and so this batch
        del self._function, self._stop
        if interrupt is not None:
            self.error = self.error or interrupt


class Background(threading.Thread):
    """A daemon thread. At the end of the interpreter `stop` is called and the thread joined, with a timeout."""

    def __init__(self, run: Callable[[], None], name: str, stop: Callable[[], None]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.stop = stop
        _known.add(self)


class UntilStopped:
    """What a thread of its own does until `stop()`, which leaving the `with` block calls.

    Dropping this object does not stop the thread. The end of the interpreter does; a forked child does not have it.
    """

    _thread: Background
    _where: str  # in its `repr`

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> bool:
        """Stop the thread. Wait for at most `timeout` seconds until it has ended, and return whether it has.

        In a callback of the thread it does not wait.
        """
        seconds = join_seconds(timeout)
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self.alive

    def _end(self) -> None:
        """Let the thread end soon."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._where!r}, {'alive' if self.alive else 'stopped'})"


def stop_at_end(work: Work) -> None:
    """Register a daemon thread's work to be stopped, and awaited for a while, at the end of the interpreter.

    (A daemon thread that is in C++ code when the interpreter ends may abort the process.) Other threads are ignored.
    """
    if threading.current_thread().daemon:
        _known.add(work)


def is_lost() -> bool:
    """Return whether the interpreter is ending and does not wait for the calling thread."""
    return _ending and threading.current_thread().daemon


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
_pools: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()
_ending = False


def _end() -> None:
    global _ending  # noqa: PLW0603
    _ending = True
    works = [work for work in list(_known) if work.is_alive()]
    for work in works:
        work.stop()
    deadline = time.monotonic() + PATIENCE
    for work in works:
        work.join(max(0.0, deadline - time.monotonic()))
    for pool in list(_pools):
        pool.shutdown(wait=False)  # also ends a thread of which the pool does not know, as its start was interrupted


# functions of atexit run only after threads were joined
threading._register_atexit(_end)  # type: ignore[attr-defined]


async def in_thread(
    function: Callable[[], T], stop: Callable[[], None] = lambda: None, drop: Callable[[T], object] | None = None
) -> T:
    """Run a function in a thread of its own and await its result.

    If the task is cancelled, call `stop`, which lets the function end soon, and wait for its end, even if the task is
    cancelled once more. Then `drop`, in a thread, gets the result, if there is one all the same.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    def start() -> None:
        try:
            Background(run, "weightswap-async", stop).start()
        except BaseException as error:
            outcome.set_exception(error)

    result = asyncio.wrap_future(outcome)
    # not in the loop: Thread.start() waits until the thread runs, for milliseconds on a busy machine
    _thread.start_new_thread(start, ())
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        stop()
        while not result.done():
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(result)
        if result.exception() is None and drop is not None:
            await in_thread(partial(drop, result.result()))
        raise


async def done_within(future: Future[Any], seconds: float) -> bool:
    """Await a future. Return whether it ended in time; if not, or if the task is cancelled, cancel it."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def on_end(_: object) -> None:
        if threading.get_ident() == thread:  # saves the system call that wakes the loop
            wake()
        elif not loop.is_closed():  # it is closed after a stop that did not wait for the future
            loop.call_soon_threadsafe(wake)

    timer = loop.call_later(seconds, wake)
    future.add_done_callback(on_end)
    try:
        await woken
    except asyncio.CancelledError:
        future.cancel()
        raise
    finally:
        timer.cancel()
    ended = future.done()
    if not ended:
        future.cancel()
    return ended


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, whose locals may hold a set of weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Run the block without garbage collections, each of which would traverse all of torch's objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
