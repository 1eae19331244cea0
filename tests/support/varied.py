"""Model with every kind of weight that a swap treats differently, and its weights in every kind of file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.blocks import make_blocks_small
from tests.support.loading import Fused
from tests.support.rows import deltas_between
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import Artifact, WeightFile
from weightswap_runtime.format.safetensors import weights_id

SMALL = 64
Origin = tuple[int, ...]  # the set of each weight, in the order of the artifact's table


@contextmanager
def small_blocks(size: int = SMALL) -> Iterator[None]:
    """Use blocks of a few bytes, so that small tensors have many: the same code paths as for gigabytes."""
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch, size)
        yield


class Rich(nn.Module):
    """Model with tied, strided, empty, scalar and computed weights, and state that `count` changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.mix = nn.Linear(20, 8)
        self.fused = Fused(8)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fused(self.mix(self.conv(x).flatten(1)))
        return self.head(y + self.embed.weight.sum(0)) * self.scale + self.empty.sum()

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.mix.bias + self.calls


def filled(seed: int) -> Rich:
    """Return the eager model with the weights of `seed`; every element differs from those of other seeds."""
    generator = torch.Generator().manual_seed(seed)
    model = Rich().eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), model.scale]:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + seed)
    return model


X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)


class RichFiles:
    """Artifact, its weight files, the checkpoints that they came from, and deltas between every two sets."""

    def __init__(self, folder: Path, sets: int) -> None:
        self.folder = folder
        self.models = [filled(seed) for seed in range(sets)]
        methods = {name: MethodSpec(name, (X,)) for name in ("forward", "count")}
        self.artifact: Artifact = export(self.models[0], methods=methods, out=folder / "rich.artifact")
        self.full = [folder / f"full{seed}.safetensors" for seed in range(sets)]
        self.checkpoints = [folder / f"checkpoint{seed}.safetensors" for seed in range(sets)]
        for model, full, checkpoint in zip(self.models, self.full, self.checkpoints, strict=True):
            pack(model, self.artifact, out=full)
            state = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
            safetensors.torch.save_file(state, checkpoint)
        self.deltas = deltas_between(self.full, folder)
        self.names = [weight.name for weight in self.artifact.manifest.weights]
        self._digests = [self._read_digests(full) for full in self.full]
        self._answers: dict[Origin, torch.Tensor] = {}
        self._bytes: dict[Origin, dict[str, bytes]] = {}

    @staticmethod
    def _read_digests(full: Path) -> dict[str, str]:
        with WeightFile(full) as file:
            assert file.stamp is not None
            return file.stamp.digests

    def whole(self, seed: int) -> Origin:
        """Return the origin of a complete set."""
        return (seed,) * len(self.names)

    def mixed(self, origin: Origin, pattern: str, seed: int) -> Origin:
        """Return `origin` with the weights whose names match replaced by those of one set."""
        pairs = zip(self.artifact.manifest.weights, origin, strict=True)
        return tuple(seed if any(fnmatchcase(name, pattern) for name in weight.names) else old for weight, old in pairs)

    def weights_id(self, origin: Origin) -> str:
        rows = zip(self.artifact.manifest.weights, origin, strict=True)
        return weights_id((row.row, self._digests[seed][row.name]) for row, seed in rows)

    def eager(self, origin: Origin) -> torch.Tensor:
        """Return the output of the eager model with these weights."""
        if origin not in self._answers:
            model = Rich().eval()
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            with torch.no_grad():
                for name, seed in zip(self.names, origin, strict=True):
                    tensors[name].copy_(self.tensors(seed)[name])
                self._answers[origin] = model(X)
        return self._answers[origin]

    def arena_bytes(self, origin: Origin) -> dict[str, bytes]:
        """Return the content of an arena with these weights, each in the memory order of the model."""
        if origin not in self._bytes:
            pairs = zip(self.names, origin, strict=True)
            self._bytes[origin] = {name: memory_of(self.tensors(seed)[name]) for name, seed in pairs}
        return self._bytes[origin]

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of one set by FQN."""
        model = self.models[seed]
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def memory_of(tensor: torch.Tensor) -> bytes:
    """Return a dense tensor's bytes in the order of its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.numpy().tobytes()
