"""Overhead of a call over the graph that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Goal, Row, compared
from settings import Settings
from subjects import Encoder, bound_of, equal, on_one_thread, quiet
from timing import in_turn, per_call
from torch import nn

from weightswap_exporter import export, pack
from weightswap_runtime import Model, load
from weightswap_runtime.engines.torch_cpu import BoundTorch

BLOCKS = 6
OVERHEAD = Goal("median", "at most", 20)
QUICKER = {"eager": Goal("ratio", "at most", 0.8), "module": Goal("ratio", "at most", 0.7)}


def rows(settings: Settings) -> Iterator[Row]:
    """Measure a graph that costs almost nothing, and one of a few hundred operators.

    On one thread: the overhead does not depend on the threads, but the graph's own time varies less.
    """
    with on_one_thread():
        yield from _calls("Linear(16, 16)", nn.Linear(16, 16), torch.randn(1, 16), BLOCKS * settings.rounds, calls=200)
    yield from encoder(settings)


def encoder(settings: Settings) -> Iterator[Row]:
    """Measure the graph of a few hundred operators."""
    torch.manual_seed(0)
    blocks = BLOCKS * settings.rounds
    with on_one_thread():
        yield from _calls("12-layer encoder", Encoder(), torch.randn(1, 32, 128), blocks, calls=15, goals=QUICKER)
        yield from _prologue(blocks)


def _prologue(blocks: int) -> Iterator[Row]:
    """Measure weights that eager computes from others in each call, here by weight normalisation."""
    eager, x = Encoder().eval(), torch.randn(1, 32, 128)
    for module in [module for module in eager.modules() if isinstance(module, nn.Linear)]:
        nn.utils.parametrizations.weight_norm(module)
    with TemporaryDirectory(prefix="weightswap-bench-") as folder, torch.no_grad():
        with quiet():
            artifact = export(eager, (x,), out=Path(folder) / "model.artifact")
        weights = pack(eager, artifact, out=Path(folder) / "model.safetensors").path
        models = {"with": load(artifact, weights), "without": load(artifact, weights, prologue=False)}
        for name, model in models.items():
            equal(model(x), eager(x), f"{name} prologue")
        timings = in_turn({name: per_call(partial(model, x), 15) for name, model in models.items()}, blocks)
    micros = {name: [second * 1e6 for second in values] for name, values in timings.items()}
    what = "model(x), 12-layer encoder, normalised weights"
    yield compared(what, "us", micros["with"], "prologue=False", micros["without"])


def _calls(
    name: str, eager: nn.Module, x: torch.Tensor, blocks: int, *, calls: int, goals: Mapping[str, Goal] = {}
) -> Iterator[Row]:
    eager.eval()
    with TemporaryDirectory(prefix="weightswap-bench-") as folder, torch.no_grad():
        with quiet():
            program = torch.export.export(eager, (x,))
            artifact = export(eager, (x,), out=Path(folder) / "model.artifact")
        weights = Path(folder) / "model.safetensors"
        pack(eager, artifact, out=weights)
        model = load(artifact, weights)
        bare, module = _bare(model), program.module()
        for what, output in (("model", model(x)), ("the bare graph", bare(x)[0]), ("ep.module()", module(x))):
            equal(output, eager(x), f"{name}: {what}")
        subjects: dict[str, Callable[[], object]] = {
            "model": lambda: model(x),
            "bare": lambda: bare(x),
            "eager": lambda: eager(x),
            "module": lambda: module(x),
        }
        measures = {key: per_call(call, calls) for key, call in subjects.items()}
        # measured apart: another module's calls leave caches in which the next block starts slower
        alone = in_turn({key: measures[key] for key in ("model", "bare")}, blocks)
        timings = in_turn(measures, blocks)
    micros = {key: [second * 1e6 for second in values] for key, values in timings.items()}
    over = [(one - other) * 1e6 for one, other in zip(alone["model"], alone["bare"], strict=True)]
    what = f"model(x) minus bare graph, {name}"
    yield Row(
        what, "us", median(over), len(over), goal=OVERHEAD, peer="bare graph", peer_median=median(alone["bare"]) * 1e6
    )
    for key, peer in (("bare", "bare graph"), ("eager", "eager module"), ("module", "ep.module()")):
        yield compared(f"model(x), {name}", "us", micros["model"], peer, micros[key], goals.get(key))


def _bare(model: Model) -> Callable[[torch.Tensor], Any]:
    """Return the graph with its weights, called as the engine calls it: no checks, no lease, no output tree.

    It is the model's own graph, because a second copy of graph and weights elsewhere in memory runs faster or slower by
    more than the measured overhead.
    """
    bound = bound_of(model)
    assert isinstance(bound, BoundTorch)
    graph = bound._calls["forward"]
    return lambda x: graph([x])
