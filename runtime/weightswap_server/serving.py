"""A server from its start to its end: models that are loaded and followed, sockets, signals."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any

import msgspec

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.live.loading import load
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.variants.resident import MOST
from weightswap_runtime.messages import visible

from .admin.plane import AdminPlane
from .admin.settings import AdminSettings
from .http.app import http_app
from .http.listening import HttpServer, listening, new_loop
from .protocol.variant_text import NAME
from .service.service import Service
from .settings import Settings

if TYPE_CHECKING:
    from .grpc.service import GrpcServer


class Variant(msgspec.Struct, frozen=True):
    """A variant that is there from the start."""

    group: str
    name: str
    path: str


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact, and where its weights come from: a weight file, a directory that is watched, the place of a desired
    state, or the first and then one of the others. `options` are more of `load`, such as the engine."""

    artifact: str
    weights: str | None = None
    watch: str | None = None
    follow: str | None = None
    interval: float = 5.0
    variants: Sequence[Variant] = ()
    options: Mapping[str, Any] = {}

    def open(self) -> Model:
        """Load it, and let it take what comes. Raises what `load`, `Model.add_variant`, `Model.watch` and
        `Model.follow` raise."""
        self.check()
        model = load(self.artifact, self.weights, **self.options)
        for variant in self.variants:
            model.add_variant(variant.group, variant.name, variant.path)
        self.take(model)
        return model

    def check(self) -> None:
        """Raise Unsupported for what excludes each other."""
        if self.watch is not None and self.follow is not None:
            raise Unsupported(
                "a model that follows a place takes nothing else: watch the directory in the process "
                "that promotes, with model.watch(promote=...)"
            )
        most = self.options.get("max_variants", MOST)
        for group, count in Counter(variant.group for variant in self.variants).items():
            if count > most:
                raise Unsupported(
                    f"{count} variants of {group}, and {most} may be resident: say --max-variants {count}"
                )

    def take(self, model: Model) -> None:
        """Let a model take what comes. Raises what `Model.watch` and `Model.follow` raise."""
        if self.watch is not None:
            model.watch(self.watch, self.interval)
        if self.follow is not None:
            model.follow(self.follow, self.interval)


class Server:
    """Serves models until it is told to stop."""

    def __init__(
        self,
        models: Mapping[str, Model],
        settings: Settings,
        admin: AdminSettings | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """models: by the names that requests call them by. The server closes them when it ends. admin: for operators.
        listener: on which other processes accept, too, and with whom the port of gRPC is shared.

        Raises Unsupported.
        """
        self.settings = settings
        self.service = Service(models, settings)
        self._http = HttpServer(http_app(self.service), settings, shared=listener is not None)
        self.admin = AdminPlane(self.service, admin) if admin is not None else None
        self._grpc: GrpcServer | None = None
        self._told: list[Callable[[], object]] = []
        self._listener = listener
        self.http_port = 0
        self.grpc_port = 0

    def run(self) -> None:
        """Serve until `stop()`, and in the main thread until SIGTERM or SIGINT. What was accepted is finished first.

        Raises OSError where a port cannot be had.
        """
        with (
            closing(self.service),
            self.admin.running() if self.admin is not None else nullcontext(),
            self._listener or listening(self.settings.host, self.settings.http_port) as listener,
        ):
            self.http_port = listener.getsockname()[1]
            try:
                self._listen_for_grpc()
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(self._serve(listener))
            finally:
                if self._grpc is not None:
                    self._grpc.close(self.settings.grace)

    def stop(self) -> None:
        """Stop accepting, finish what was accepted, and let `run()` return. From any thread, and from signals."""
        self.service.stopping = True
        self._http.should_exit = True
        if self._grpc is not None:
            self._grpc.stop(self.settings.grace)

    def _listen_for_grpc(self) -> None:
        if self.settings.grpc_port is not None:
            from .grpc.service import GrpcServer

            self._grpc = GrpcServer(self.service, shared=self._listener is not None)
            self.grpc_port = self._grpc.port

    def on_listening(self, tell: Callable[[], object]) -> None:
        """Call `tell()` once requests are accepted and the ports are known."""
        self._told.append(tell)

    @contextmanager
    def running(self) -> Iterator[Server]:
        """A block in which it serves in a thread of its own."""
        listening: Future[None] = Future()
        self.on_listening(lambda: listening.set_result(None))

        def serve() -> None:
            try:
                self.run()
            except BaseException as error:
                if listening.done():
                    raise
                listening.set_exception(error)

        thread = Thread(target=serve, name="weightswap-server")
        thread.start()
        try:
            listening.result()
            yield self
        finally:
            self.stop()
            thread.join()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with signals(loop, self.stop):
            for tell in self._told:
                tell()
            await self._http.serve(sockets=[listener])


@contextmanager
def signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> Iterator[None]:
    """A block in which SIGTERM and SIGINT stop the server, where this is the main thread."""
    numbers = (signal.SIGTERM, signal.SIGINT) if current_thread() is main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def variants_of(options: Iterable[str]) -> tuple[Variant, ...]:
    """Variants as `--variant` names them: GROUP=PATH, called like the file or folder, or GROUP/NAME=PATH.

    Raises Unsupported.
    """
    variants: dict[tuple[str, str], Variant] = {}
    for option in options:
        key, equals, path = option.partition("=")
        group, slash, name = key.partition("/")
        name = name if slash else Path(path.rstrip("/")).name.removesuffix(".safetensors")
        if not (equals and path and re.fullmatch(NAME, group) and re.fullmatch(NAME, name)):
            raise Unsupported(f"--variant: expected group=PATH or group/name=PATH, got {visible(option)}")
        if (group, name) in variants:
            raise Unsupported(f"--variant: two of {group} are called {name}; say group/name=PATH")
        variants[group, name] = Variant(group, name, path)
    return tuple(variants.values())


def default_name(artifact: str) -> str:
    """What a model is called where nobody says: the artifact's folder, without `.artifact`."""
    return Path(artifact.rstrip("/")).name.removesuffix(".artifact")
