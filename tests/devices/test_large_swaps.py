"""Gigabytes swapped in place under callers on several streams: each output is of one set of weights alone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch

from tests.devices.test_slow_streams import captured_or_not, in_every_way
from tests.support.accelerators import ACCELERATOR, on_accelerator, use_own_stream
from tests.support.slow_streams import EMULATED, NumberFiles, keep_busy, number
from tests.support.storm import Ledger, Seen, storm
from weightswap_runtime import load

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fallback.*:UserWarning"),
    pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs torch.cuda._sleep"),
]
GB, FILES, CALLERS, SWAPS = 10**9, 3, 4, 12
AHEAD = 8  # calls that a thread makes before it checks their outputs
LATEST = 0.002  # seconds that a caller's stream is busy before a call


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberFiles]:
    """Files of 1 GB each, or less if the device is small."""
    total = torch.accelerator.get_memory_info()[1]
    folder = tmp_path_factory.mktemp("large")
    yield NumberFiles(folder, 8 << 20 if EMULATED else min(GB, total // 16), FILES)
    shutil.rmtree(folder)


@on_accelerator
@in_every_way
@captured_or_not
def test_no_output_is_of_two_sets_of_weights(
    device: str, options: dict[str, Any], graphs: Any, files: NumberFiles
) -> None:
    """Threads call without a pause, behind work of random length, and look at the outputs some calls later."""
    model = load(files.artifact, files.files[0], device=device, cuda_graphs=graphs, **options)
    x, ledger = torch.zeros((), device=model.device), Ledger(model, 0)
    dice = [random.Random(caller) for caller in range(CALLERS)]

    def call(caller: int) -> Seen:
        keep_busy(dice[caller].random() * LATEST)
        first = model.generation
        return Seen(model(x), first, model.generation)

    def calls(caller: int) -> list[Seen]:
        outputs = [call(caller) for _ in range(AHEAD)]
        return [each._replace(served=number(each.served.cpu())) for each in outputs]

    torch.accelerator.synchronize()
    # the first caller is in the default stream
    with storm(calls, CALLERS, lambda caller: use_own_stream(model.device) if caller else None) as found:
        for count in range(1, SWAPS + 1):
            ledger.committed(model.swap(files.files[count % FILES]), count % FILES)
    seen = [[*chain(*each)] for each in found]
    ledger.check(seen)
    assert all(len(each) > AHEAD for each in seen)
    assert {each.served for each in chain(*seen)} == set(range(FILES))
