"""Cost of contexts: overhead of a call, compared with a fresh state for each; the memory of several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Goal, Row, compared
from settings import Settings
from subjects import bound_of, on_one_thread, quiet
from timing import in_turn, per_call
from torch import nn

from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import load

TENSORS, WIDTH = 24, 64
PAGE = os.sysconf("SC_PAGE_SIZE")
BASE, ROWS, MEMBERS = 4096, 64, 8
ADDED = Goal("median", "at most", 10)
TOGETHER = Goal("ratio", "at most", 1.2)


class Caches(nn.Module):
    """Model with the state tensors of a decoder of 12 layers; `plain` has none, and as many operators."""

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

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        for _ in range(TENSORS):
            y = y + y[0]
        return y


class Fitted(nn.Module):
    """Model with a large base, and keys of `ROWS` training rows that a fit stores."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(BASE, BASE)
        self.register_buffer("keys", torch.zeros(ROWS, BASE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.copy_(self.encode(x))
        return self.keys.sum(1)


def rows(settings: Settings) -> Iterator[Row]:
    """Measure calls on one thread, and memory."""
    with on_one_thread(), TemporaryDirectory(prefix="weightswap-bench-") as name:
        yield from _rows(settings, Path(name))
        yield _memory(Path(name, "fitted"))


def _rows(settings: Settings, folder: Path) -> Iterator[Row]:
    eager, x = Caches().eval(), torch.randn(1, WIDTH)
    methods = {"forward": MethodSpec("forward", (x,)), "plain": MethodSpec("plain", (x,))}
    with quiet():
        artifact = export(eager, methods=methods, out=folder / "a.artifact")
    model = load(artifact, pack(eager, artifact, out=folder / "v.safetensors").path)
    context = model.new_context()
    bound, state = bound_of(model), context._state
    subjects: dict[str, Callable[[], Any]] = {
        "with": partial(model, x, context=context),
        "with, bare": partial(bound.run, "forward", [x], state),
        "plain": partial(model.method("plain"), x),
        "plain, bare": partial(bound.run, "plain", [x]),
        "fresh": partial(model, x),
    }
    timings = in_turn({what: per_call(subject, 50) for what, subject in subjects.items()}, 4 * settings.rounds)
    micros = {what: [second * 1e6 for second in values] for what, values in timings.items()}
    what = f"model(x, context=...), {TENSORS} tensors of state"
    over = {
        kind: [one - bare for one, bare in zip(micros[kind], micros[f"{kind}, bare"], strict=True)]
        for kind in ("with", "plain")
    }
    added = [one - other for one, other in zip(over["with"], over["plain"], strict=True)]
    peer = "what a call without state adds to its graph"
    yield Row(
        f"{what}, minus its graph, and minus a call without",
        "us",
        median(added),
        len(added),
        goal=ADDED,
        peer=peer,
        peer_median=median(over["plain"]),
    )
    yield compared(what, "us", micros["with"], "a fresh state for each call", micros["fresh"])


def _memory(folder: Path) -> Row:
    """Measure resident memory of fitted members over one base, compared with one member."""
    eager, x = Fitted().eval(), torch.randn(ROWS, BASE)
    with quiet():
        artifact = export(eager, (x,), out=folder / "a.artifact")
    weights = pack(eager, artifact, out=folder / "v.safetensors").path
    before = _resident()
    model = load(artifact, weights)
    members, resident = [], []
    for _ in range(MEMBERS):
        members.append(model.new_context())
        model(x, context=members[-1])
        resident.append((_resident() - before) / 1e6)
    what = f"{MEMBERS} fitted members over one base of {BASE**2 * 4 / 1e6:.0f} MB"
    return compared(what, "MB", resident[-1:], "one member", resident[:1], TOGETHER)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
