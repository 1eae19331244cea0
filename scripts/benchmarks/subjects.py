"""Measured models: one of a chosen size, and an encoder whose calls take a significant time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import Artifact, Model
from weightswap_runtime.engines.engine import Bound

LAYERS = 42
EMBEDDED = 1 / 8
CLOSE = 1e-4
PATTERN = 1 << 20


class WrongOutput(Exception):
    """Output of a swapped model that differs from the eager model's."""


class Stack(nn.Module):
    """Embedding and 42 square linear layers that together hold about `nbytes` of float32."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        floats = nbytes / 4
        width = max(32, round((floats * (1 - EMBEDDED) / LAYERS) ** 0.5 / 32) * 32)
        rows = max(64, round((floats - LAYERS * (width + 1) * width) / width))
        self.embedding = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [n]. Returns float32 [n, width]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Table(nn.Module):
    """Embedding that holds about `nbytes`, and a small network: a call takes a millisecond, a staging far longer."""

    def __init__(self, nbytes: int, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max(64, nbytes // (4 * width)), width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [n]. Returns float32 [n, width]."""
        return self.network(self.embedding(tokens.repeat(64)))


class Encoder(nn.Module):
    def __init__(self, width: int = 128, layers: int = 12) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [batch, tokens, width]. Returns the same shape."""
        return self.blocks(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class Version:
    """Weight file, and the eager model's output with these weights for the sample inputs."""

    path: Path
    weights_id: str
    expected: torch.Tensor


@dataclass(frozen=True)
class Stored:
    """Model as an artifact with two weight files, and (if asked for) the first weights as a `torch.save` file."""

    nbytes: int
    artifact: Artifact
    tokens: torch.Tensor
    versions: tuple[Version, Version]
    pickled: Path

    @property
    def size(self) -> str:
        return f"{self.nbytes / 1e9:.2f} GB" if self.nbytes >= 1e8 else f"{self.nbytes / 1e6:.1f} MB"

    def changed(self, share: float, *, scattered: bool) -> Path:
        """Write a weight file in which a share of the bytes differs: adjacent rows of each tensor, or any bytes."""
        tensors = load_file(self.versions[0].path)
        generator = torch.Generator().manual_seed(7)
        for tensor in tensors.values():
            count = -(-int(len(tensor) * share * 1000) // 1000)
            if tensor.ndim == 1 or not count:
                continue
            rows = torch.randperm(len(tensor), generator=generator) if scattered else torch.arange(len(tensor))
            tensor[rows[:count]] *= 0.999
        return pack(
            tensors, self.artifact, out=self.versions[0].path.with_name(f"changed-{scattered}.safetensors")
        ).path

    def check(self, model: Model) -> None:
        """Raise WrongOutput unless the model's output equals eager's bit for bit."""
        [version] = [version for version in self.versions if version.weights_id == model.weights_id]
        equal(model(self.tokens), version.expected, f"{version.path.name}, generation {model.generation}")


def equal(output: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise WrongOutput unless two tensors are equal bit for bit."""
    if not torch.equal(output, expected):
        raise WrongOutput(f"{where}: the output differs from eager's by up to {(output - expected).abs().max()}")


def close(output: np.ndarray[Any, Any] | torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise WrongOutput unless an output is within 1e-4 of the largest value: other engines round in other ways."""
    gap = (torch.as_tensor(output) - expected).abs().max() / expected.abs().max()
    if not gap <= CLOSE:
        raise WrongOutput(f"{where}: the output differs from eager's by {gap} of its largest value")


def stored(nbytes: int, *, pickling: bool = True) -> AbstractContextManager[Stored]:
    return _stored(Stack, nbytes, pickling=pickling)


def tabled(nbytes: int) -> AbstractContextManager[Stored]:
    return _stored(Table, nbytes, pickling=True)


@contextmanager
def _stored(kind: type[Stack | Table], nbytes: int, *, pickling: bool) -> Iterator[Stored]:
    """Files for the weights in a temporary folder (under $TMPDIR), removed when the block ends."""
    with TemporaryDirectory(prefix="weightswap-bench-") as folder, torch.no_grad():
        root = Path(folder)
        with skeleton():
            model = kind(nbytes).eval()
        tokens = torch.arange(4)
        with quiet():
            artifact = export(model, (tokens,), out=root / "stack.artifact")
        with torch.device("meta"):  # initial values would take longer than all the rest
            eager = kind(nbytes).eval()
        _fill(eager.to_empty(device="cpu"), 0)
        pickled = root / "0.pt"
        if pickling:
            torch.save(eager.state_dict(), pickled)
        first = _pack(eager, artifact, tokens, root / "0.safetensors")
        _fill(eager, 1)
        second = _pack(eager, artifact, tokens, root / "1.safetensors")
        yield Stored(artifact.manifest.total_bytes, artifact, tokens, (first, second), pickled)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Run torch's operators on the calling thread only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that torch.export gives about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _pack(model: Stack | Table, artifact: Artifact, tokens: torch.Tensor, path: Path) -> Version:
    packed = pack(model, artifact, out=path)
    return Version(path, packed.weights_id, model(tokens))


def _fill(model: Stack | Table, seed: int) -> None:
    """Random weights at the cost of a copy: one block of normal values, begun elsewhere in each tensor."""
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(PATTERN, generator=generator)
    for number, parameter in enumerate(model.parameters()):
        scale = (2 / parameter.shape[-1]) ** 0.5 if parameter.ndim == 2 else 0.1
        block = pattern.roll(number * 1009) * scale
        for part in parameter.view(-1).split(PATTERN):
            part.copy_(block[: part.numel()])


def bound_of(model: Model) -> Bound:
    """The graph of the weights that are served, as the engine runs it: no lease, no checks, no tree of outputs."""
    version = model._gate.current
    assert version is not None
    return version.session.bound[0]
