"""Cost of variants: adding one of 1 % of the weights, compared with a full swap, and choosing one in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Goal, Row, compared
from safetensors.torch import save_file
from settings import Settings
from subjects import on_one_thread, quiet
from timing import in_turn, per_call
from torch import nn

from weightswap_exporter import export, pack
from weightswap_runtime import Model, load

LAYERS, WIDTH, SMALL = 28, 1024, 16
SHARE = 200  # a layer's width over twice its rank: A and B are 1 % of the layer
ADDING = Goal("ratio", "at most", 0.02)
CHOOSING = Goal("median", "at most", 10.0)


class Tuned(nn.Module):
    """Layers with LoRA's two matrices, of 1 % of their size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rank = max(1, width // SHARE)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.lora_a = nn.ParameterList(torch.randn(width, rank) / width for _ in range(LAYERS))
        self.lora_b = nn.ParameterList(torch.zeros(rank, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, a, b in zip(self.layers, self.lora_a, self.lora_b, strict=True):
            x = torch.tanh(layer(x) + x @ a @ b)
        return x


class Small(Tuned):
    """Model with as many variable tensors, whose call computes almost nothing with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + torch.cat([*self.lora_a, *(b.T for b in self.lora_b)]).sum()


def rows(settings: Settings) -> Iterator[Row]:
    """Measure adding with all processors, and choosing on one thread."""
    with TemporaryDirectory(prefix="weightswap-bench-") as name:
        width = int((settings.megabytes * 1e6 / 4 / LAYERS) ** 0.5)
        yield _adding(settings, *_served(Path(name, "large"), Tuned(width)))
        with on_one_thread():
            yield _choosing(settings, *_served(Path(name, "small"), Small(SMALL)))


def _served(folder: Path, eager: Tuned) -> tuple[Model, Path, Path, torch.Tensor]:
    """Return a model, its weights, a variant of it, and an input."""
    folder.mkdir()
    x = torch.randn(1, eager.layers[0].in_features)
    with quiet():
        artifact = export(eager.eval(), (x,), out=folder / "a.artifact", variants={"lora": "lora_*"})
    weights = pack(eager, artifact, out=folder / "v.safetensors").path
    rows = artifact.manifest.variants["lora"]
    save_file({row.name: torch.randn(row.shape) for row in rows}, folder / "variant.safetensors")
    return load(artifact, weights, residency="single"), weights, folder / "variant.safetensors", x


def _adding(settings: Settings, model: Model, weights: Path, variant: Path, _: torch.Tensor) -> Row:
    subjects: dict[str, Callable[[], Any]] = {
        "add": partial(model.add_variant, "lora", "one", variant),
        "swap": partial(model.swap, weights),
    }
    timings = in_turn({what: per_call(subject, 1) for what, subject in subjects.items()}, settings.rounds)
    millis = {what: [second * 1e3 for second in values] for what, values in timings.items()}
    share = variant.stat().st_size / weights.stat().st_size
    what = f"add_variant, {share:.1%} of {weights.stat().st_size / 1e6:.0f} MB"
    return compared(what, "ms", millis["add"], "a full swap", millis["swap"], ADDING)


def _choosing(settings: Settings, model: Model, _: Path, variant: Path, x: torch.Tensor) -> Row:
    model.add_variant("lora", "one", variant)
    choice = {"lora": "one"}
    subjects: dict[str, Callable[[], Any]] = {
        "chosen": partial(model, x, variants=choice),
        "base": partial(model, x),
    }
    timings = in_turn({what: per_call(subject, 200) for what, subject in subjects.items()}, 4 * settings.rounds)
    more = [(one - other) * 1e6 for one, other in zip(timings["chosen"], timings["base"], strict=True)]
    base = [second * 1e6 for second in timings["base"]]
    return compared(f"choosing {2 * LAYERS} tensors in a call, added", "us", more, "the call itself", base, CHOOSING)
