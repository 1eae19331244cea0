"""Checkpoints in every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.checkpoints import saved, saved_before_zip, saved_distributed, saved_folder, saved_shards

State = dict[str, torch.Tensor]


HOSTILE = "<img src=x onerror=alert(1)>.\x1b[31m[red]"


def some_state() -> State:
    """Return tensors of several dtypes and layouts; the last is tied to the first."""
    state = {
        "embed.weight": torch.randn(10, 4),
        "layers.0.w": torch.randn(4, 6).t(),
        "layers.0.b": torch.randn(5).bfloat16(),
        "layers.1.w": torch.arange(12).view(3, 4)[:, 1:3],
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    return state | {"head.weight": state["embed.weight"]}


FORMS: dict[str, Callable[[Path, State], Path]] = {
    "pt": lambda folder, state: saved(folder / "c.pt", state),
    "below model": lambda folder, state: saved(folder / "c.ckpt", {"model": state, "optimizer": {"state": {0: {}}}}),
    "before torch 1.6": lambda folder, state: saved_before_zip(folder / "c.pth", state),
    "bin shards": lambda folder, state: saved_shards(folder / "shards", state, ".bin"),
    "a folder with a bin": lambda folder, state: saved_folder(folder / "hf", state, ".bin"),
    "distributed": lambda folder, state: saved_distributed(folder / "dcp", dict(state)),
    "distributed, below model": lambda folder, state: saved_distributed(
        folder / "dcp", {"model": dict(state), "optimizer": {"state": {"w": {"exp_avg": torch.ones(9)}}}}
    ),
}


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path
