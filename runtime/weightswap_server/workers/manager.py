"""Several processes that serve one copy of the weights: a keeper, workers, and this one, which replaces them.

The manager owns what outlives any of them: the shared memory, and the socket on which workers accept. It has no model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from weightswap_runtime.errors import Unsupported, WeightswapError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.segment import Segment
from weightswap_server.admin.settings import AdminSettings
from weightswap_server.errors import log
from weightswap_server.http.listening import listening
from weightswap_server.serving import Source, signals
from weightswap_server.settings import Settings

from .child import Task, Word
from .totals import Role, Totals

_Segments = Mapping[str, Segment]
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 10.0  # seconds before a child that has ended is started again
_HEALTHY = 30.0  # seconds after which it does not count that it has failed before
_LINE = 1 << 26  # bytes of metrics
_LAST = 5.0  # seconds beyond the grace, after which a child is killed


class ChildFailed(WeightswapError):
    """A keeper or a worker could not begin."""


def check_shareable(source: Source) -> None:
    """Raise Unsupported for what workers cannot share."""
    wanted = {"engine": "torch", "device": HOST, "residency": "double"}
    for name, only in wanted.items():
        if (found := source.options.get(name, only)) != only:
            raise Unsupported(
                f"--workers with --{name} {found}: workers share weights on the CPU, with the engine 'torch', in "
                "double residency. Leave it out, or start several servers."
            )


class Workers:
    """A keeper and so many workers, until they are told to stop. Whoever dies is replaced."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        settings: Settings,
        workers: int,
        admin: AdminSettings | None = None,
        require_signature: str | None = None,
    ) -> None:
        """admin: for operators, whom the keeper serves. require_signature: a public key. Raises Unsupported."""
        settings.check()
        if workers < 1:
            raise Unsupported(f"workers={workers}: expected 1 or more")
        for source in sources.values():
            source.check()
            check_shareable(source)
        self.settings, self.http_port, self.grpc_port = settings, 0, 0
        self.admin_where = ""
        self._sources, self._number, self._admin = sources, workers, admin
        self._key = require_signature
        self._told: list[Callable[[], object]] = []
        self._serving: asyncio.Task[None] | None = None

    def on_listening(self, tell: Callable[[], object]) -> None:
        """Call `tell()` once all workers accept requests."""
        self._told.append(tell)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. What was accepted is finished first.

        Raises OSError where a port cannot be had, ArtifactError, and ChildFailed where a process cannot begin.
        """
        with ExitStack() as stack:
            listener = stack.enter_context(listening(self.settings.host, self.settings.http_port))
            self.http_port = listener.getsockname()[1]
            if self.settings.grpc_port is not None:
                self.grpc_port = _reserve(stack, self.settings.host, self.settings.grpc_port)
            artifacts = {name: Artifact.open(source.artifact) for name, source in self._sources.items()}
            segments = {name: Segment.create(each.manifest.weights, self._number) for name, each in artifacts.items()}
            mapped = {name: segment.read_only() for name, segment in segments.items()}
            for segment in (*segments.values(), *mapped.values()):
                stack.callback(segment.close)
            asyncio.run(self._run(listener, segments, mapped))

    def stop(self) -> None:
        """Let workers finish what they have accepted, and end. In the loop's thread."""
        if self._serving is not None:
            self._serving.cancel()

    async def _run(self, listener: socket.socket, segments: _Segments, mapped: _Segments) -> None:
        totals = Totals()
        keeper = _Child("the keeper", self._task("keeper", segments), totals)
        workers = [
            _Child(f"worker {slot}", self._task("worker", mapped, slot, listener.fileno()), totals)
            for slot in range(self._number)
        ]
        self._serving = asyncio.create_task(self._serve(keeper, workers))
        with signals(asyncio.get_running_loop(), self.stop):
            try:
                with suppress(asyncio.CancelledError):
                    await self._serving
            finally:
                listener.close()
                await asyncio.gather(*(worker.end(self.settings.grace) for worker in workers))
                await keeper.end(0.0)

    async def _serve(self, keeper: _Child, workers: list[_Child]) -> None:
        """The keeper first: workers begin with what it has put in."""
        self.admin_where = await keeper.begin()
        await asyncio.gather(*(worker.begin() for worker in workers))
        for tell in self._told:
            tell()
        await asyncio.get_running_loop().create_future()  # until it is cancelled

    def _task(self, role: Role, segments: _Segments, slot: int = 0, listener: int = -1) -> Task:
        shared = msgspec.structs.replace(self.settings, grpc_port=self.grpc_port or None)
        libraries = {each for source in self._sources.values() for each in source.options.get("op_libraries", ())}
        return Task(
            role=role,
            sources={name: msgspec.structs.replace(each, options={}) for name, each in self._sources.items()},
            segments=segments,
            settings=shared,
            admin=self._admin if role == "keeper" else None,
            require_signature=self._key,
            op_libraries=tuple(sorted(libraries)),
            slot=slot,
            listener=listener,
        )


class _Child:
    """One of the processes, and those that take its place."""

    def __init__(self, name: str, task: Task, totals: Totals) -> None:
        self._name, self._task, self._totals = name, task, totals
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        self._ending = False
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
        while not self._asked_to_end():
            began = time.monotonic()
            code = await self._live()
            if self._asked_to_end():
                return
            if not self._ready.done():
                raise ChildFailed(self._failure or f"{self._name} has ended with {code} before it was ready")
            why = f": {self._failure}" if self._failure else ""
            log.warning("%s has ended with %d%s; another one begins", self._name, code, why)
            pause = _FIRST_PAUSE if time.monotonic() - began > _HEALTHY else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    def _asked_to_end(self) -> bool:
        return self._ending  # which changes while one waits

    async def _live(self) -> int:
        """One process, from its start to its end; its exit code."""
        ours, theirs = socket.socketpair()
        shared = [each for segment in self._task.segments.values() for each in segment.descriptors]
        passed = [theirs.fileno(), *shared, *([self._task.listener] if self._task.listener >= 0 else [])]
        command = [sys.executable, "-P", "-m", "weightswap_server.workers.child", str(theirs.fileno())]
        self._failure = ""
        with theirs:
            self._process = process = subprocess.Popen(
                command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE)
        writer.write(msgspec.json.encode(self._task) + b"\n")
        hearing = asyncio.create_task(self._hear(process.pid, reader, writer))
        try:
            await _ended(process.pid)
            return process.wait()
        finally:
            await asyncio.wait([hearing], timeout=1)  # its last words
            hearing.cancel()
            writer.close()
            self._totals.end(process.pid)
            self._let_go()

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
                    self._tell_ready(word.text)
                else:
                    self._totals.tell(pid, self._task.role, word.text)
                if word.kind == "total":
                    writer.write(msgspec.json.encode(Word("total", self._totals.text())) + b"\n")

    def _tell_ready(self, text: str) -> None:
        if not self._ready.done():
            self._ready.set_result(text)

    async def end(self, grace: float) -> None:
        """Ask it to stop, and kill it where it does not."""
        self._ending = True
        if self._tending is None:
            return
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait([self._tending], timeout=grace + _LAST)
            if process.poll() is None:
                log.warning("%s has not ended in %g s, and is killed", self._name, grace + _LAST)
                process.kill()
        elif not self._tending.done():
            self._tending.cancel()  # between two processes
        await asyncio.wait([self._tending])


async def _ended(pid: int) -> None:
    """Wait for the end of a child, which nobody has waited for."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _reserve(stack: ExitStack, host: str, port: int) -> int:
    """A port that workers may share, and that nobody else takes; they accept each on a socket of their own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, port))
    return int(reserved.getsockname()[1])
