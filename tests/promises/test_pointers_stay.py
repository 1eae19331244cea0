"""Two arenas serve every set of weights: swaps create and move none."""

from __future__ import annotations

import pytest
from blake3 import blake3

from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import load
from weightswap_runtime.memory.arena import HostArena


def test_addresses_stay(tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[HostArena] = []
    original = HostArena.__init__

    def recording(arena: HostArena, layout: object) -> None:
        original(arena, layout)  # type: ignore[arg-type]
        arenas.append(arena)

    monkeypatch.setattr(HostArena, "__init__", recording)
    model = load(tiny.path, weight_file(0))
    for seed in range(1, 6):
        model.swap(weight_file(seed))
    assert len(arenas) == 2
    assert {blake3(arena.view("weight")).hexdigest() for arena in arenas} == {
        blake3(tiny.values(seed)["weight"].numpy().tobytes()).hexdigest() for seed in (4, 5)
    }
