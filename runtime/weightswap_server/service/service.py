"""The service behind HTTP and gRPC: models by name, their readiness, and their answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING, Any

from weightswap_runtime import __version__
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.live.model import Model
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.threads.awaiting import done_within
from weightswap_server.errors import Failure, NotReady, Overloaded, TookTooLong, UnknownModel, failure_of
from weightswap_server.methods import ServedMethod
from weightswap_server.protocol.documents import (
    EXTENSIONS,
    Answered,
    IndexEntry,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from weightswap_server.protocol.tensors_on_the_wire import Answer
from weightswap_server.settings import Settings

from .batching import Call
from .metrics import ServerMetrics
from .processes import Process, Role, Serving
from .served import Served

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from .traces import Traces

PLATFORM = "weightswap"


class Service:
    """The models of a server, and the calls of them."""

    def __init__(self, models: Mapping[str, Model], settings: Settings) -> None:
        """Raises Unsupported for settings out of range, and for models that the protocol cannot describe."""
        settings.check()
        self.settings = settings
        self.metrics = ServerMetrics()
        self.all_metrics: Callable[[], bytes] = self.metrics.text  # of all processes that serve the models
        self.load_metrics: Callable[[], Iterable[Metric]] = self.metrics.load  # requests of all these processes
        self.processes: Callable[[], list[Process]] = lambda: [self.process("server")]
        self.traces: Traces | None = None
        if settings.traces:
            from .traces import Traces

            self.traces = Traces()
        self._since = time.time()
        self.stopping = False
        self.streams = 0
        self._counting = Lock()
        self.served = [Served(name, model, settings, self.metrics, self.traces) for name, model in models.items()]
        self._by_name = {name: served for served in self.served for name in served.methods or (served.name,)}

    @property
    def names(self) -> list[str]:
        """The names of all models and methods, as requests use them."""
        return list(self._by_name)

    @property
    def ready(self) -> bool:
        return not self.stopping and all(served.ready for served in self.served)

    def find(self, name: str, version: str = "") -> Served:
        """Return the model of a name. Raises UnknownModel, also if `version` is not the served generation."""
        served = self._by_name.get(name)
        if served is None:
            raise UnknownModel(f"no model is named {name}; there are: {', '.join(self._by_name)}")
        if version and version != str(served.model.generation):
            raise UnknownModel(f"{name} version {version}: only generation {served.model.generation} is served")
        return served

    def find_ready(self, name: str, version: str = "") -> Served:
        """Return the model of a name, if it is ready. Raises UnknownModel and NotReady."""
        served = self.find(name, version)
        if not served.warm:
            raise NotReady(f"{name} has no weights yet, or is not warm")
        if served.switch.unloaded:
            raise NotReady(f"{name} was unloaded by an operator")
        return served

    def method(self, name: str, version: str = "") -> tuple[Served, ServedMethod]:
        """Return the model and the method of a name. Raises UnknownModel, NotReady, and Unsupported if it generates."""
        served = self.find_ready(name, version)
        method = served.methods.get(name)
        if method is None:
            raise Unsupported(f"{name} generates: use POST /v2/models/{name}/generate, or generate_stream")
        return served, method

    def call(
        self,
        name: str,
        version: str,
        tensors: Mapping[str, TensorBytes],
        traceparent: str = "",
        wish: str = "",
        variants: Mapping[str, str] | None = None,
    ) -> tuple[Served, Call]:
        """Check a request, and return its model and call. wish: "1" asks for the canary, "0" for the served weights.

        Raises UnknownModel, NotReady, InputMismatch, BadRequest, and Unsupported for a model that generates.
        """
        served, method = self.method(name, version)
        canary = served.choose_canary(version, wish)
        return served, Call(method, method.arguments(tensors), version, traceparent, canary, variants)

    async def answer(self, served: Served, call: Call) -> Answer:
        """Run a call, in this thread if it is quick. Raises Overloaded, NotReady, TookTooLong, and its errors."""
        if (answer := served.thread.run_here(call)) is not None:
            return answer
        served.thread.submit(call, asyncio.get_running_loop().call_soon)
        if not await done_within(call.answer, self.settings.timeout):
            raise TookTooLong(f"no answer within {self.settings.timeout:g} s")
        return call.answer.result()

    def wait_here(self, answer: Future[Answer]) -> Answer:
        """Return a future's answer; blocks the calling thread. Raises TookTooLong."""
        try:
            return answer.result(self.settings.timeout)
        except TimeoutError as error:
            if not answer.cancel() and answer.done():
                raise
            raise TookTooLong(f"no answer within {self.settings.timeout:g} s") from error

    def open_stream(self) -> None:
        """Count a new generation. Raises Overloaded if too many are open."""
        with self._counting:
            if self.streams >= self.settings.max_streams:
                raise Overloaded(f"{self.streams} generations are already open; try again")
            self.streams += 1
            self.metrics.streams.set(self.streams)

    def close_stream(self) -> None:
        """Count a generation that was closed."""
        with self._counting:
            self.streams -= 1
            self.metrics.streams.set(self.streams)

    def generated(self, name: str, answered: Answered, seconds: float, traceparent: str) -> None:
        """Count a generation that has ended."""
        self.metrics.generated(name, answered.weights_id, seconds)
        if self.traces is not None:
            self.traces.generated(name, answered, time.perf_counter() - seconds, traceparent)

    def refused(self, name: str, error: BaseException, arrived: float = 0.0, traceparent: str = "") -> Failure:
        """Count a failed request, and return what its client sees. arrived: its arrival, by `perf_counter`."""
        failure = failure_of(error)
        served = self._by_name.get(name)
        if failure.status == 500 and served is not None and served.canary is not None:
            served.canary.served.failed()
        self.metrics.refused(name if served else "", served.model.weights_id if served else None, failure.status)
        if self.traces is not None and arrived:
            self.traces.refused(name if served else "", error, arrived, traceparent)
        return failure

    def process(self, role: Role, name: str = "") -> Process:
        """Return this process's document."""
        return Process(
            role=role,
            name=name or role,
            pid=os.getpid(),
            since=self._since,
            heard=time.time(),
            ready=self.ready,
            answered=self.metrics.answers,
            models={
                served.name: Serving(generation=served.model.generation, weights_id=served.model.weights_id)
                for served in self.served
            },
        )

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("weightswap", __version__, list(EXTENSIONS))

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Raises UnknownModel."""
        served = self.find(name, version)
        method, model = served.methods.get(name), served.model
        parameters: dict[str, Any] = {
            "graph_id": model.graph_id,
            "weights_id": model.weights_id,
            "labels": model.labels,
        }
        if variants := model.variants:
            parameters["variants"] = {group: list(names) for group, names in variants.items()}
        return ModelMetadata(
            name,
            [] if model.generation is None else [str(model.generation)],
            PLATFORM,
            method.inputs if method else [TensorMetadata("input_ids", "INT64", [-1])],
            method.outputs if method else [TensorMetadata("output_ids", "INT64", [-1])],
            parameters,
        )

    def index(self) -> list[IndexEntry]:
        return [
            IndexEntry(
                name,
                str(served.model.generation) if served.model.generation is not None else "",
                "READY" if served.ready else "UNAVAILABLE",
                "" if served.ready else "unloaded" if served.switch.unloaded else "no weights yet, or not warm",
            )
            for name, served in self._by_name.items()
        ]

    def close(self) -> None:
        """Finish the accepted requests, and close the models."""
        self.stopping = True
        for served in self.served:
            served.close(self.settings.grace)
            served.model.close()
        self.metrics.close()
