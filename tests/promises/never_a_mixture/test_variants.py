"""Variants over a changing base: every answer is that of one base and one variant."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch

from tests.support.adapters import BASES, Adapters, X
from weightswap_runtime import Model, StagingBusy, StaleState, UnknownName, load

VARIANTS, ROOM = 3, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("variants"), VARIANTS)


class Customer(threading.Thread):
    """Thread that calls with one variant after another; each answer must be that of its variant over a base."""

    def __init__(self, model: Model, files: Adapters, ids: list[str], stop: threading.Event, seed: int) -> None:
        super().__init__()
        self.model, self.files, self.ids, self.stop = model, files, ids, stop
        self.random = random.Random(seed)
        self.answers, self.wrong = 0, list[str]()

    def run(self) -> None:
        while not self.stop.is_set():
            adapter = self.random.choice([None, *range(VARIANTS)])
            choice = None if adapter is None else {"lora": f"v{adapter}"}
            try:
                bases, answer = self.answer(choice)
            except (UnknownName, StaleState):
                continue
            if not any(torch.equal(answer, self.files.expected(base, adapter)) for base in bases):
                self.wrong.append(f"{adapter} over {bases}")
            self.answers += 1

    def answer(self, choice: dict[str, str] | None) -> tuple[Sequence[int], torch.Tensor]:
        """Return an answer, and the bases that may have given it: only one if it is pinned."""
        if self.random.random() < 0.5:
            return range(BASES), self.model(X, variants=choice)
        with self.model.pin() as pinned:
            return [self.ids.index(pinned.weights_id)], pinned(X, variants=choice)


def test_variants_in_a_storm(files: Adapters) -> None:
    """Variants are added and removed, and the base changes, while many threads call."""
    model, stop = load(files.artifact, files.weights[0], max_variants=ROOM), threading.Event()
    ids = [model.swap(path).weights_id for path in files.weights]
    expected = [files.expected(base, adapter) for base in range(BASES) for adapter in (None, *range(VARIANTS))]
    assert all(not torch.equal(*pair) for pair in itertools.combinations(expected, 2))
    customers = [Customer(model, files, ids, stop, seed) for seed in range(4)]
    for customer in customers:
        customer.start()
    try:
        for step in range(45):
            name = step % VARIANTS
            base = model.weights_id if step % 5 == 0 else None
            with suppress(StagingBusy):
                model.add_variant("lora", f"v{name}", files.paths[name], base=base)
                if step % 7 == 0:
                    model.remove_variant("lora", f"v{name}")
            if step % 3 == 0:
                model.swap(files.weights[step % 2])
    finally:
        stop.set()
    for customer in customers:
        customer.join(60)
    assert [customer.wrong for customer in customers] == [[]] * len(customers)
    assert all(customer.answers > 2 for customer in customers)
    assert {"evicted", "removed"} <= {receipt.kind for receipt in model.variant_history}
