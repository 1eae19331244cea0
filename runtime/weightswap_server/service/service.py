"""The models of a server by name, and the road of a request, which both protocols share.

An endpoint decodes a request, makes a `call`, awaits its `answer` in an event loop or by `answer_blocking` in a thread,
encodes it, and tells `answered`. Any error on that road goes to `refused`, which returns what the client sees.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from weightswap_runtime import __version__
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.live.calls import Caller
from weightswap_runtime.live.receipt import Event
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.variants import Choice
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import ServedModel, choice_of
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.threads import done_within
from weightswap_server.canary import Canary, CanaryPlan, Measured, failures
from weightswap_server.errors import Failure, NotReady, Overloaded, TookTooLong, UnknownModel, failure_of, log
from weightswap_server.methods import ServedMethod
from weightswap_server.protocol import (
    EXTENSIONS,
    Answer,
    Answered,
    IndexEntry,
    ModelMetadata,
    Process,
    Role,
    ServerMetadata,
    Serving,
    TensorMetadata,
    read_variants,
    select,
)
from weightswap_server.settings import Settings

from .batching import Call, ModelThread
from .metrics import ServerMetrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from weightswap_runtime.shared.control import Control
    from weightswap_runtime.shared.worker import Trial

    from .traces import Traces

_NAME = "weightswap"  # of the server, and of the platform of its models
_INTERVAL = 0.5  # seconds between two checks whether an answer is still wanted
T = TypeVar("T")


class Service:
    """The models of a server, and the calls of them."""

    def __init__(self, models: Mapping[str, ServedModel], settings: Settings) -> None:
        """Raises Unsupported for settings out of range, for models that the protocol cannot describe, and for names
        that no request can have or that two models would have."""
        settings.check()
        self.settings = settings
        self.metrics = ServerMetrics()
        self.all_metrics: Callable[[], bytes] = self.metrics.text  # of all processes that serve the models
        self.load_metrics: Callable[[], Iterable[Metric]] = self.metrics.load  # requests of all these processes
        self.processes: Callable[[], list[Process]] = lambda: [self.process("server")]
        self.traces: Traces | None = None
        if settings.traces:
            from .traces import Traces  # needs an extra

            self.traces = Traces()
        self._since = time.time()
        self._stopped_at: float | None = None  # by the monotonic clock
        self.streams = 0
        self._counting = Lock()
        self.served = [Served(name, model, settings, self.metrics, self.traces) for name, model in models.items()]
        self._by_name = self._named()

    def _named(self) -> dict[str, Served]:
        """Return the models by all names that requests use. Raises Unsupported."""
        found: dict[str, Served] = {}
        for served in self.served:
            for name in served.methods or (served.name,):
                if problem := _name_problem(name, served, found.get(name)):
                    for each in self.served:
                        each.close(0.0)
                    raise Unsupported(problem)
                found[name] = served
        return found

    @property
    def names(self) -> list[str]:
        """The names of all models and methods, as requests use them."""
        return list(self._by_name)

    @property
    def stopping(self) -> bool:
        return self._stopped_at is not None

    @property
    def grace_left(self) -> float:
        """The seconds that accepted requests still have."""
        stopped_at = time.monotonic() if self._stopped_at is None else self._stopped_at
        return max(0.0, stopped_at + self.settings.grace - time.monotonic())

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
        *,
        outputs: Sequence[str] = (),
        in_json: Sequence[str] = (),
        variants: object = None,
        routing: str = "",
        traceparent: str = "",
    ) -> Call:
        """Check a request, and return its call.

        outputs: names of the requested ones; none: all. in_json: of those that are answered in JSON. variants: the
        parameter `variant` as it came. routing: "1" asks for the canary, "0" for the served weights.

        Raises UnknownModel, NotReady, InputMismatch, BadRequest, and Unsupported for a model that generates.
        """
        served, method = self.method(name, version)
        if outputs:
            method.check_outputs(outputs)
        flat, chosen = method.arguments(tensors), read_variants(variants)
        canary = served.choose_canary(version, routing)
        return Call(
            method,
            flat,
            version,
            traceparent=traceparent,
            canary=canary,
            variants=chosen,
            name=name,
            outputs=outputs,
            in_json=in_json,
        )

    async def answer(self, call: Call) -> Answer:
        """Run a call, in this thread if it is quick. Raises Overloaded, NotReady, TookTooLong, and its errors."""
        thread = self._by_name[call.name].thread
        if (answer := thread.run_here(call)) is None:
            thread.submit(call, asyncio.get_running_loop().call_soon)
            if not await done_within(call.answer, self.settings.timeout):
                raise self._too_late()
            answer = call.answer.result()
        return _requested(answer, call)

    def answer_blocking(self, call: Call, is_wanted: Callable[[], bool]) -> Answer:
        """Run a call, and block this thread until it is answered. Raises as `answer`, and as `result_of`."""
        self._by_name[call.name].thread.submit(call)
        try:
            answer = result_of(call.answer, self.settings.timeout, is_wanted)
        except TimeoutError as error:
            if not call.answer.cancel() and call.answer.done():
                raise  # the model's own
            raise self._too_late() from error
        return _requested(answer, call)

    def _too_late(self) -> TookTooLong:
        return TookTooLong(f"no answer within {self.settings.timeout:g} s")

    def answered(self, call: Call, answer: Answer) -> None:
        """Count a call whose answer is encoded: until then it may still be refused."""
        self.metrics.answered(call.name, answer.weights_id)

    def refused(self, name: str, error: BaseException, arrived: float = 0.0, traceparent: str = "") -> Failure:
        """Count a failed request, and return what its client sees. arrived: its arrival, by `perf_counter`."""
        failure = failure_of(error)
        served = self._by_name.get(name)
        if failure.status == 500 and served is not None and served.canary is not None:
            served.canary.add(Measured(served=failures(1)))
        self.metrics.refused(name if served else "", served.model.weights_id if served else None, failure.status)
        if self.traces is not None and arrived:
            self.traces.refused(name if served else "", error, arrived, traceparent)
        return failure

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
        return ServerMetadata(_NAME, __version__, list(EXTENSIONS))

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
            _NAME,
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

    def stop(self) -> None:
        """Be no longer ready. The grace of the accepted requests begins."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def close(self) -> None:
        """Finish the accepted requests within the grace, which all models share, and close the models."""
        self.stop()
        for served in self.served:
            served.close(self.grace_left)
            served.model.close()
        self.metrics.close()


def result_of(future: Future[T], seconds: float, is_wanted: Callable[[], bool]) -> T:
    """Wait for a future, and return its result.

    Raises TimeoutError, and CancelledError soon after it is no longer wanted: a stop waits for the threads that wait.
    """
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            return future.result(max(0.0, min(_INTERVAL, left)))
        except TimeoutError:
            if future.done() or left <= _INTERVAL:
                raise
        if not is_wanted():
            raise CancelledError


def _requested(answer: Answer, call: Call) -> Answer:
    return answer._replace(outputs=select(answer.outputs, call.outputs)) if call.outputs else answer


class Switch:
    """The flag of a model that an operator has unloaded: it answers no requests until it is loaded again."""

    unloaded = False


class Served:
    """A model of the server, with its methods, its thread and its canary."""

    def __init__(
        self, name: str, model: ServedModel, settings: Settings, metrics: ServerMetrics, traces: Traces | None
    ) -> None:
        self.name = name
        self.model = model
        self.generates = model.artifact.manifest.generation is not None
        self.methods = {} if self.generates else _methods(name, model)
        self.thread = ModelThread(
            model,
            max_queue=settings.max_queue,
            max_delay=settings.max_delay,
            observe=self._observe,
            may_join=self._may_join,
        )
        self._metrics, self._traces = metrics, traces
        self.canary: Canary | None = None
        self.warm = False
        self.switch: Switch | Control = Switch()  # Control: shared by several processes
        self.announce: Callable[[Canary | None], object] = lambda _: None  # to the processes that answer requests
        self.sync_canary: Callable[[], object] = lambda: None  # with what another process has announced
        self._settings = settings
        if settings.max_batch > 1:
            self._batch()
        metrics.watch(name, model, self.thread)
        self._stop_listening = model.listen(self._on_event)
        if model.weights_id is not None:
            self.thread.do(self._warm_up)

    @property
    def ready(self) -> bool:
        return self.warm and not self.switch.unloaded and not self.model.failed

    @property
    def is_shared(self) -> bool:
        """True if other processes serve the model, too."""
        return not isinstance(self.switch, Switch)

    def close(self, timeout: float) -> None:
        self._stop_listening()
        self.thread.stop(timeout)

    def start_canary(self, staged: Staged, plan: CanaryPlan) -> Canary:
        """Let staged weights answer some requests. Raises Unsupported if they cannot."""
        if self.generates:
            raise Unsupported(f"{self.name}: generates, and each generation stays on the weights that it began with")
        if self.model.residency != "double":
            raise Unsupported(f"{self.name}: a canary needs both sets in memory: residency double, not single")
        if self.model.weights_id is None:
            raise Unsupported(f"{self.name}: serves nothing yet to compare a canary with; commit the staged weights")
        if staged.weights_id == self.model.weights_id:
            raise Unsupported(
                f"{self.name}: already serves the weights {staged.weights_id[:12]}; a canary needs others. Discard them"
            )
        canary = self.set_canary(staged, plan)
        try:
            self.announce(canary)
        except BaseException:
            self.end_canary()
            raise
        return canary

    def set_canary(self, staged: Staged | Trial, plan: CanaryPlan) -> Canary:
        """Start a canary without checks and announcement."""
        self.canary = Canary(staged, plan, partial(self._metrics.tried, self.name), partial(choice_of, self.model))
        return self.canary

    def end_canary(self) -> None:
        """Send no more requests to the canary."""
        if self.canary is not None:
            self.announce(None)
            self.canary.close()
            self.canary = None

    def choose_canary(self, version: str, routing: str) -> Canary | None:
        """Return the canary if it answers the next request, None if the served weights do."""
        self.sync_canary()
        canary = self.canary
        return canary if canary is not None and not version and canary.answers_next(routing) else None

    def _batch(self) -> None:
        for method in self.methods.values():
            try:
                limit = method.batch_limit(self._settings.batch_dim)
            except Unsupported as error:
                log.warning("%s: not batched: %s", self.name, error)
            else:
                self.thread.limits[method] = min(self._settings.max_batch, limit or self._settings.max_batch)

    def _observe(self, call: Call, answer: Answer, began: float, together: int) -> None:
        self._metrics.called(call, answer, began, together)
        if self._traces is not None:
            self._traces.answered(call, answer, began, together)
        if (canary := self.canary) is not None and call.canary in (None, canary):
            seconds, by_canary = time.perf_counter() - call.arrived, call.canary is canary
            canary.answered(call.method, call.flat, call.variants, answer, seconds, by_canary=by_canary)

    def _on_event(self, event: Event) -> None:
        if self._traces is not None and isinstance(self.model, Model):
            self._traces.changed(self.name, event)
        if not self.warm and event.kind == "committed":
            self.thread.do(self._warm_up)

    def _warm_up(self) -> None:
        """Call each method twice on zeros, before the first request. Errors are logged."""
        for name, method in self.methods.items():
            try:
                self._try(method)
            except Exception as error:
                log.warning("%s: the warm-up failed; the model is served anyway: %s", name, error)
        self.warm = True

    def _try(self, method: ServedMethod) -> None:
        sample = method.sample()
        if sample is None:
            return
        for _ in range(2):
            self.thread.try_out(method, sample)
        if limit := self.thread.limits.get(method):
            self.thread.try_out(method, method.joined([sample] * (limit // method.rows(sample))))
            with self.model.pin() as pinned:
                self.thread.try_joining(pinned, method, None, pinned.weights_id)

    def _may_join(self, caller: Caller, method: ServedMethod, limit: int, choice: Choice | None) -> bool:
        """Return False for a method whose answers depend on the other rows of a batch, which are others' requests."""
        try:
            mixed = method.mixed_output(caller, limit, choice)
        except Exception as error:
            log.info("%s: whether the rows of a batch are independent was not found out: %s", self.name, error)
            return True
        if mixed is not None:
            log.warning("%s: not batched: rows of the output %s depend on the other rows", self.name, mixed)
        return mixed is None


def _methods(name: str, model: ServedModel) -> dict[str, ServedMethod]:
    """Return the methods by their public names: the default one has the model's own name."""
    methods, problems = {}, []
    for method in model.signatures:
        try:
            served = ServedMethod(model, method)
        except Unsupported as error:
            log.warning("%s: not served: %s", name, error)
            problems.append(str(error))
        else:
            methods[name if method == model.default_method else f"{name}.{method}"] = served
    if not methods:
        raise Unsupported(*problems)
    return methods


def _name_problem(name: str, served: Served, other: Served | None) -> str:
    """Return why a model cannot have a name; empty if it can. other: the model that has it already, and would answer
    for this one."""
    if not name or "/" in name:
        return f"{name!r}: no path of a request names such a model; give it a name without /"
    if other is None:
        return ""
    both = f"the models {other.name} and {served.name}"
    return f"{both} would both be served as {name}; give one of them another name"
