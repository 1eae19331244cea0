"""A canary of several processes: the keeper begins and ends it, workers answer and measure, the keeper judges."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from functools import partial
from threading import Lock

import msgspec

from weightswap_runtime.live.staged import Staged
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.keeper import begin_trial
from weightswap_runtime.shared.worker import WorkerModel
from weightswap_server.canary.canary import Canary
from weightswap_server.canary.judging import CanaryPlan, Measured
from weightswap_server.service.served import Served


class Tried(msgspec.Struct, frozen=True):
    """What a worker has measured of a model's trial, which a word of the control page has named."""

    model: str
    trial: int
    measured: Measured


def read_tried(text: str) -> Tried:
    """What `WorkerTrials.told` has said."""
    return msgspec.msgpack.decode(b64decode(text), type=Tried)


class KeeperTrials:
    """The keeper's: a canary of a model is one of all workers, and what they measure is the model's."""

    def __init__(self, models: Iterable[Served]) -> None:
        self._models = {served.name: served for served in models}
        self._words: dict[str, int] = {}
        for served in self._models.values():
            served.announce = partial(self._announce, served)

    def heard(self, text: str) -> None:
        """A worker has said what it has measured. What is of an earlier trial is nobody's."""
        tried = read_tried(text)
        canary = self._models[tried.model].canary
        if canary is not None and tried.trial == self._words.get(tried.model):
            canary.add(tried.measured)

    def _announce(self, served: Served, canary: Canary | None) -> None:
        assert isinstance(served.switch, Control)
        self._words.pop(served.name, None)
        if canary is None:
            served.switch.end_trial()
            return
        assert isinstance(canary.staged, Staged)
        rules_are_mine = canary.plan._replace(promote_if="", abort_if="")
        self._words[served.name] = begin_trial(served.switch, canary.staged, msgspec.msgpack.encode(rules_are_mine))


class WorkerTrials:
    """A worker's: its models look at each request whether something is on trial."""

    def __init__(self, models: Iterable[Served]) -> None:
        self._models = [_WorkerTrial(served) for served in models if not served.generates]

    def told(self) -> Iterator[str]:
        """What was measured since the last time: a `Tried` of each model with a trial."""
        for model in self._models:
            if (tried := model.take()) is not None:
                yield b64encode(msgspec.msgpack.encode(tried)).decode()  # JSON has no infinities


class _WorkerTrial:
    """Of one model."""

    def __init__(self, served: Served) -> None:
        assert isinstance(served.switch, Control)
        assert isinstance(served.model, WorkerModel)
        self._served, self._control, self._model = served, served.switch, served.model
        self._seen = 0
        self._lock = Lock()
        served.look = self.look

    def look(self) -> None:
        """Have the canary that the keeper has, if it has one."""
        if self._control.trial == self._seen:
            return
        with self._lock:
            word = self._control.trial
            if word != self._seen:
                self._served.end_canary()
                if (trial := self._model.find_trial(word)) is not None:
                    self._served.try_out(trial, msgspec.msgpack.decode(trial.terms, type=CanaryPlan))
                self._seen = word

    def take(self) -> Tried | None:
        """What was measured of it since the last time."""
        self.look()
        with self._lock:
            canary = self._served.canary
            return Tried(self._served.name, self._seen, canary.take()) if canary is not None else None
