"""A server from its start to its stop, and the models that it loads."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any

import msgspec

from weightswap_runtime.errors import (
    DigestMismatch,
    GraphMismatch,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    visible,
)
from weightswap_runtime.live.variants import MOST
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import ServedModel
from weightswap_runtime.transfer.keeping import kept_files
from weightswap_server.admin.access import AdminSettings
from weightswap_server.admin.plane import AdminPlane
from weightswap_server.http.app import http_app
from weightswap_server.http.handover import Handed
from weightswap_server.http.listening import HttpServer, listening, new_loop
from weightswap_server.service.service import Service

from .errors import log
from .protocol import NAME
from .settings import Settings

if TYPE_CHECKING:
    from weightswap_server.grpc import GrpcServer


class Server:
    """A server of one or more models, over HTTP and gRPC."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        settings: Settings,
        admin: AdminSettings | None = None,
        handed: Handed | None = None,
    ) -> None:
        """models: by the names that requests use; the server closes them when it ends. admin: the admin plane's.
        handed: HTTP connections that another process accepts for this one; the gRPC port is then shared.

        Raises Unsupported.
        """
        self.settings = settings
        self.service = Service(models, settings)
        self._http = HttpServer(http_app(self.service), settings, handed)
        self.admin = AdminPlane(self.service, admin) if admin is not None else None
        self._grpc: GrpcServer | None = None
        self._listening_callbacks: list[Callable[[], object]] = []
        self._handed = handed
        self.http_port = 0
        self.grpc_port = 0

    def run(self) -> None:
        """Serve until `stop()`, or in the main thread until SIGTERM or SIGINT. Requests already accepted are finished.

        Raises OSError if a port is not available.
        """
        with (
            closing(self.service),
            self.admin.running() if self.admin is not None else nullcontext(),
            ExitStack() as stack,
        ):
            sockets = []
            if self._handed is None:
                sockets.append(stack.enter_context(listening(self.settings.host, self.settings.http_port)))
                self.http_port = sockets[0].getsockname()[1]
            try:
                self._listen_for_grpc()
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(self._serve(sockets))
            finally:
                if self._grpc is not None:
                    self._grpc.close(self.settings.grace)

    def stop(self) -> None:
        """Stop accepting, finish the accepted requests, and let `run()` return. From any thread or signal handler."""
        self.service.stop()
        self._http.should_exit = True
        if self._grpc is not None:
            self._grpc.stop(self.settings.grace)

    def _listen_for_grpc(self) -> None:
        if self.settings.grpc_port is not None:
            from weightswap_server.grpc import GrpcServer

            self._grpc = GrpcServer(self.service, shared=self._handed is not None)
            self.grpc_port = self._grpc.port

    def on_listening(self, tell: Callable[[], object]) -> None:
        """Call `tell()` once the server listens and its ports are known."""
        self._listening_callbacks.append(tell)

    @contextmanager
    def running(self) -> Iterator[Server]:
        """Serve in a background thread while the block runs."""
        begun: Future[None] = Future()
        self.on_listening(lambda: begun.set_result(None))

        def serve() -> None:
            try:
                self.run()
            except BaseException as error:
                if begun.done():
                    raise
                begun.set_exception(error)

        thread = Thread(target=serve, name="weightswap-server")
        thread.start()
        try:
            begun.result()
            yield self
        finally:
            self.stop()
            thread.join()

    async def _serve(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        with signals(loop, self.stop):
            for callback in self._listening_callbacks:
                callback()
            await self._http.serve(sockets)


@contextmanager
def signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT while the block runs, if this is the main thread."""
    numbers = (signal.SIGTERM, signal.SIGINT) if current_thread() is main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact, and the source of its weights: a weight file, a watched directory, the store of a desired state, a
    trainer that sends, or a weight file first and one of the others afterwards."""

    artifact: str
    weights: str | None = None  # a file
    watch: str | None = None  # a directory
    follow: str | None = None  # the store of a desired state
    interval: float = 5.0  # seconds between two polls of these
    receive: str | None = None  # where senders connect, `unix:PATH`
    keep: str | None = None  # a directory for what was served last, from which a restart begins
    variants: Sequence[Variant] = ()  # resident from the start
    options: Mapping[str, Any] = {}  # further arguments of `load`, such as the engine

    def open(self) -> Model:
        """Load the model, and start to watch, follow or receive. Raises what `load` and `Model.swap`, `add_variant`,
        `watch`, `follow` and `receive` raise."""
        self.check()
        model = load(self.artifact, **self.options)
        self.begin(model)
        for variant in self.variants:
            model.add_variant(variant.group, variant.name, variant.path)
        self.attach(model)
        return model

    def begin(self, model: Model) -> None:
        """Swap in what was kept last, else `weights`. Raises what `Model.swap` of these raises.

        Of kept files that are damaged, or of another artifact, the log says so, and the one before is taken.
        """
        for path in reversed(kept_files(self.keep) if self.keep is not None else ()):
            try:
                model.swap(path)
                return
            except (WeightFileError, DigestMismatch, GraphMismatch, WeightsMismatch) as error:
                log.warning("what was kept last is not served, but what was before: %s", error)
        if self.weights is not None:
            model.swap(self.weights)

    def check(self) -> None:
        """Raise Unsupported for two sources that would undo each other, or for too many variants."""
        if self.watch is not None and self.follow is not None:
            raise Unsupported(
                "a model that follows a desired store cannot also watch a directory: watch the directory in the "
                "process that promotes, with model.watch(promote=...)"
            )
        if self.receive is not None and not (self.watch is None and self.follow is None):
            raise Unsupported("a model that receives weights can neither follow a desired store nor watch a directory")
        if self.keep is not None and not (self.watch is None and self.follow is None):
            raise Unsupported(
                "keep: for weights that are sent; those of a directory or a desired store are in files already"
            )
        most = self.options.get("max_variants", MOST)
        for group, count in Counter(variant.group for variant in self.variants).items():
            if count > most:
                raise Unsupported(f"{count} variants of {group}, but room for {most}: give --max-variants {count}")

    def attach(self, model: Model) -> None:
        """Let a loaded model watch, follow or receive. Raises what `Model.watch`, `follow` and `receive` raise."""
        if self.watch is not None:
            model.watch(self.watch, self.interval)
        if self.follow is not None:
            model.follow(self.follow, self.interval)
        if self.keep is not None:
            model.keep(self.keep)
        if self.receive is not None:
            model.receive(self.receive)


class Variant(msgspec.Struct, frozen=True):
    """A variant, named as requests name it."""

    group: str
    name: str
    path: str


def variants_of(options: Iterable[str]) -> tuple[Variant, ...]:
    """Return the variants of `--variant` options: GROUP/NAME=PATH, or GROUP=PATH, named after the file or folder.

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
            raise Unsupported(f"--variant: two of {group} are named {name}; give group/name=PATH")
        variants[group, name] = Variant(group, name, path)
    return tuple(variants.values())


def default_name(artifact: str) -> str:
    """Return the default name of a model: the artifact's folder name, without `.artifact`."""
    return Path(artifact.rstrip("/")).name.removesuffix(".artifact")
