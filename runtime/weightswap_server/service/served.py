"""One model of the server: its methods, the thread that calls it, its warm-up, and its canary."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.live.events import Event
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.staged import Staged
from weightswap_server.canary.canary import Canary
from weightswap_server.canary.judging import CanaryPlan
from weightswap_server.errors import log
from weightswap_server.methods import ServedMethod
from weightswap_server.protocol.tensors_on_the_wire import Answer
from weightswap_server.settings import Settings

from .batching import Call, ModelThread, joined, rows_of
from .metrics import ServerMetrics

if TYPE_CHECKING:
    from weightswap_runtime.shared.control import Control
    from weightswap_runtime.shared.worker import Trial

    from .traces import Traces


class Switch:
    """The flag of a model that an operator has unloaded: it answers no requests until it is loaded again."""

    unloaded = False


class Served:
    """A model of the server, with its methods, its thread and its canary."""

    def __init__(
        self, name: str, model: Model, settings: Settings, metrics: ServerMetrics, traces: Traces | None
    ) -> None:
        self.name = name
        self.model = model
        self.generates = model.artifact.manifest.generation is not None
        self.methods = {} if self.generates else _methods(name, model)
        self.thread = ModelThread(
            model, max_queue=settings.max_queue, max_delay=settings.max_delay, observe=self._observe
        )
        self._names = {method: public for public, method in self.methods.items()}
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
        self.canary = Canary(staged, plan, partial(self._metrics.tried, self.name))
        return self.canary

    def end_canary(self) -> None:
        """Send no more requests to the canary."""
        if self.canary is not None:
            self.announce(None)
            self.canary.close()
            self.canary = None

    def choose_canary(self, version: str, wish: str) -> Canary | None:
        """Return the canary if it answers the next request, None if the served weights do."""
        self.sync_canary()
        canary = self.canary
        return canary if canary is not None and not version and canary.answers_next(wish) else None

    def _batch(self) -> None:
        for method in self.methods.values():
            try:
                limit = method.batch_limit(self._settings.batch_dim)
            except Unsupported as error:
                log.warning("%s: not batched: %s", self.name, error)
            else:
                self.thread.limits[method] = min(self._settings.max_batch, limit or self._settings.max_batch)

    def _observe(self, call: Call, answer: Answer, began: float, together: int) -> None:
        name = self._names[call.method]
        self._metrics.called(name, call, answer, began, together)
        if self._traces is not None:
            self._traces.answered(name, call, answer, began, together)
        if (canary := self.canary) is not None and call.canary in (None, canary):
            seconds, by_canary = time.perf_counter() - call.arrived, call.canary is canary
            canary.answered(call.method, call.flat, call.variants, answer, seconds, by_canary=by_canary)

    def _on_event(self, event: Event) -> None:
        if self._traces is not None and self.model.takes_weights:
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
            self.thread.try_out(method, joined([sample] * (limit // rows_of(sample))))


def _methods(name: str, model: Model) -> dict[str, ServedMethod]:
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
