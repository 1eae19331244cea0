"""Canaries of several processes: the owner starts, judges and ends them, the workers answer and measure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from functools import partial
from threading import Lock

import msgspec

from weightswap_runtime.decoding import from_msgpack
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import begin_trial
from weightswap_runtime.shared.worker import WorkerModel
from weightswap_server.canary import Canary, CanaryPlan, Measured
from weightswap_server.service.service import Served


class TrialMeasures(msgspec.Struct, frozen=True):
    """A worker's measures of a model's trial. trial: its word on the control page."""

    model: str
    trial: int
    measured: Measured


def read_measures(text: str) -> TrialMeasures:
    """Decode a text of `WorkerTrials.drain`."""
    return from_msgpack(b64decode(text), TrialMeasures)


class OwnerTrials:
    """The trials of an owner, which starts its canaries in all workers and collects their measures."""

    def __init__(self, models: Iterable[Served]) -> None:
        self._models = {served.name: served for served in models}
        self._words: dict[str, int] = {}
        for served in self._models.values():
            served.announce = partial(self._announce, served)

    def add(self, text: str) -> None:
        """Add a worker's measures. Those of an earlier trial are ignored."""
        measures = read_measures(text)
        canary = self._models[measures.model].canary
        if canary is not None and measures.trial == self._words.get(measures.model):
            canary.add(measures.measured)

    def _announce(self, served: Served, canary: Canary | None) -> None:
        assert isinstance(served.switch, Control)
        self._words.pop(served.name, None)
        if canary is None:
            served.switch.end_trial()
            return
        assert isinstance(canary.staged, Staged)
        plan = canary.plan._replace(promote_if="", abort_if="")  # the owner alone judges
        self._words[served.name] = begin_trial(served.switch, canary.staged, msgspec.msgpack.encode(plan))


class WorkerTrials:
    """The trials of a worker, which checks at each request whether its owner has one."""

    def __init__(self, models: Iterable[Served]) -> None:
        self._models = [_WorkerTrial(served) for served in models if not served.generates]

    def drain(self) -> Iterator[str]:
        """Yield the measures of each trial since the last call, as encoded `TrialMeasures`."""
        for model in self._models:
            if (measures := model.drain()) is not None:
                yield b64encode(msgspec.msgpack.encode(measures)).decode()  # JSON has no infinities


class _WorkerTrial:
    """The trials of one model."""

    def __init__(self, served: Served) -> None:
        assert isinstance(served.switch, Control)
        assert isinstance(served.model, WorkerModel)
        self._served, self._control, self._model = served, served.switch, served.model
        self._seen = 0
        self._lock = Lock()
        served.sync_canary = self.sync

    def sync(self) -> None:
        """Start or end the canary, as the owner has."""
        if self._control.trial == self._seen:
            return
        with self._lock:
            word = self._control.trial
            if word != self._seen:
                self._served.end_canary()
                if (trial := self._model.find_trial(word)) is not None:
                    self._served.set_canary(trial, from_msgpack(trial.terms, CanaryPlan))
                self._seen = word

    def drain(self) -> TrialMeasures | None:
        """Return the measures since the last call, or None without a trial."""
        self.sync()
        with self._lock:
            canary = self._served.canary
            return TrialMeasures(self._served.name, self._seen, canary.drain()) if canary is not None else None
