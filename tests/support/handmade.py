"""Goldens made by hand from the specification of their format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from blake3 import blake3

from tests.support.services import weights_id_of
from tests.support.sessions import bound_of
from tests.support.tiny import TinyArtifact, X
from weightswap_runtime import Artifact, GoldenMismatch, load
from weightswap_runtime.engines.torch_cpu import TorchEngine, environment_here
from weightswap_runtime.format.goldens import Goldens, open_goldens
from weightswap_runtime.format.weight_set import goldens_path
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.staging.golden_check import verify

Document = dict[str, Any]


def change(path: tuple[str | int, ...], value: object) -> Callable[[Document], None]:
    """Return a function that changes a part of a document; None removes it."""

    def apply(document: Document) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        if value is None:
            del target[path[-1]]
        else:
            target[path[-1]] = value

    return apply


Y = TinyArtifact.eager(1, X)


def digest(tensor: torch.Tensor) -> str:
    return blake3(tensor.contiguous().numpy().tobytes()).hexdigest()


def hand_made(tiny: TinyArtifact, path: Path, **tensors: torch.Tensor) -> tuple[dict[str, torch.Tensor], Document]:
    """Return the tensors and metadata of goldens with one case for the weights of seed 1."""
    environment = environment_here()
    tensors = {"0.input.0": X, "0.output.0": Y} | tensors
    return tensors, {
        "format_version": 1,
        "graph_id": tiny.manifest.graph_id,
        "weights_id": load(tiny.path, tiny.write(path / "v1.safetensors", tiny.values(1))).weights_id,
        "environment": msgspec.to_builtins(environment),
        "tolerance": None,
        "cases": [{"method": "forward", "inputs": ["0.input.0"], "outputs": ["0.output.0"]}],
        "digests": {name: digest(tensor) for name, tensor in tensors.items()},
    }


def written(path: Path, tensors: dict[str, torch.Tensor], document: object) -> Path:
    text = document if isinstance(document, str) else json.dumps(document)
    safetensors.torch.save_file(tensors, path, {"weightswap": text})
    return path


def goldens_beside(tiny: TinyArtifact, weights: Path, seed: int) -> Path:
    """Write goldens beside the weights of a seed."""
    tensors, document = hand_made(tiny, weights.parent, **{"0.output.0": TinyArtifact.eager(seed, X)})
    return written(goldens_path(weights), tensors, document | {"weights_id": weights_id_of(weights)})


class Stage:
    """Session of the tiny artifact with the weights of seed 1, and goldens for them."""

    def __init__(self, tiny: TinyArtifact, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        self.tensors, self.document = hand_made(tiny, folder)
        self.path = folder / "v1.goldens.safetensors"

    def model(self, seed: int = 1) -> Model:
        return load(self.tiny.path, self.tiny.write(self.folder / "s.safetensors", self.tiny.values(seed)))

    def open(self, **tensors: torch.Tensor) -> Goldens:
        tensors = self.tensors | tensors
        document = self.document | {"digests": {name: digest(tensor) for name, tensor in tensors.items()}}
        return open_goldens(written(self.path, tensors, document), self.tiny.manifest)

    def verify(self, goldens: Goldens, seed: int = 1, engine: TorchEngine | None = None, **options: Any) -> str:
        model = self.model(seed)
        judged = bound_of(model), engine or engine_of(model), self.tiny.manifest, str(model.weights_id)
        return verify(goldens, *judged, **options)

    def judge(self, probe: Probe, **options: Any) -> str:
        """Verify the goldens on a probe instead of a session of the torch engine."""
        engine = TorchEngine(Artifact.open(self.tiny.path))
        return verify(self.open(), probe, engine, self.tiny.manifest, self.document["weights_id"], **options)

    def refusal(self, goldens: Goldens, seed: int = 1, **options: Any) -> tuple[str, ...]:
        with pytest.raises(GoldenMismatch) as refused:
            self.verify(goldens, seed, **options)
        assert str(self.path) in str(refused.value)
        return refused.value.problems


class Probe:
    """Fake session that records its calls."""

    def __init__(self, run: Callable[[], list[Any]]) -> None:
        self.done: list[str] = []
        self._run = run

    def run(self, method: str, inputs: list[Any], state: Any = None, chosen: Any = None) -> list[Any]:
        self.done.append("run without a state" if state is None else "run")
        self.inputs = inputs
        return self._run()
