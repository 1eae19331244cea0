"""A server of several processes: an owner that changes the weights, and workers that answer from the same memory.

The manager owns the port and the memory, and runs no model: what dies is a child, and is replaced.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import msgspec

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import Unsupported, WeightswapError, is_number
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import Segment
from weightswap_runtime.sources.location import is_url
from weightswap_server.admin.access import ENVIRONMENT, AdminSettings
from weightswap_server.admin.journal import JournalState
from weightswap_server.errors import log
from weightswap_server.http.handover import Dispatcher, Handover
from weightswap_server.http.listening import bind, listening
from weightswap_server.protocol import Process
from weightswap_server.serving import ModelSource, signals
from weightswap_server.settings import Settings

from .child_main import ChildTask, Message, Role, Totals

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 10.0  # seconds before a child that has ended is started again
_HEALTHY = 30.0  # seconds of life after which earlier failures do not count
_MOST_LINE = 1 << 26  # bytes; metrics are a line
_KILL_AFTER = 5.0  # seconds beyond the grace
_CHECKS = 10  # per timeout
_LONGEST_IMPORT = 60.0  # seconds for which a process that starts may be silent, whatever the timeout
_SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRETS?|PASS(?:WORD|WD|PHRASE)?|CREDENTIALS?|(?:ACCESS|ACCOUNT|API|PRIVATE|STORAGE)_?KEY"
    r"|CONNECTION_STRING|SAS)(?:_|$)",
    re.IGNORECASE,
)
_Segments = Mapping[str, Segment]
_WORKER_TIMEOUT, _LEAST_TIMEOUT = 30.0, 3.0  # seconds; children report each second


class Workers:
    """A server of an owner and several workers. A process that dies is replaced."""

    def __init__(
        self,
        sources: Mapping[str, ModelSource],
        settings: Settings,
        workers: int,
        admin: AdminSettings | None = None,
        require_signature: Sequence[str] = (),
        worker_timeout: float = _WORKER_TIMEOUT,
    ) -> None:
        """admin: of the owner's admin plane. require_signature: public keys. worker_timeout: seconds before a process
        that hangs is killed and replaced; 0: never.

        Raises Unsupported.
        """
        settings.check()
        if workers < 1:
            raise Unsupported(f"workers={workers}: expected 1 or more")
        if not (is_number(worker_timeout) and (worker_timeout == 0 or worker_timeout >= _LEAST_TIMEOUT)):
            raise Unsupported(f"worker_timeout={worker_timeout!r}: expected 0, or {_LEAST_TIMEOUT:g} seconds or more")
        for source in sources.values():
            source.check()
            check_shareable(source)
        self.settings, self.http_port, self.grpc_port = settings, 0, 0
        self.admin_where = ""
        self._sources, self._number, self._admin = sources, workers, admin
        self._keys, self._timeout = tuple(require_signature), worker_timeout
        self._listening_callbacks: list[Callable[[], object]] = []
        self._serving: asyncio.Task[None] | None = None

    def on_listening(self, tell: Callable[[], object]) -> None:
        """Call `tell()` once all workers accept requests."""
        self._listening_callbacks.append(tell)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Requests already accepted are finished.

        Raises OSError if a port is not available, ArtifactError, and ChildFailed if a process cannot start.
        """
        with ExitStack() as stack:
            listener = stack.enter_context(listening(self.settings.host, self.settings.http_port))
            self.http_port = listener.getsockname()[1]
            if self.settings.grpc_port is not None:
                self.grpc_port = _reserve(stack, self.settings.host, self.settings.grpc_port)
            manifests = {name: Artifact.open(source.artifact).manifest for name, source in self._sources.items()}
            segments = {name: Segment.create(manifest.weights, self._number) for name, manifest in manifests.items()}
            mapped = {name: segment.read_only() for name, segment in segments.items()}
            for segment in (*segments.values(), *mapped.values()):
                stack.callback(segment.close)
            asyncio.run(self._run(listener, segments, mapped))

    def stop(self) -> None:
        """End, once the workers have finished their accepted requests. In the event loop's thread."""
        if self._serving is not None:
            self._serving.cancel()

    async def _run(self, listener: socket.socket, segments: _Segments, mapped: _Segments) -> None:
        totals = Totals()
        tasks = [
            self._task("owner", segments),
            *(self._task("worker", mapped, slot) for slot in range(self._number)),
        ]

        def processes() -> list[Process]:
            return [child.status for child in (owner, *workers)]

        dispatcher = Dispatcher(listener)
        owner = Child(tasks[0], totals, processes, self._timeout)
        workers = [Child(task, totals, processes, self._timeout, owner.send, dispatcher) for task in tasks[1:]]
        self._serving = asyncio.create_task(self._serve(owner, workers))
        with signals(asyncio.get_running_loop(), self.stop):
            try:
                with suppress(asyncio.CancelledError):
                    await self._serving
            finally:
                dispatcher.close()
                listener.close()
                until = time.monotonic() + self.settings.grace
                await asyncio.gather(*(worker.end(self.settings.grace) for worker in workers))
                await owner.end(max(0.0, until - time.monotonic()))  # it may have to write what --keep keeps

    async def _serve(self, owner: Child, workers: list[Child]) -> None:
        """Start the owner, then the workers, which map the weights that it has loaded, and wait to be cancelled."""
        self.admin_where = await owner.begin()
        await asyncio.gather(*(worker.begin() for worker in workers))
        for callback in self._listening_callbacks:
            callback()
        await asyncio.get_running_loop().create_future()

    def _task(self, role: Role, segments: _Segments, slot: int = 0) -> ChildTask:
        shared = msgspec.structs.replace(self.settings, grpc_port=self.grpc_port or None)
        libraries = {name for source in self._sources.values() for name in source.options.get("op_libraries", ())}
        return ChildTask(
            role=role,
            name="owner" if role == "owner" else f"worker {slot}",
            sources={
                # all workers serve alike; what hash trees may take is for their owner
                name: msgspec.structs.replace(source, options={"max_hash_trees": source.options.get("max_hash_trees")})
                for name, source in self._sources.items()
            },
            segments=segments,
            settings=shared,
            admin=self._admin if role == "owner" else None,
            require_signature=self._keys,
            op_libraries=tuple(sorted(libraries)),
            slot=slot,
        )


class ChildFailed(WeightswapError):
    """An owner or a worker that could not start."""


def check_shareable(source: ModelSource) -> None:
    """Raise Unsupported for options and variants that workers cannot share."""
    required = {"engine": "torch", "device": HOST, "residency": "double"}
    for name, only in required.items():
        if (value := source.options.get(name, only)) != only:
            raise Unsupported(
                f"--workers with --{name} {value}: workers share weights on the CPU, with the engine 'torch', in "
                "double residency. Leave it out, or start several servers."
            )
    if source.variants:
        raise Unsupported(
            "--workers with --variant: each process would have its own. Leave --workers out, or start several servers, "
            "each with --variant."
        )


def _reserve(stack: ExitStack, host: str, port: int) -> int:
    """Reserve a port that workers, each with a socket of its own, may share, and return it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bind(reserved, host, port)
    return int(reserved.getsockname()[1])


class Child:
    """A child process, and the processes that replace it."""

    def __init__(
        self,
        task: ChildTask,
        totals: Totals,
        processes: Callable[[], list[Process]],
        timeout: float,
        pass_on: Callable[[bytes], object] = lambda _: None,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        """processes: returns those of all children. timeout: seconds of silence before a process is killed; 0: never.
        pass_on: takes messages for the owner. dispatcher: hands a worker its connections.
        """
        self._name, self._task, self._totals, self._timeout = task.name, task, totals, timeout
        self._processes, self._pass_on, self._dispatcher = processes, pass_on, dispatcher
        self._handover: Handover | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.status = self._starting(0)  # as last reported; pid 0: not started yet
        self._reported = False  # since the last check
        self._started = False
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._failure = ""
        self._ending = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    async def begin(self) -> str:
        """Start the process, and wait until it is ready. Returns the text of its message. Raises ChildFailed."""
        self._supervisor = asyncio.create_task(self._supervise())
        either: set[asyncio.Future[Any]] = {self._supervisor, self._ready}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await self._supervisor
        return self._ready.result()

    async def _supervise(self) -> None:
        """Start the process, again whenever it has died. Raises ChildFailed if it was never ready."""
        pause = _FIRST_PAUSE
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                ended = f"exited with {await self._run()}"
            except OSError as error:  # too many open files or processes: perhaps not for long
                ended = f"did not start ({error})"
            if self._ending.is_set():
                return
            if not self._ready.done():
                raise ChildFailed(self._failure or f"{self._name} {ended} before it was ready")
            why = f": {self._failure}" if self._failure else ""
            log.warning("%s %s%s; starting another", self._name, ended, why)
            pause = _FIRST_PAUSE if time.monotonic() - began > _HEALTHY else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    def _starting(self, pid: int) -> Process:
        now = time.time()
        return Process(role=self._task.role, name=self._name, pid=pid, since=now, heard=now, ready=False)

    async def _run(self) -> int:
        """Run one process to its end, and return its exit code."""
        self._failure, self._started = "", False
        with self._dispatcher.handover() if self._dispatcher is not None else nullcontext() as self._handover:
            process, ours = await self._start()
            self.status = self._starting(process.pid)
            reader, writer = await asyncio.open_connection(sock=ours, limit=_MOST_LINE)
            writer.write(msgspec.json.encode(self._task) + b"\n")
            self._writer = writer
            receiving = asyncio.create_task(self._receive(process.pid, reader, writer))
            watching = asyncio.create_task(self._kill_if_silent(process))
            try:
                return await process.wait()
            finally:
                await asyncio.wait([receiving], timeout=1)  # for its last messages
                receiving.cancel()
                watching.cancel()
                self._writer = None
                writer.close()
                self._totals.end(process.pid)
                self._empty_slots()

    async def _start(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start a process, and return it and the socket of its messages."""
        ours, theirs = socket.socketpair()
        passed = [descriptor for segment in self._task.segments.values() for descriptor in segment.descriptors]
        if self._handover is not None:
            self._task = msgspec.structs.replace(self._task, handover=self._handover.descriptors)
            passed += self._handover.descriptors
        command = [sys.executable, "-P", "-m", "weightswap_server.workers.child_main", str(theirs.fileno())]
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=[theirs.fileno(), *passed],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment(self._task),
                )
            except OSError:
                ours.close()
                raise
        return self._process, ours

    async def _kill_if_silent(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process once it has been silent for the timeout, or longer while it starts.

        Checks are counted, not seconds: a load that delays this process delays the child's messages, too.
        """
        silent = 0
        while self._timeout:
            await asyncio.sleep(self._timeout / _CHECKS)
            silent = 0 if self._reported else silent + 1
            self._reported = False
            limit = self._timeout if self._started else max(self._timeout, _LONGEST_IMPORT)
            is_over = silent * self._timeout >= limit * _CHECKS
            if is_over and process.returncode is None and not self._ending.is_set():
                self._failure = f"it hung: it had sent nothing for {limit:g} s, and was killed"
                process.kill()
                return

    def _empty_slots(self) -> None:
        """Give up the leases that a dead worker held."""
        if self._task.role == "worker":
            for segment in self._task.segments.values():
                Control(segment.control).empty_slot(self._task.slot)

    async def _receive(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while raw := await reader.readline():
                message = from_json(raw, Message)
                if message.kind == "failed":
                    self._failure = message.text
                elif message.kind == "ready":
                    self._set_ready(message.text)
                elif message.kind == "alive":
                    self._set_alive()
                    now = time.time()
                    since = min(self.status.since, now)  # a clock that is set back does not make it unheard
                    self.status = msgspec.structs.replace(from_json(message.text, Process), since=since, heard=now)
                elif message.kind == "tried":
                    self._pass_on(raw)
                elif message.kind in ("sources", "journals"):
                    self._keep_for_next(message)
                elif message.kind == "processes":
                    running = msgspec.json.encode([process for process in self._processes() if process.pid]).decode()
                    writer.write(msgspec.json.encode(Message("processes", running)) + b"\n")
                else:
                    self._count(pid, message, writer)

    def _keep_for_next(self, message: Message) -> None:
        """Keep the sources or journals of this process for the one that replaces it."""
        if message.kind == "sources":
            sources = from_json(message.text, dict[str, ModelSource])
            self._task = msgspec.structs.replace(self._task, sources={**self._task.sources, **sources})
        else:
            journals = from_json(message.text, dict[str, JournalState])
            self._task = msgspec.structs.replace(self._task, journals={**self._task.journals, **journals})

    def _count(self, pid: int, message: Message, writer: asyncio.StreamWriter) -> None:
        self._totals.update(pid, self._task.role, message.text)
        if message.kind == "total":
            writer.write(msgspec.json.encode(Message("total", self._totals.text())) + b"\n")

    def send(self, raw: bytes) -> None:
        """Send an encoded message to the process, unless it does not read."""
        if self._writer is not None and self._writer.transport.get_write_buffer_size() < _MOST_LINE:
            self._writer.write(raw)

    def _set_ready(self, text: str) -> None:
        self._started = True
        self._set_alive()
        if not self._ready.done():
            self._ready.set_result(text)

    def _set_alive(self) -> None:
        self._reported = True
        if self._handover is not None and self._started:
            self._handover.ready = True

    async def end(self, grace: float) -> None:
        """Stop the process with SIGTERM, and kill it if it does not end within the grace."""
        self._ending.set()
        if self._supervisor is None:
            return
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait([self._supervisor], timeout=grace + _KILL_AFTER)
            if process.returncode is None:
                log.warning("%s did not end within %g s; killing it", self._name, grace + _KILL_AFTER)
                process.kill()
        elif not self._supervisor.done():
            self._supervisor.cancel()  # it waits to start the next process
        await asyncio.wait([self._supervisor])


def environment(task: ChildTask) -> dict[str, str]:
    """Return the environment of a process, without secrets that it does not need.

    The owner reads weights from wherever they are, and has the admin plane. A worker reads the artifact alone.
    """
    reads_urls = task.role == "owner" or any(is_url(source.artifact) for source in task.sources.values())
    return {
        name: value
        for name, value in os.environ.items()
        if (reads_urls or not _SECRET.search(name)) and (name != ENVIRONMENT or task.admin is not None)
    }
