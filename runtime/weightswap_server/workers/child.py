"""One child of the manager: started, listened to, and started again where it has died, or hangs."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from weightswap_runtime.errors import WeightswapError
from weightswap_runtime.shared.control import Control
from weightswap_server.admin.journal import JournalState
from weightswap_server.errors import log
from weightswap_server.service.processes import Process
from weightswap_server.serving import ModelSource

from .child_main import ChildTask, Word
from .totals import Totals

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 10.0  # seconds before a child that has ended is started again
_HEALTHY = 30.0  # seconds after which it does not count that it has failed before
_LINE = 1 << 26  # bytes of metrics
_LAST = 5.0  # seconds beyond the grace, after which a child is killed
_LOOKS = 10  # in the time after which a child that is silent is killed


class ChildFailed(WeightswapError):
    """A keeper or a worker could not begin."""


class Child:
    """One of the processes, and those that replace it."""

    def __init__(
        self,
        task: ChildTask,
        totals: Totals,
        processes: Callable[[], list[Process]],
        timeout: float,
        pass_on: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        """processes: of all. timeout: seconds of silence after which it is killed; 0: it never is. pass_on: takes what
        is for the keeper.
        """
        self._name, self._task, self._totals, self._timeout = task.name, task, totals, timeout
        self._processes, self._pass_on = processes, pass_on
        self._writer: asyncio.StreamWriter | None = None
        self.said = self._begun(0)  # by itself at last; the pid is 0 before the first one
        self._spoken: bool | None = None  # since the last look; None until it is ready
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._failure = ""
        self._ending = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None

    async def begin(self) -> str:
        """Start it, and wait until it is ready; what it has said then. Raises ChildFailed."""
        self._tending = asyncio.create_task(self._tend())
        either: set[asyncio.Future[Any]] = {self._tending, self._ready}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await self._tending
        return self._ready.result()

    async def _tend(self) -> None:
        """Start it, and start it again when it has died. Raises ChildFailed where it has never been ready."""
        pause = _FIRST_PAUSE
        while not self._ending.is_set():
            began = time.monotonic()
            code = await self._live()
            if self._ending.is_set():
                return
            if not self._ready.done():
                raise ChildFailed(self._failure or f"{self._name} has ended with {code} before it was ready")
            why = f": {self._failure}" if self._failure else ""
            log.warning("%s has ended with %d%s; another one begins", self._name, code, why)
            pause = _FIRST_PAUSE if time.monotonic() - began > _HEALTHY else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    def _begun(self, pid: int) -> Process:
        now = time.time()
        return Process(role=self._task.role, name=self._name, pid=pid, since=now, heard=now, ready=False)

    async def _live(self) -> int:
        """One process, from its start to its end; its exit code."""
        ours, theirs = socket.socketpair()
        shared = [each for segment in self._task.segments.values() for each in segment.descriptors]
        passed = [theirs.fileno(), *shared, *([self._task.listener] if self._task.listener >= 0 else [])]
        command = [sys.executable, "-P", "-m", "weightswap_server.workers.child_main", str(theirs.fileno())]
        self._failure, self._spoken = "", None
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                *command, pass_fds=passed, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        self.said = self._begun(process.pid)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE)
        writer.write(msgspec.json.encode(self._task) + b"\n")
        self._writer = writer
        hearing = asyncio.create_task(self._hear(process.pid, reader, writer))
        looking = asyncio.create_task(self._look_after(process))
        try:
            return await process.wait()
        finally:
            await asyncio.wait([hearing], timeout=1)  # its last words
            hearing.cancel()
            looking.cancel()
            self._writer = None
            writer.close()
            self._totals.end(process.pid)
            self._let_go()

    async def _look_after(self, process: asyncio.subprocess.Process) -> None:
        """Kill it once it has been silent for too long.

        Looks are counted, and no seconds: what keeps this process from looking keeps others from speaking, too.
        """
        silent = 0
        while self._timeout:
            await asyncio.sleep(self._timeout / _LOOKS)
            silent = silent + 1 if self._spoken is False else 0
            if self._spoken:
                self._spoken = False
            if silent >= _LOOKS and process.returncode is None and not self._ending.is_set():
                self._failure = f"it hung: it had said nothing for {self._timeout:g} s, and was killed"
                process.kill()
                return

    def _let_go(self) -> None:
        """What a dead worker held, it does not hold any more."""
        if self._task.role == "worker":
            for segment in self._task.segments.values():
                Control(segment.control).empty_slot(self._task.slot)

    async def _hear(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while raw := await reader.readline():
                word = msgspec.json.decode(raw, type=Word)
                if word.kind == "failed":
                    self._failure = word.text
                elif word.kind == "ready":
                    self._spoken = True
                    self._tell_ready(word.text)
                elif word.kind == "alive":
                    self._spoken = True
                    self.said = msgspec.structs.replace(
                        msgspec.json.decode(word.text, type=Process), since=self.said.since, heard=time.time()
                    )
                elif word.kind == "tried":
                    self._pass_on(raw)
                elif word.kind in ("sources", "journals"):
                    self._keep_for_next(word)
                elif word.kind == "processes":
                    found = msgspec.json.encode([each for each in self._processes() if each.pid]).decode()
                    writer.write(msgspec.json.encode(Word("processes", found)) + b"\n")
                else:
                    self._count(pid, word, writer)

    def _keep_for_next(self, word: Word) -> None:
        """What the process that replaces this one begins with."""
        if word.kind == "sources":
            sources = msgspec.json.decode(word.text, type=dict[str, ModelSource])
            self._task = msgspec.structs.replace(self._task, sources={**self._task.sources, **sources})
        else:
            journals = msgspec.json.decode(word.text, type=dict[str, JournalState])
            self._task = msgspec.structs.replace(self._task, journals={**self._task.journals, **journals})

    def _count(self, pid: int, word: Word, writer: asyncio.StreamWriter) -> None:
        self._totals.tell(pid, self._task.role, word.text)
        if word.kind == "total":
            writer.write(msgspec.json.encode(Word("total", self._totals.text())) + b"\n")

    def tell(self, raw: bytes) -> None:
        """Send it a word, unless it reads none."""
        if self._writer is not None and self._writer.transport.get_write_buffer_size() < _LINE:
            self._writer.write(raw)

    def _tell_ready(self, text: str) -> None:
        if not self._ready.done():
            self._ready.set_result(text)

    async def end(self, grace: float) -> None:
        """Ask it to stop, and kill it where it does not."""
        self._ending.set()
        if self._tending is None:
            return
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait([self._tending], timeout=grace + _LAST)
            if process.returncode is None:
                log.warning("%s has not ended in %g s, and is killed", self._name, grace + _LAST)
                process.kill()
        elif not self._tending.done():
            self._tending.cancel()  # between two processes
        await asyncio.wait([self._tending])
