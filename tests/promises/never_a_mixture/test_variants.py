"""Variants over a changing base: every answer is that of one base and one variant."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import chain

import pytest

from tests.support.adapters import BASES, Adapters, X
from tests.support.storm import Ledger, Seen, content, found_in, storm
from weightswap_runtime import StagingBusy, StaleState, UnknownName, load

VARIANTS, ROOM = 3, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("variants"), VARIANTS)


def test_variants_in_a_storm(files: Adapters) -> None:
    """Variants are added and removed, and the base changes, while many threads call, half of them with a pin."""
    model = load(files.artifact, files.weights[0], max_variants=ROOM)
    ids = [model.swap(path).weights_id for path in files.weights]
    answers: dict[int | None, dict[bytes, int]] = {
        adapter: {content(files.expected(base, adapter)): base for base in range(BASES)}
        for adapter in (None, *range(VARIANTS))
    }
    assert len({*chain(*answers.values())}) == BASES * (VARIANTS + 1)
    ledger, dice = Ledger(model, BASES - 1), [random.Random(seed) for seed in range(4)]

    def call(number: int) -> Seen | None:
        adapter = dice[number].choice([None, *range(VARIANTS)])
        choice = None if adapter is None else {"lora": f"v{adapter}"}
        try:
            if dice[number].random() < 0.5:
                return ledger.watch(lambda: model(X, variants=choice), answers[adapter])
            with model.pin() as pinned:
                base = found_in(answers[adapter], pinned(X, variants=choice))
                assert ids[base] == pinned.weights_id
                return Seen(base, pinned.generation, pinned.generation)
        except (UnknownName, StaleState):
            return None

    with storm(call, 4) as seen:
        for step in range(45):
            name = step % VARIANTS
            base = model.weights_id if step % 5 == 0 else None
            with suppress(StagingBusy):
                model.add_variant("lora", f"v{name}", files.paths[name], base=base)
                if step % 7 == 0:
                    model.remove_variant("lora", f"v{name}")
            if step % 3 == 0:
                ledger.committed(model.swap(files.weights[step % 2]), step % 2)
    ledger.check(seen)
    assert all(len(each) > 2 for each in seen)
    assert {"evicted", "removed"} <= {receipt.kind for receipt in model.variant_history}
