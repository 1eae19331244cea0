"""The few threads that read, hash and copy. All of that work releases the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
MOST_THREADS = 8


class Workers:
    """A pool of threads, one for each processor that this process may use, at most eight."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._start()

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="weightswap")
        self._process = os.getpid()

    def run_all(self, function: Callable[[T], None], items: Iterable[T]) -> None:
        """Call `function` on every item. Returns, or raises the first error, only when no call is running any more."""
        work = list(items)
        if len(work) == 1:  # a wake-up would cost more than it brings
            function(work[0])
            return
        if self._process != os.getpid():  # a forked child has the pool, but not its threads
            self._start()
        futures: list[Future[None]] = []
        try:
            futures += [self._pool.submit(function, item) for item in work]
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        finally:
            wait(futures)

    def close(self) -> None:
        self._pool.shutdown()
