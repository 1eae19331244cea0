"""Connections of a server with several workers: its manager accepts them, and hands each to the worker with the fewest.

If the workers accepted by themselves, the quickest would get most of the connections that come together, and clients
that keep theirs would leave the other workers idle.

A connection travels as a descriptor over a socket of Unix (SCM_RIGHTS). How many a worker has taken, and how many of
these are closed, are two words in memory that it alone writes. What a worker does not take, since it hangs or has
ended, the manager reads from the same socket, and hands to another: each connection is taken once.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from weightswap_server.errors import log

_TAKEN, _CLOSED = 0, 1  # the words
_MOST_UNTAKEN = 32  # connections on their way to one worker; of all workers, below what a process may have open
_PATIENCE = 0.2  # seconds in which a worker takes some of its connections, else others get them
_POLL = 0.002  # seconds until another look at workers that take none
_PAUSE = 1.0  # seconds until another try, if the system has no descriptor left
_AT_ONCE = 32  # connections that are accepted or taken before the loop does anything else


class Dispatcher:
    """The manager's part: accepts connections, in an event loop, while it has workers that take them."""

    def __init__(self, listener: socket.socket) -> None:
        self._loop, self._listener = asyncio.get_running_loop(), listener
        self._workers: list[Handover] = []
        self._returned: deque[socket.socket] = deque()  # accepted, and not taken by the worker that they went to
        listener.setblocking(False)
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(listener, self._dispatch)
        self._next_check = self._loop.call_later(_PATIENCE, self._check)

    @contextmanager
    def handover(self) -> Iterator[Handover]:
        """Open a handover to a worker's process; the block is as long as the process."""
        handover = Handover()
        self._workers.append(handover)
        try:
            yield handover
        finally:
            self._workers.remove(handover)
            self._take_back(handover)
            handover.close()

    def close(self) -> None:
        """Accept no more. What no worker takes soon is closed."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        for timer in (self._pause, self._next_check):
            if timer is not None:
                timer.cancel()
        self._close_returned()
        self._loop.call_later(_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        for worker in self._workers:
            self._take_back(worker)

    def _close_returned(self) -> None:
        while self._returned:
            self._returned.popleft().close()

    def _dispatch(self) -> None:
        """Hand over what has been taken back, and what has come."""
        for _ in range(_AT_ONCE):
            if (worker := self._first()) is None:
                self._wait(_POLL)
                return
            connection = self._returned.popleft() if self._returned else self._accept()
            if connection is None:
                return
            self._workers.remove(worker)
            self._workers.append(worker)
            if worker.hand(connection):
                connection.close()
            else:
                self._returned.append(connection)
        if self._returned and self._pause is None:  # the listener tells of new connections alone
            self._wait(0)

    def _accept(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            log.error("cannot accept a connection (%s); trying again in %g s", error, _PAUSE)
            self._wait(_PAUSE)
        return None

    def _first(self) -> Handover | None:
        """Return the worker with the fewest connections; of several, the one that has waited for the longest."""
        return min((worker for worker in self._workers if worker.takes), key=lambda worker: worker.open, default=None)

    def _check(self) -> None:
        """Take back what workers have not taken since the check before, unless none would take it."""
        self._next_check = self._loop.call_later(_PATIENCE, self._check)
        for worker in [worker for worker in self._workers if worker.is_stuck()]:
            if any(other.takes for other in self._workers if other is not worker):
                worker.ready = False
                self._take_back(worker)

    def _take_back(self, worker: Handover) -> None:
        self._returned += worker.take_back()
        if self._closed:
            self._close_returned()
        elif self._returned and self._pause is None:
            self._wait(0)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._dispatch)
        self._dispatch()


class Handover:
    """The manager's end of a handover to one process of a worker."""

    def __init__(self) -> None:
        self.ready = False  # set whenever the worker says that its loop runs
        self._handed = self._returned = 0
        self._before = (0, 0)
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._channel, self._theirs):
            end.setblocking(False)
        self._memory = os.memfd_create("weightswap-connections")
        os.ftruncate(self._memory, mmap.PAGESIZE)
        self._words = _words(self._memory)

    @property
    def descriptors(self) -> tuple[int, int]:
        """The socket and the memory, for `Handed`."""
        return self._theirs.fileno(), self._memory

    def close(self) -> None:
        self._channel.close()
        self._theirs.close()
        os.close(self._memory)

    @property
    def open(self) -> int:
        """The number of connections that are the worker's."""
        return self._handed - self._returned - self._words[_CLOSED]

    @property
    def untaken(self) -> int:
        """The number of connections that are on their way."""
        return self._handed - self._returned - self._words[_TAKEN]

    @property
    def takes(self) -> bool:
        """Whether the worker can be handed a connection."""
        return self.ready and self.untaken < _MOST_UNTAKEN

    def is_stuck(self) -> bool:
        """Return whether connections were on their way at the last call of this, too, and none was taken since."""
        taken, untaken = self._words[_TAKEN], self.untaken
        before, self._before = self._before, (taken, untaken)
        return before[0] == taken and min(before[1], untaken) > 0

    def hand(self, connection: socket.socket) -> bool:
        """Hand a connection over. False: the worker takes no more, as it ends."""
        try:
            socket.send_fds(self._channel, [b"\0"], [connection.fileno()])
        except OSError:
            self.ready = False
            return False
        self._handed += 1
        return True

    def take_back(self) -> list[socket.socket]:
        """Return the connections that the worker has not taken."""
        connections = []
        with suppress(BlockingIOError, EOFError):
            while True:
                connections.append(_receive(self._theirs))
                self._returned += 1
        return [connection for connection in connections if connection is not None]


class Handed:
    """A worker's end: a server, as asyncio has them, of the connections that the manager hands over."""

    def __init__(self, channel: int, memory: int) -> None:
        self._channel, self._words = socket.socket(fileno=channel), _words(memory)
        os.close(memory)
        self._channel.setblocking(False)
        self._opening: set[asyncio.Task[None]] = set()
        self._ends = False

    def serve(self, new_protocol: Callable[[], Any]) -> None:
        """Begin to take connections. new_protocol: returns one of uvicorn's, which calls `count_closed` at its end."""
        self._loop, self._new_protocol = asyncio.get_running_loop(), new_protocol
        self._loop.add_reader(self._channel, self._take)

    def count_closed(self) -> None:
        """Count a connection that is closed."""
        self._words[_CLOSED] += 1

    def close(self) -> None:
        """Take no more. What is on its way is for other workers."""
        self._ends = True
        self._loop.remove_reader(self._channel)
        self._channel.shutdown(socket.SHUT_RD)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening)

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                os.close(os.dup(self._channel.fileno()))  # without a free descriptor, the kernel would close what comes
                connection = _receive(self._channel)
            except BlockingIOError:
                return
            except OSError as error:
                log.error("cannot take a connection (%s); trying again in %g s", error, _PAUSE)
                self._loop.remove_reader(self._channel)
                self._loop.call_later(_PAUSE, self._resume)
                return
            except EOFError:  # the manager has ended
                self._loop.remove_reader(self._channel)
                return
            self._words[_TAKEN] += 1
            if connection is None:
                self.count_closed()
                continue
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _resume(self) -> None:
        if not self._ends:
            self._loop.add_reader(self._channel, self._take)

    async def _open(self, connection: socket.socket) -> None:
        protocol = self._new_protocol()
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has gone
            connection.close()
            self.count_closed()
        else:
            if self._ends:
                protocol.shutdown()


def _receive(channel: socket.socket) -> socket.socket | None:
    """Return a connection that is on its way, or None if this process may open no more, and the kernel has closed it.

    Raises BlockingIOError if there is none, and EOFError if none can come.
    """
    message, descriptors, *_ = socket.recv_fds(channel, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not message:
        raise EOFError
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _words(memory: int) -> memoryview:
    return memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("Q")
