"""The thread pool that reads, hashes and copies. All of that work releases the interpreter's lock."""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_THREADS = 16
_NOTHING = object()


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, whose locals may hold a set of weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class WorkerThreads:
    """A pool with one thread per processor that this process may use, at most sixteen, including the caller's."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._start()

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="weightswap")
        self._process = os.getpid()

    def run_all(self, function: Callable[[T], None], items: Iterable[T]) -> None:
        """Call `function` on every item. Return, or raise the first error, only when no call is running any more."""
        batch = _Batch(function, items)
        if self._process != os.getpid():  # a forked child has the pool but not its threads
            self._start()
        try:
            with suppress(RuntimeError):  # no thread can be started: the caller does all the work
                for _ in range(min(self.threads, len(batch)) - 1):
                    self._pool.submit(batch.help)
            batch.work()
        finally:
            batch.close()
        error, batch.error = batch.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # a reference cycle through this frame would keep the memory of the error's frames


class _Batch(Generic[T]):
    """Items that several threads work on. After `close()` no thread does."""

    def __init__(self, function: Callable[[T], None], items: Iterable[T]) -> None:
        self._function = function
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
        item: object = None
        try:
            while self.error is None and (item := self._next()) is not _NOTHING:
                self._function(item)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = self.error or error
        finally:
            item = None  # the error keeps this frame

    def _next(self) -> object:
        try:
            return self._items.popleft()
        except IndexError:
            return _NOTHING

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
        del self._function
        if interrupt is not None:
            self.error = self.error or interrupt
