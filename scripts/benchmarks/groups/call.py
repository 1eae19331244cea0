"""What a call costs over the graph that it runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import Encoder, equal, quiet
from timing import in_turn, per_call
from torch import nn

from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, load

BLOCKS = 4  # for each round
OVERHEAD = Goal("median", "at most", 20)


def rows(settings: Settings) -> Iterator[Row]:
    """A graph that costs next to nothing, and one of a few hundred operators."""
    torch.manual_seed(0)
    blocks = BLOCKS * settings.rounds
    yield from _calls("Linear(16, 16)", nn.Linear(16, 16), torch.randn(1, 16), blocks, calls=500)
    yield from _calls("12-layer encoder", Encoder(), torch.randn(1, 16, 128), blocks, calls=20)


def _calls(name: str, eager: nn.Module, x: torch.Tensor, blocks: int, *, calls: int) -> Iterator[Row]:
    eager.eval()
    with TemporaryDirectory(prefix="weightswap-bench-") as folder, torch.no_grad():
        with quiet():
            program = torch.export.export(eager, (x,))
            artifact = export(eager, (x,), out=Path(folder) / "model.artifact")
        weights = Path(folder) / "model.safetensors"
        pack(eager, artifact, out=weights)
        model = load(artifact, weights)
        bare, module = _bare(artifact, eager), program.module()
        for what, output in (("model", model(x)), ("the bare graph", bare(x)[0]), ("ep.module()", module(x))):
            equal(output, eager(x), f"{name}: {what}")
        subjects: dict[str, Callable[[], object]] = {
            "model": lambda: model(x),
            "bare": lambda: bare(x),
            "eager": lambda: eager(x),
            "module": lambda: module(x),
        }
        taken = in_turn({key: per_call(call, calls) for key, call in subjects.items()}, blocks)
    micros = {key: [second * 1e6 for second in values] for key, values in taken.items()}
    over = [one - other for one, other in zip(micros["model"], micros["bare"], strict=True)]
    yield spread(f"model(x) minus bare graph, {name}", "us", over, OVERHEAD)
    for key, peer in (("bare", "bare graph"), ("eager", "eager module"), ("module", "ep.module()")):
        yield compared(f"model(x), {name}", "us", micros["model"], peer, micros[key])


def _bare(artifact: Artifact, eager: nn.Module) -> Callable[[torch.Tensor], Any]:
    """The artifact's own graph with the weights in place: no checks, no lease, no tree of outputs."""
    method = artifact.manifest.methods["forward"]
    graph = torch.export.load(io.BytesIO(artifact.read(method.graph))).graph_module.forward
    tensors = eager.state_dict()
    weights = [tensors[item.name] for item in method.inputs if item.kind == "weight"]
    if [item.kind for item in method.inputs] != ["weight"] * len(weights) + ["input"]:
        raise ValueError("this benchmark expects a graph of weights and one input")
    return lambda x: graph(*weights, x)
