"""Swaps from tensors of the process, beside swaps from a file in the page cache and the least that they must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from peers import Memory, Peers
from report import Goal, Row, compared
from safetensors.torch import load_file
from settings import Settings
from subjects import Stored, stored
from timing import Measure, in_turn, seconds

from weightswap_runtime import Model, load

AS_A_FILE = Goal("ratio", "at most", 1.25)
NEAR_THE_LEAST = Goal("ratio", "at most", 1.5)
AS_A_MAPPING = Goal("ratio", "at most", 1.25)
WITH_A_SECOND_LOOK = Goal("ratio", "at most", 1.35)
Tensors = dict[str, torch.Tensor]


def rows(settings: Settings) -> Iterator[Row]:
    """Measure on a model in double residency that has used both of its arenas."""
    with stored(settings.megabytes * 1_000_000) as large:
        given = [load_file(version.path) for version in large.versions]
        model = load(large.artifact, given[0])
        large.check(model)
        model.swap(given[1])
        large.check(model)
        timings = in_turn(_ways(large, model, given), settings.rounds)
        large.check(model)
    ms = {name: [1e3 * second for second in values] for name, values in timings.items()}
    what = f"swap of {large.size} from memory"
    yield compared(f"{what}, mapping", "ms", ms["mapping"], "file in the page cache", ms["file"], AS_A_FILE)
    least = f"memcpy + BLAKE3, {Peers().threads} threads"
    yield compared(f"{what}, mapping", "ms", ms["mapping"], least, ms["least"], NEAR_THE_LEAST)
    yield compared(f"{what}, iterator", "ms", ms["iterator"], "mapping", ms["mapping"], AS_A_MAPPING)
    second = f"{what}, with a second look"
    yield compared(second, "ms", ms["background"], "mapping", ms["mapping"], WITH_A_SECOND_LOOK)
    yield compared(f"{what}, mapping", "ms", ms["mapping"], "copy_ of each tensor, unverified", ms["copy_"])


def _ways(large: Stored, model: Model, given: list[Tensors]) -> dict[str, Measure]:
    sets, paths = cycle(given), cycle(version.path for version in large.versions)
    target = {name: torch.empty_like(value) for name, value in given[0].items()}
    source, copy = Memory(large.nbytes, touched=True), Memory(large.nbytes, touched=True)
    peers = Peers()

    def swap(form: Callable[[Tensors], Any]) -> Measure:
        return lambda: seconds(lambda: model.swap(form(next(sets))))

    def copied() -> None:
        for name, value in next(sets).items():
            target[name].copy_(value)

    return {
        "mapping": swap(dict),
        "iterator": swap(lambda tensors: iter(tensors.items())),
        "background": lambda: seconds(lambda: model.stage(next(sets), background=True).commit()),
        "file": lambda: seconds(lambda: model.swap(next(paths))),
        "least": lambda: seconds(lambda: peers.copy_and_hash(copy, source)),
        "copy_": lambda: seconds(copied),
    }
