"""Engine `aoti` compared with AOTInductor with constant weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Goal, Row, compared
from settings import Settings
from subjects import Encoder, close, on_one_thread, quiet
from timing import in_turn, per_call

from weightswap_exporter import export, pack
from weightswap_runtime import load

WIDTH, TOKENS = 128, 32
NEAR = Goal("ratio", "at most", 1.03)


def rows(settings: Settings) -> Iterator[Row]:
    """Measure a 12-layer encoder, through `model(x)`, on one thread."""
    with on_one_thread(), torch.no_grad():
        yield from _rows(settings)


def _rows(settings: Settings) -> Iterator[Row]:
    torch.manual_seed(0)
    eager, x = Encoder(WIDTH).eval(), torch.randn(1, TOKENS, WIDTH)
    with TemporaryDirectory(prefix="weightswap-bench-") as name:
        folder = Path(name)
        with quiet():
            artifact = export(eager, (x,), out=folder / "a.artifact", engines=["aoti"])
            bare = _bare(eager, x, folder / "bare.pt2")
        weights = pack(eager, artifact, out=folder / "v.safetensors").path
        model, reader = load(artifact, weights, engine="aoti"), load(artifact, weights)
        subjects: dict[str, Callable[[], Any]] = {
            "model": partial(model, x),
            "bare": partial(bare, x),
            "torch": partial(reader, x),
        }
        for what, subject in subjects.items():
            close(subject(), eager(x), what)
        timings = in_turn({what: per_call(subject, 15) for what, subject in subjects.items()}, 6 * settings.rounds)
    micros = {what: [second * 1e6 for second in values] for what, values in timings.items()}
    what = f"model(x), engine aoti, 12 layers, {TOKENS} tokens"
    yield compared(what, "us", micros["model"], "AOTInductor, weights inside", micros["bare"], NEAR)
    yield compared(what, "us", micros["model"], "engine torch", micros["torch"])


def _bare(eager: Encoder, x: torch.Tensor, path: Path) -> Callable[[torch.Tensor], Any]:
    """Compile the usual way: the weights are in the package."""
    program = torch.export.export(eager, (x,))
    compiled = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    runner: Callable[[torch.Tensor], Any] = torch._inductor.aoti_load_package(compiled)
    return runner
