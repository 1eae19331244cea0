"""A listening socket that several processes share: a connection is for one of those that have the fewest.

The kernel wakes all processes for a new connection, and the quickest would accept all that have come by then. So each
writes into shared memory how many it has, and lets those with fewer accept first.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import select
import socket
from collections.abc import Callable

from weightswap_server.errors import log

_POLL = 0.001  # seconds between two looks at the others
_PATIENCE = 0.5  # seconds for others to accept; one that hangs never does
_PAUSE = 1.0  # seconds until another try, if the system has no descriptor left
_NUMBER = 0xFFFFFFFF  # the part of a word


class Turns:
    """The numbers of open connections of all processes: a word of 8 bytes for each, written atomically."""

    def __init__(self, descriptor: int, slot: int = 0, processes: int | None = None) -> None:
        """descriptor: of shared memory of `turns_size` bytes. slot: that of this process. processes: how many there
        are, for the one that creates the memory; None: read it."""
        words = memoryview(mmap.mmap(descriptor, 0)).cast("Q")
        if processes is not None:
            words[0] = processes
        self._words = words[1 : 1 + words[0]]  # pid and number; 0: does not accept
        self._slot = slot

    def publish(self, connections: int) -> None:
        """Say how many connections this process has."""
        self._words[self._slot] = os.getpid() << 32 | connections

    def leave(self, slot: int | None = None) -> None:
        """Let nobody wait for a process, by default this one, that no longer accepts, or has ended."""
        self._words[self._slot if slot is None else slot] = 0

    def first(self) -> dict[int, int]:
        """Return the words, by slot, of those that have fewer connections than this process."""
        words = self._words.tolist()
        own = words[self._slot] & _NUMBER
        return {slot: word for slot, word in enumerate(words) if word and word & _NUMBER < own}


def turns_size(processes: int) -> int:
    """Return the bytes of the memory of `Turns`."""
    return 8 * (1 + processes)


class TakingTurns:
    """A server, as asyncio has them, that accepts connections when it is this process's turn."""

    def __init__(
        self,
        listener: socket.socket,
        turns: Turns,
        new_protocol: Callable[[], asyncio.Protocol],
        connections: Callable[[], int],
    ) -> None:
        """connections: returns how many are open."""
        self._listener, self._turns = listener, turns
        self._new_protocol, self._connections = new_protocol, connections
        self._loop, self._closed = asyncio.get_running_loop(), False
        self._opening: set[asyncio.Task[None]] = set()  # accepted, and not open yet
        self._waiting_since: float | None = None
        self._vain: dict[int, int] = {}  # those that did not accept in time, and have not accepted since
        listener.setblocking(False)
        self._pending = select.poll()
        self._pending.register(listener, select.POLLIN)
        self.count()
        self._loop.add_reader(listener, self._accept)

    def count(self) -> None:
        """Tell the others how many connections there are now."""
        if not self._closed:
            self._turns.publish(self._connections() + len(self._opening))

    def close(self) -> None:
        """Accept no more."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._turns.leave()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening)

    def _accept(self) -> None:
        """Accept one connection, or let others; the loop calls it again as long as connections wait."""
        if self._must_wait():
            self._pause(_POLL)
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another was faster, or the client has gone
        except OSError as error:
            log.error("cannot accept a connection (%s); trying again in %g s", error, _PAUSE)
            self._pause(_PAUSE)
            return
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opened)
        self.count()

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._new_protocol, connection)
        except OSError:  # the client has gone
            connection.close()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        self.count()

    def _must_wait(self) -> bool:
        """Return whether others are first; not for long, and not twice in vain for the same."""
        first = self._turns.first()
        if first.items() <= self._vain.items():
            self._waiting_since = None
            return False
        now = self._loop.time()
        if self._waiting_since is None:
            self._waiting_since = now
        if now > self._waiting_since + _PATIENCE:
            self._vain, self._waiting_since = first, None
            return False
        return True

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        if self._closed:
            return
        if not self._pending.poll(0):  # another has accepted it
            self._waiting_since = None
        self._loop.add_reader(self._listener, self._accept)
