"""Gigabytes swapped in place under callers on several streams: each output is of one set of weights alone."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.devices.test_slow_streams import captured_or_not, in_every_way
from tests.support.accelerators import ACCELERATOR, on_accelerator, use_own_stream
from tests.support.slow_streams import EMULATED, NumberFiles, keep_busy, number
from weightswap_runtime import Model, load

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fallback.*:UserWarning"),
    pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs torch.cuda._sleep"),
]
GB, FILES, CALLERS, SWAPS = 10**9, 3, 4, 24
AHEAD = 8  # calls that a thread makes before it checks their outputs
LATEST = 0.002  # seconds that a caller's stream is busy before a call


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberFiles]:
    """Files of 2 GB each, or less if the device is small."""
    total = torch.accelerator.get_memory_info()[1]
    folder = tmp_path_factory.mktemp("large")
    yield NumberFiles(folder, 8 << 20 if EMULATED else min(2 * GB, total // 16), FILES)
    shutil.rmtree(folder)


class Observation(NamedTuple):
    """The number in an output, and the generations before and after the call."""

    number: int
    first: int
    last: int


class Caller(threading.Thread):
    """Calls without a pause, behind work of random length, and checks outputs some calls later."""

    def __init__(self, model: Model, index: int, stop: threading.Event) -> None:
        super().__init__()
        self._model, self._ended, self._index = model, stop, index
        self._choose = random.Random(index)
        self.observations: list[Observation] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        if self._index:  # one is in the default stream
            use_own_stream(self._model.device)
        try:
            x = torch.zeros((), device=self._model.device)
            while not self._ended.is_set():
                self._look([self._call(x) for _ in range(AHEAD)])
        except BaseException as error:
            self.error = error

    def _call(self, x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        keep_busy(self._choose.random() * LATEST)
        first = self._model.generation
        output = self._model(x)
        return output, first or 0, self._model.generation or 0

    def _look(self, outputs: list[tuple[torch.Tensor, int, int]]) -> None:
        self.observations += [Observation(number(output.cpu()), first, last) for output, first, last in outputs]


@on_accelerator
@in_every_way
@captured_or_not
def test_no_output_is_of_two_sets_of_weights(
    device: str, options: dict[str, Any], graphs: Any, files: NumberFiles
) -> None:
    model = load(files.artifact, files.files[0], device=device, cuda_graphs=graphs, **options)
    stop, ledger = threading.Event(), {0: 0}
    callers = [Caller(model, index, stop) for index in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        for count in range(1, SWAPS + 1):
            ledger[model.swap(files.files[count % FILES]).generation] = count % FILES
    finally:
        stop.set()
        for caller in callers:
            caller.join(120)
    assert [caller.error for caller in callers] == [None] * CALLERS
    for caller in callers:
        assert len(caller.observations) > AHEAD
        wrong = [
            observation for observation in caller.observations if observation.number not in served(ledger, observation)
        ]
        assert wrong == []
    assert {observation.number for caller in callers for observation in caller.observations} == set(range(FILES))


def served(ledger: dict[int, int], observation: Observation) -> set[int]:
    return {ledger[generation] for generation in range(observation.first, observation.last + 1)}
