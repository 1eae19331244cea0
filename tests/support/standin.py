"""Simulated accelerator that works as late, and in as odd an order, as streams allow.

Code that relies on the host's order instead of that of streams and events gets wrong bytes here.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from weightswap_runtime.memory.arena import Copy, Rows

Work = Callable[[], bool]  # False: not yet


class Broken(Exception):
    """Error that the device reports."""


class Mark:
    """Event that is done when its stream reaches it."""

    def __init__(self) -> None:
        self.done = False


class Memory:
    """Page-locked or device memory. `users` are the streams that it was lent to."""

    def __init__(self, nbytes: int, on_device: bool, users: set[int]) -> None:
        self.nbytes = nbytes
        self.content = bytearray(nbytes)
        self.on_device = on_device
        self.users = users

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.content))

    @property
    def view(self) -> memoryview:
        assert not self.on_device, "the host cannot see the device's memory"
        return memoryview(self.content)


class Queue:
    keys = count()

    def __init__(self) -> None:
        self.key = self.stream_id = next(self.keys)
        self.work: deque[Work] = deque()
        self.foreign = self.capturing = self.ended = False


class StandIn:
    """Device with the recording interface of the device tests: `copies` counts, `refused` names what fails."""

    def __init__(self, seed: int, capacity: int = 1 << 30, lockable: int = 1 << 30) -> None:
        self.name = "standin:0"
        self.staging, self.inspecting, self.commits, self.default = Queue(), Queue(), Queue(), Queue()
        self.capacity, self.lockable = capacity, lockable
        self.copies = 0
        self.for_calls = 0  # bytes reserved for calls
        self.broken = False
        self.inspection: Any = None  # makes inspectors of a buffer's blocks
        self.uploads = True  # it can do so
        self.uploaded: list[list[Copy]] = []
        self.slow: Queue | None = None  # this stream works only when no other can
        self._queues = [self.staging, self.inspecting, self.commits, self.default]
        self._here = threading.local()
        self._lock = threading.RLock()
        self._random = random.Random(seed)

    def stream(self) -> Queue:
        self._queues.append(Queue())
        return self._queues[-1]

    def allocate(self, nbytes: int) -> Memory:
        if nbytes > self.capacity:
            raise MemoryError(f"{nbytes} bytes")
        memory = Memory(nbytes, True, {self.staging.key})

        def work() -> bool:  # leftover work of a user that freed the memory without waiting
            memory.content[:] = self._random.randbytes(min(nbytes, 1000)) + memory.content[1000:]
            return True

        with self.on(self.staging):
            self.ask(work)
        return memory

    def lock(self, nbytes: int) -> Memory:
        if nbytes > self.lockable:
            raise MemoryError(f"{nbytes} bytes cannot be locked")
        return Memory(nbytes, False, set())

    def free_bytes(self) -> int:
        return self.capacity

    def needed_by_calls(self) -> int:
        return self.for_calls

    def is_foreign(self, stream: Queue) -> bool:
        return stream.foreign

    def is_capturing(self, stream: Queue) -> bool:
        return stream.capturing

    def is_capturing_here(self) -> bool:
        return self.current().capturing

    def inspector(self, buffer: Any, blocks: Any) -> Any:
        return self.inspection and self.inspection(buffer, blocks)

    def distrust_inspector(self, reason: str, lasting: bool) -> None:
        if lasting:
            self.inspection = None

    def copy(self, target: Any, at: int, source: Any, begin: int, nbytes: int) -> None:
        assert 0 <= at <= at + nbytes <= target.nbytes
        assert 0 <= begin <= begin + nbytes <= source.nbytes
        for memory in (target, source):
            lent = self.current().foreign or self.current_key() in memory.users
            assert not memory.on_device or lent, "memory of another stream"
        with self._lock:
            self.copies += 1

        def work() -> bool:
            target.content[at : at + nbytes] = source.content[begin : begin + nbytes]
            return True

        self.ask(work)

    def upload(
        self, target: Any, copies: Sequence[Copy], source: int | memoryview, through: Any, done: int
    ) -> int | None:
        """Upload as much as the buffer holds."""
        if not self.uploads:
            return None
        if not done:
            self.uploaded.append(list(copies))
        skipped = done
        for offset, begin, nbytes in copies:
            if skipped >= nbytes:
                skipped -= nbytes
                continue
            size, start = min(through.nbytes, nbytes - skipped), begin + skipped
            data = os.pread(source, size, start) if isinstance(source, int) else source[start : start + size]
            if len(data) < size:
                return None
            through.content[:size] = data
            self.copy(target, offset + skipped, through, 0, size)
            return done + size
        return done

    def scatter(self, target: Any, source: Any, rows: Rows) -> None:
        self._rows(target, source, source, rows)

    def gather(self, target: Any, source: Any, rows: Rows) -> None:
        self._rows(target, source, target, rows)

    def _rows(self, target: Any, source: Any, numbered: Any, rows: Rows) -> None:
        """Copy rows, one by one, whose numbers are in `numbered` by the time of the first copy."""
        for index in range(rows.total):

            def work(index: int = index) -> bool:
                at = rows.numbers + 8 * index
                number = int.from_bytes(numbered.content[at : at + 8], "little", signed=True)
                places = [rows.begin + index * rows.width, rows.base + number * rows.width]
                begin, to = places if numbered is source else reversed(places)
                assert 0 <= to <= to + rows.width <= target.nbytes
                target.content[to : to + rows.width] = source.content[begin : begin + rows.width]
                return True

            self.ask(work)

    def ask(self, work: Work) -> None:
        """Enqueue work on the current stream."""
        with self._lock:
            self.current().work.append(work)

    @contextmanager
    def on(self, stream: Queue) -> Iterator[None]:
        before = self.current()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def current(self) -> Queue:
        found: Queue = getattr(self._here, "stream", self.default)
        return found

    def current_key(self) -> int:
        return self.current().key

    def mark(self, stream: Queue) -> Mark:
        mark = Mark()

        def work() -> bool:
            mark.done = True
            return True

        assert not stream.ended, "a stream that was destroyed"
        assert not stream.capturing, "a mark in a stream that is captured becomes a part of the graph"
        with self._lock:
            stream.work.append(work)
        return mark

    def end(self, stream: Queue) -> None:
        """Release a foreign stream: its work is done, and nobody may use it any more."""
        assert stream.foreign
        stream.ended = True

    def finish(self, mark: Mark) -> None:
        self.run_until(lambda: mark.done)

    def wait(self, stream: Queue, mark: Mark) -> None:
        with self._lock:
            stream.work.append(lambda: mark.done)

    def borrow(self, tensor: object) -> None:
        """Return None: no tensor of torch is on this device."""

    def lend(self, buffer: Memory, stream: Queue) -> None:
        buffer.users.add(stream.key)

    def step(self) -> bool:
        """Do one piece of work that can be done now; False if there is none."""
        with self._lock:
            queues = [queue for queue in self._queues if queue.work]
            self._random.shuffle(queues)
            queues.sort(key=lambda queue: queue is self.slow)
            for queue in queues:
                if queue.work[0]():
                    queue.work.popleft()
                    return True
        return False

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let the device work until a condition holds, as for a host that waits."""
        if self.broken:
            raise Broken("an illegal memory access was encountered")
        while True:
            with self._lock:
                if done():
                    return
                assert self.step(), "the host waits for what never happens"

    def drain(self) -> None:
        while self.step():
            pass
        assert not any(queue.work for queue in self._queues), "streams wait for each other"
