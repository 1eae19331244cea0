"""The manager of several processes that serve one copy of the weights: a keeper and workers, replaced if they die.

The manager owns the shared memory and the socket on which workers accept, which outlive both. It has no model.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

import msgspec

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.options import is_number
from weightswap_runtime.shared.segment import Segment
from weightswap_server.admin.settings import AdminSettings
from weightswap_server.http.listening import accept_no_more, bind, listening
from weightswap_server.service.processes import Process
from weightswap_server.serving import ModelSource, signals
from weightswap_server.settings import Settings

from .child import Child
from .child_main import ChildTask
from .totals import Role, Totals

_Segments = Mapping[str, Segment]
_WORKER_TIMEOUT, _LEAST_TIMEOUT = 30.0, 3.0  # seconds; children report each second


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


class Workers:
    """A server of a keeper and several workers. A process that dies is replaced."""

    def __init__(
        self,
        sources: Mapping[str, ModelSource],
        settings: Settings,
        workers: int,
        admin: AdminSettings | None = None,
        require_signature: Sequence[str] = (),
        worker_timeout: float = _WORKER_TIMEOUT,
    ) -> None:
        """admin: of the keeper's admin plane. require_signature: public keys. worker_timeout: seconds before a process
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
            self._task("keeper", segments),
            *(self._task("worker", mapped, slot, listener.fileno()) for slot in range(self._number)),
        ]

        def processes() -> list[Process]:
            return [child.status for child in (keeper, *workers)]

        keeper = Child(tasks[0], totals, processes, self._timeout)
        workers = [Child(task, totals, processes, self._timeout, keeper.send) for task in tasks[1:]]
        self._serving = asyncio.create_task(self._serve(keeper, workers))
        with signals(asyncio.get_running_loop(), self.stop):
            try:
                with suppress(asyncio.CancelledError):
                    await self._serving
            finally:
                await accept_no_more(listener)  # while workers still accept those in the queue
                listener.close()
                await asyncio.gather(*(worker.end(self.settings.grace) for worker in workers))
                await keeper.end(0.0)

    async def _serve(self, keeper: Child, workers: list[Child]) -> None:
        """Start the keeper, then the workers, which map the weights that it has loaded, and wait to be cancelled."""
        self.admin_where = await keeper.begin()
        await asyncio.gather(*(worker.begin() for worker in workers))
        for callback in self._listening_callbacks:
            callback()
        await asyncio.get_running_loop().create_future()

    def _task(self, role: Role, segments: _Segments, slot: int = 0, listener: int = -1) -> ChildTask:
        shared = msgspec.structs.replace(self.settings, grpc_port=self.grpc_port or None)
        libraries = {name for source in self._sources.values() for name in source.options.get("op_libraries", ())}
        return ChildTask(
            role=role,
            name="keeper" if role == "keeper" else f"worker {slot}",
            sources={name: msgspec.structs.replace(source, options={}) for name, source in self._sources.items()},
            segments=segments,
            settings=shared,
            admin=self._admin if role == "keeper" else None,
            require_signature=self._keys,
            op_libraries=tuple(sorted(libraries)),
            slot=slot,
            listener=listener,
        )


def _reserve(stack: ExitStack, host: str, port: int) -> int:
    """Reserve a port that workers, each with a socket of its own, may share, and return it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bind(reserved, host, port)
    return int(reserved.getsockname()[1])
