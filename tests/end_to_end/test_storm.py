"""Calls from many threads while weights change: each output comes from exactly one generation."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from weightswap_exporter import export, pack
from weightswap_runtime import Model, SwapError, WeightFileError, load

SETS, SWAPS, THREADS = 6, 200, 4


class Deep(nn.Module):
    """Enough layers that a mixture of two sets of weights would show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(24, 24) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Storm:
    """What the threads share: the model, every possible answer, and what they have seen."""

    def __init__(
        self, model: Model, ids: list[str], inputs: list[torch.Tensor], answers: list[list[torch.Tensor]]
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.answers = dict(zip(ids, answers, strict=True))
        self.stop = threading.Event()
        self.failures: list[str] = []
        self.generations: set[int] = set()
        self.calls = 0

    def call(self, seed: int) -> None:
        """Plain calls match exactly one set; pinned calls match the set that the pin names, twice."""
        choose = random.Random(seed)
        last = -1
        while not self.stop.is_set():
            index = choose.randrange(len(self.inputs))
            if choose.random() < 0.5:
                self.check([self.model(self.inputs[index])], index, None)
                continue
            with self.model.pin() as session:
                outputs = [session(self.inputs[index]) for _ in range(2)]
                if session.generation < last:
                    self.failures.append(f"generation {session.generation} came after {last}")
                last = session.generation
                self.generations.add(last)
                self.check(outputs, index, session.weights_id)

    def check(self, outputs: list[torch.Tensor], index: int, claimed: str | None) -> None:
        for output in outputs:
            matches = [name for name, answers in self.answers.items() if torch.equal(output, answers[index])]
            if len(matches) != 1 or (claimed is not None and matches != [claimed]):
                self.failures.append(f"an output matches {matches}, claimed was {claimed}")
        self.calls += len(outputs)


@pytest.fixture
def storm(tmp_path: Path, residency: str) -> tuple[Storm, list[Path]]:
    models = [Deep().eval() for _ in range(SETS)]
    shapes = {"x": {0: Dim("batch", max=32)}}
    artifact = export(models[0], (torch.zeros(2, 24),), out=tmp_path / "deep.artifact", dynamic_shapes=shapes)
    packed = [pack(model, artifact, out=tmp_path / f"v{index}.safetensors") for index, model in enumerate(models)]
    inputs = [torch.randn(batch, 24) for batch in (1, 2, 7, 32)]
    with torch.no_grad():
        answers = [[model(x) for x in inputs] for model in models]
    model = load(artifact, packed[0].path, residency=residency, keep_previous="host")
    return Storm(model, [each.weights_id for each in packed], inputs, answers), [each.path for each in packed]


def test_four_threads_two_hundred_swaps(storm: tuple[Storm, list[Path]], tmp_path: Path) -> None:
    state, files = storm
    damaged = tmp_path / "damaged.safetensors"
    raw = bytearray(files[1].read_bytes())
    raw[-5] ^= 0x10
    damaged.write_bytes(raw)
    threads = [threading.Thread(target=state.call, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        choose = random.Random(99)
        for number in range(SWAPS):
            state.model.swap(choose.choice(files))
            if number % 10 == 3:
                state.model.rollback()
            if number % 10 == 6:
                with pytest.raises(SwapError):
                    state.model.swap(damaged)
            if number % 10 == 9:
                with pytest.raises(WeightFileError):
                    state.model.swap(tmp_path / "nowhere.safetensors")
            if number % 20 == 11:
                with state.model.stage(choose.choice(files)) as staged:
                    staged(state.inputs[0])
    finally:
        state.stop.set()
        for thread in threads:
            thread.join(30)
    assert state.failures == []
    assert state.model.generation == SWAPS + SWAPS // 10
    assert state.calls > SWAPS
    assert len(state.generations) > SWAPS // 20


def test_swaps_from_several_threads_run_one_after_another(storm: tuple[Storm, list[Path]]) -> None:
    state, files = storm
    receipts: list[int] = []

    def swap() -> None:
        receipts.extend(state.model.swap(file).generation for file in files)

    threads = [threading.Thread(target=swap) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(receipts) == list(range(1, 3 * SETS + 1))
