"""What a context costs: a call with one beside a call of the same arithmetic that remembers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Row, compared
from settings import Settings
from subjects import on_one_thread, quiet
from timing import in_turn, per_call
from torch import nn

from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import load

TENSORS, WIDTH = 24, 64


class Caches(nn.Module):
    """As many tensors of state as a decoder of 12 layers has; `plain` does the same without them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        for index in range(TENSORS):
            self.register_buffer(f"cache_{index}", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        for index in range(TENSORS):
            getattr(self, f"cache_{index}").copy_(y[0])
        return y

    def plain(self, x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        """The same, written into the caller's tensors."""
        y = self.mix(x)
        for other in others:
            other.copy_(y[0])
        return y


def rows(settings: Settings) -> Iterator[Row]:
    """On one thread, by engine."""
    with on_one_thread(), TemporaryDirectory(prefix="weightswap-bench-") as name:
        yield from _rows(settings, Path(name))


def _rows(settings: Settings, folder: Path) -> Iterator[Row]:
    eager, x = Caches().eval(), torch.randn(1, WIDTH)
    others = [torch.zeros(WIDTH) for _ in range(TENSORS)]
    methods = {"forward": MethodSpec("forward", (x,)), "plain": MethodSpec("plain", (x, others))}
    with quiet():
        artifact = export(eager, methods=methods, out=folder / "a.artifact")
    model = load(artifact, pack(eager, artifact, out=folder / "v.safetensors").path)
    context = model.new_context()
    subjects: dict[str, Callable[[], Any]] = {
        "with": partial(model, x, context=context),
        "without": partial(model, x),
        "plain": partial(model.method("plain"), x, others),
    }
    taken = in_turn({what: per_call(subject, 50) for what, subject in subjects.items()}, 4 * settings.rounds)
    micros = {what: [second * 1e6 for second in values] for what, values in taken.items()}
    what = f"model(x, context=...), {TENSORS} tensors of state"
    yield compared(what, "us", micros["with"], "the same without state", micros["plain"])
    yield compared(what, "us", micros["with"], "a fresh state for each call", micros["without"])
