"""A Ray cluster of several nodes on this machine, and a fleet on it whose weights say which they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.support.turns import turn
from weightswap_exporter import export, pack

INPUT: NDArray[Any] = np.ones((1, 8), np.float32)


class Numbered(nn.Module):
    """Every output is a multiple of the number that all weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class Files:
    """An artifact, and packed weights by their numbers."""

    def __init__(self, folder: Path, numbers: int) -> None:
        self.folder = folder
        self.artifact = folder / "numbered.artifact"
        model = Numbered()
        export(model, (torch.ones(1, 8),), out=self.artifact)
        self.weights: dict[int, Path] = {}
        self._numbers: dict[str, int] = {}
        for number in range(numbers):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(number)
            packed = pack(model.state_dict(), self.artifact, out=folder / f"{number}.safetensors")
            self.weights[number] = folder / f"{number}.safetensors"
            self._numbers[packed.weights_id] = number

    def number(self, weights_id: str) -> int:
        return self._numbers[weights_id]

    def is_whole(self, output: NDArray[Any], weights_id: str) -> bool:
        """Whether an output is that of the weights which it is said to be of."""
        return bool((output == 8 * 64 * self.number(weights_id) ** 2).all())


@contextmanager
def cluster(nodes: int, cpus: int = 2) -> Iterator[Any]:
    """Several nodes of Ray, each with so many processors to give away; one cluster at a time."""
    with turn("ray"), _cluster(nodes, cpus) as made:
        yield made


@contextmanager
def _cluster(nodes: int, cpus: int) -> Iterator[Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a handle that has outlived its cluster would look for another
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    options = {"num_cpus": cpus, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            made.add_node(**options)
        ray.init(made.address, log_to_driver=False, logging_level="error")
        yield made
        serve.shutdown()
    finally:
        ray.shutdown()
        made.shutdown()
