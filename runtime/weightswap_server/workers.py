"""Several processes that serve one copy of the weights: a keeper, workers, and this one, which starts and replaces them.

The manager owns what outlives any of them: the shared memory, and the socket on which workers accept. It loads no model.
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

import msgspec

from weightswap_runtime.errors import Unsupported, WeightswapError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.opening import HOST
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.segment import Segment

from .child import Task, Word
from .errors import log
from .serving import Source, listening, signals
from .settings import Settings
from .totals import Totals

_LONGEST_PAUSE = 10.0  # seconds before a child that fails at once is started again
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
                f"--workers with --{name} {found}: workers share weights on the CPU, with the engine 'torch', in double "
                "residency. Leave it out, or start several servers."
            )


class Workers:
    """A keeper and so many workers, until they are told to stop. Whoever dies is replaced."""

    def __init__(self, sources: Mapping[str, Source], settings: Settings, workers: int) -> None:
        """Raises Unsupported and ArtifactError."""
        settings.check()
        if workers < 1:
            raise Unsupported(f"workers={workers}: expected 1 or more")
        for source in sources.values():
            check_shareable(source)
        self.settings, self.http_port, self.grpc_port = settings, 0, 0
        self._sources, self._number = sources, workers
        self._told: list[Callable[[], object]] = []
        self._totals = Totals()
        self._children: list[_Child] = []
        self._stopping = False

    def on_listening(self, tell: Callable[[], object]) -> None:
        """Call `tell()` once all workers accept requests."""
        self._told.append(tell)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or `stop()`. What was accepted is finished first.

        Raises OSError where a port cannot be had, and ChildFailed where a process cannot begin.
        """
        with ExitStack() as stack:
            listener = stack.enter_context(listening(self.settings.host, self.settings.http_port))
            self.http_port = listener.getsockname()[1]
            if self.settings.grpc_port is not None:
                self.grpc_port = _reserve(stack, self.settings.host, self.settings.grpc_port)
            segments = {
                name: Segment.create(Artifact.open(source.artifact).manifest.weights, self._number)
                for name, source in self._sources.items()
            }
            mapped = {name: segment.read_only() for name, segment in segments.items()}
            for segment in (*segments.values(), *mapped.values()):
                stack.callback(segment.close)
            asyncio.run(self._run(listener, segments, mapped))

    def stop(self) -> None:
        """Let workers finish what they have accepted, and end. In the loop's thread."""
        self._stopping = True
        for child in self._children:
            child.changed.set()

    async def _run(self, listener: socket.socket, segments: _Segments, mapped: _Segments) -> None:
        with signals(asyncio.get_running_loop(), self.stop):
            keeper = _Child("the keeper", self._task("keeper", segments, 0, -1), self._totals)
            workers = [
                _Child(f"worker {slot}", self._task("worker", mapped, slot, listener.fileno()), self._totals)
                for slot in range(self._number)
            ]
            controls = [Control(segment.control) for segment in segments.values()]
            try:
                await self._begin([keeper], controls)
                await self._begin(workers, controls)
                for tell in self._told if not self._stopping else ():
                    tell()
                await asyncio.gather(*(child.tending for child in self._children if child.tending))
            finally:
                self.stop()
                listener.close()
                await asyncio.gather(*(child.end(self.settings.grace) for child in workers))
                await keeper.end(_LAST)

    async def _begin(self, children: list[_Child], controls: list[Control]) -> None:
        """Start children, and wait until all are ready. Raises ChildFailed."""
        for child in children:
            self._children.append(child)
            child.tending = asyncio.create_task(child.tend(controls, lambda: self._stopping))
        for child in children:
            await asyncio.wait([child.tending_now, child.ready], return_when=asyncio.FIRST_COMPLETED)
            if child.tending_now.done():
                await child.tending_now

    def _task(self, role: str, segments: _Segments, slot: int, listener: int) -> Task:
        grpc_port = self.grpc_port if self.settings.grpc_port is not None else None
        settings = msgspec.structs.replace(self.settings, grpc_port=grpc_port)
        libraries = next((source.options.get("op_libraries", ()) for source in self._sources.values()), ())
        return Task(
            role=role,  # type: ignore[arg-type]
            sources={name: msgspec.structs.replace(each, options={}) for name, each in self._sources.items()},
            segments=segments,
            settings=settings,
            op_libraries=tuple(libraries),
            slot=slot,
            listener=listener,
        )


_Segments = Mapping[str, Segment]


class _Child:
    """One of the processes, and those that have taken its place."""

    def __init__(self, name: str, task: Task, totals: Totals) -> None:
        self.name = name
        self.changed = asyncio.Event()  # it may have to stop
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tending: asyncio.Task[None] | None = None
        self._task, self._totals = task, totals
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""

    @property
    def tending_now(self) -> asyncio.Task[None]:
        assert self.tending is not None
        return self.tending

    async def tend(self, controls: list[Control], stopping: Callable[[], bool]) -> None:
        """Start it, and start it again when it has died. Raises ChildFailed where it has never been ready."""
        pause = 0.1
        while not stopping():
            began = time.monotonic()
            code = await self._live(controls)
            if stopping():
                return
            if not self.ready.done():
                raise ChildFailed(self._failure or f"{self.name} has ended with {code} before it was ready")
            pause = 0.1 if time.monotonic() - began > _HEALTHY else min(2 * pause, _LONGEST_PAUSE)
            log.warning("%s has ended with %d%s; another one begins", self.name, code, self._failure and f": {self._failure}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), pause)

    async def _live(self, controls: list[Control]) -> int:
        """One process, from its start to its end; its exit code."""
        ours, theirs = socket.socketpair()
        shared = [each for segment in self._task.segments.values() for each in segment.descriptors]
        passed = [theirs.fileno(), *shared, *([self._task.listener] if self._task.listener >= 0 else [])]
        command = [sys.executable, "-P", "-m", "weightswap_server.child", str(theirs.fileno())]
        with theirs:
            self._process = process = subprocess.Popen(
                command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._failure = ""
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE)
        writer.write(msgspec.json.encode(self._task) + b"\n")
        listening = asyncio.create_task(self._listen(process.pid, reader, writer))
        try:
            await _ended(process.pid)
            return process.wait()
        finally:
            with suppress(OSError):
                await asyncio.wait([listening], timeout=1)
            listening.cancel()
            writer.close()
            self._totals.end(process.pid)
            if self._task.role == "worker":
                for control in controls:
                    control.empty_slot(self._task.slot)

    async def _listen(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while raw := await reader.readline():
                word = msgspec.json.decode(raw, type=Word)
                if word.kind == "ready" and not self.ready.done():
                    self.ready.set_result(None)
                elif word.kind == "failed":
                    self._failure = word.text
                elif word.kind in ("metrics", "total"):
                    self._totals.tell(pid, self._task.role, word.text)
                    if word.kind == "total":
                        writer.write(msgspec.json.encode(Word("total", self._totals.text())) + b"\n")

    async def end(self, grace: float) -> None:
        """Ask it to stop, and kill it where it does not."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(_ended(process.pid), grace + _LAST)
        except TimeoutError:
            log.warning("%s has not ended in %g s, and is killed", self.name, grace + _LAST)
            process.kill()
        if self.tending is not None:
            await asyncio.wait([self.tending])


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
