"""`weightswap verify` of an encoder on three engines, compared with one load and call of each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from report import Goal, Row, compared
from settings import Settings
from subjects import Encoder, quiet
from timing import in_turn, seconds

from weightswap_exporter import export, pack

WIDTH, SMALL, TOKENS = 768, 64, 16
ENGINES = ("torch", "aoti", "onnx")
WITHIN_A_MINUTE = Goal("median", "at most", 60)
PROGRAM = "from weightswap_tools.program import main; main()"
RECIPE = """
import sys
sys.path.insert(0, {home!r})
import torch
from subjects import Encoder

def build():
    batch, tokens = torch.export.Dim("batch", max=32), torch.export.Dim("tokens", max=128)
    x = torch.zeros(2, {tokens}, {width})
    return {{"model": Encoder({width}).eval(), "args": (x,), "dynamic_shapes": {{"x": {{0: batch, 1: tokens}}}}}}
"""


def rows(settings: Settings) -> Iterator[Row]:
    """Measure from the shell to the verdict: goldens, parity with the eager model, swaps in both residencies."""
    width = WIDTH if settings.megabytes >= 100 else SMALL
    with TemporaryDirectory(prefix="weightswap-bench-") as name:
        folder = Path(name)
        with quiet():
            megabytes = _prepare(folder, width)
        timings = in_turn({"verify": partial(_verify, folder), "run": partial(_run, folder)}, min(settings.rounds, 3))
    what = f"weightswap verify, 12-layer encoder, {megabytes:.0f} MB, {len(ENGINES)} engines"
    peer = "weightswap run, once for each engine"
    yield compared(what, "s", timings["verify"], peer, timings["run"], WITHIN_A_MINUTE)


def _prepare(folder: Path, width: int) -> float:
    """Write a compiled artifact, weights with goldens, and a recipe. Returns the size of the weights in MB."""
    home = str(Path(__file__).parents[1])
    (folder / "recipe.py").write_text(RECIPE.format(home=home, width=width, tokens=TOKENS))
    torch.manual_seed(0)
    model, x = Encoder(width).eval(), torch.randn(2, TOKENS, width)
    shapes = {"x": {0: torch.export.Dim("batch", max=32), 1: torch.export.Dim("tokens", max=128)}}
    artifact = export(model, (x,), out=folder / "a", dynamic_shapes=shapes, engines=ENGINES[1:])
    packed = pack(model, artifact, out=folder / "v.safetensors", goldens=[(x,)])
    np.savez(folder / "inputs.npz", x=x.numpy())
    return packed.nbytes / 1e6


def _verify(folder: Path) -> float:
    return _command(folder, "verify", "a", "v.safetensors", "--recipe", "recipe.py:build", "--html", "report.html")


def _run(folder: Path) -> float:
    files = ("a", "-w", "v.safetensors", "-i", "inputs.npz")
    return sum(_command(folder, "run", *files, "--engine", engine) for engine in ENGINES)


def _command(folder: Path, *arguments: str) -> float:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return seconds(lambda: subprocess.run(command, cwd=folder, capture_output=True, check=True))
