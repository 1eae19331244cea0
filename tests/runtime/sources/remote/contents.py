"""Weights behind URLs, and how to read them back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.runtime.sources.remote.answers import INDEX
from tests.support.tiny import TinyArtifact
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.staging.reading import read_tensors
from weightswap_runtime.threads import WorkerThreads

WORKERS = WorkerThreads(3)


def read_all(url: str, values: dict[str, np.ndarray], job: Job | None = None) -> None:
    arena = HostArena(ArenaLayout([NamedTensor(name=name, dtype="U8", shape=v.shape) for name, v in values.items()]))
    with open_weights(url) as opened:
        read_tensors(opened, {name: (name,) for name in values}, arena, WORKERS, job or Job())
    for name, value in values.items():
        assert bytes(arena.view(name)) == value.tobytes()


def random_values(*sizes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {f"t{index}": random.integers(0, 256, size, dtype=np.uint8) for index, size in enumerate(sizes)}


def unstamped(path: Path) -> bytes:
    return path.read_bytes().replace(b'"weightswap"', b'"somethingX"', 1)


def sharded(tiny: TinyArtifact, put: Callable[[str, bytes], object], index: str = INDEX) -> None:
    """Write the weights of seed 2 as an index with two shards, in a folder `hub`."""
    values = {name: value.numpy() for name, value in tiny.values(2).items()}
    shards = {"a.safetensors": ["weight", "tied"], "deep/b c.safetensors": ["bias", "steps"]}
    for name, keys in shards.items():
        put(f"hub/{name}", safetensors.numpy.save({key: values[key] for key in keys}))
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    put(f"hub/{index}", json.dumps({"weight_map": weight_map}).encode())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
