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


class Turns:
    """The numbers of open connections of all processes: a word of 8 bytes for each, written atomically."""

    def __init__(self, descriptor: int, slot: int = 0) -> None:
        """descriptor: of shared memory, a word for each process. slot: that of this one."""
        self._words = memoryview(mmap.mmap(descriptor, 0)).cast("Q")  # pid and number; 0: does not accept
        self._slot = slot

    def publish(self, connections: int) -> None:
        """Say how many connections this process has."""
        self._words[self._slot] = os.getpid() << 32 | connections

    def leave(self, slot: int | None = None) -> None:
        """Let nobody wait for a process, by default this one, that no longer accepts, or has ended."""
        self._words[self._slot if slot is None else slot] = 0

    def first(self) -> dict[int, int]:
        """Return the words, by slot, of those that have fewer connections than this process."""
        own = self._words[self._slot] & 0xFFFFFFFF
        return {slot: word for slot, word in enumerate(self._words) if word and word & 0xFFFFFFFF < own}


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
        self._loop = asyncio.get_running_loop()
        self._closed, self._woken = False, asyncio.Event()
        self._vain: dict[int, int] = {}  # those that did not accept in time, and have not accepted since
        listener.setblocking(False)
        self._pending = select.poll()
        self._pending.register(listener, select.POLLIN)
        self.count()
        self._task = self._loop.create_task(self._run())

    def count(self) -> None:
        """Tell the others how many connections are open now."""
        if not self._closed:
            self._turns.publish(self._connections())

    def close(self) -> None:
        """Accept no more."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._turns.leave()
        self._woken.set()

    async def wait_closed(self) -> None:
        await self._task

    async def _run(self) -> None:
        while not self._closed:
            self._woken.clear()
            self._loop.add_reader(self._listener, self._wake)
            await self._woken.wait()
            await self._let_others()
            await self._accept()

    def _wake(self) -> None:
        self._loop.remove_reader(self._listener)
        self._woken.set()

    async def _let_others(self) -> None:
        """Wait while others are first, but not twice in vain for the same."""
        deadline = self._loop.time() + _PATIENCE
        while (first := self._turns.first()) and not first.items() <= self._vain.items():
            if self._closed or not self._pending.poll(0):
                return
            if self._loop.time() > deadline:
                self._vain = first
            await asyncio.sleep(_POLL)

    async def _accept(self) -> None:
        if self._closed:
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another was faster, or the client has gone
        except OSError as error:
            log.error("cannot accept a connection (%s); trying again in %g s", error, _PAUSE)
            await asyncio.sleep(_PAUSE)
            return
        connection.setblocking(False)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._new_protocol, connection)
        except OSError:  # the client has gone
            connection.close()
