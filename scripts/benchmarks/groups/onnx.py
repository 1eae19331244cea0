"""Engine `onnx` compared with ONNX Runtime with weights inside, a rebuilt session, and torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import torch
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import Encoder, close, quiet
from timing import in_turn, per_call, seconds
from torch.export import Dim

from weightswap_exporter import export, export_onnx, pack
from weightswap_runtime import Model, load

WIDTH, TOKENS = 256, (2, 64, 256)
NEAR = Goal("ratio", "at most", 1.1)
TWENTIETH = Goal("ratio", "at most", 1 / 20)
THIRD = Goal("ratio", "at most", 1 / 3)
SOON = Goal("median", "at most", 500)
MOST_ROUNDS = 5


def rows(settings: Settings) -> Iterator[Row]:
    """Measure a 12-layer encoder, 38 MB, on one thread, and the cold start of the same model."""
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="weightswap-bench-") as name, torch.no_grad():
        folder = Path(name)
        models = [Encoder(WIDTH).eval() for _ in range(2)]
        shapes = {"x": {1: Dim("tokens", max=512)}}
        with quiet():
            artifact = export(
                models[0],
                (torch.zeros(1, 64, WIDTH),),
                out=folder / "a.artifact",
                dynamic_shapes=shapes,
                engines=["onnx"],
            )
        files = [folder / f"v{index}.safetensors" for index in range(len(models))]
        for model, file in zip(models, files, strict=True):
            pack(model, artifact, out=file)
        pointing = [export_onnx(artifact, file, out=file.with_suffix(".onnx")) for file in files]
        served = load(artifact, files[0], engine="onnx", threads=1)
        yield from _calls(served, pointing[0], models[0], settings.rounds)
        yield from _swaps(served, files, pointing, settings.rounds)
        yield from _cold_start(folder, min(settings.rounds, MOST_ROUNDS))


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _calls(served: Model, path: Path, eager: Encoder, rounds: int) -> Iterator[Row]:
    """Measure `model(x)` against a session with the weights as its initialisers."""
    peer = _session(path)
    for tokens in TOKENS:
        x = torch.randn(1, tokens, WIDTH)
        array = x.numpy()
        for what, output in (("model", served(array)), ("session", peer.run(None, {"x": array})[0])):
            close(output, eager(x), f"{what}, {tokens} tokens")
        subjects: dict[str, Callable[[], object]] = {
            "model": partial(served, array),
            "session": lambda array=array: peer.run(None, {"x": array}),  # type: ignore[misc]
        }
        timings = in_turn({name: per_call(call, 8) for name, call in subjects.items()}, 4 * rounds)
        micros = {name: [second * 1e6 for second in values] for name, values in timings.items()}
        goal = NEAR if tokens == 64 else None
        what = f"model(x), engine onnx, 12 layers, {tokens} tokens"
        yield compared(what, "us", micros["model"], "ONNX Runtime, weights inside", micros["session"], goal)


def _swaps(served: Model, files: list[Path], pointing: list[Path], rounds: int) -> Iterator[Row]:
    """Measure from a file to the next answer, and the commit alone, against building a session of that file."""
    served.swap(files[1])  # for a rollback
    ours, theirs = itertools.cycle(files), itertools.cycle(pointing)
    measures = {
        "swap": lambda: seconds(lambda: served.swap(next(ours))),
        "commit": lambda: seconds(served.rollback),  # a commit that reads no file
        "rebuild": lambda: seconds(lambda: _session(next(theirs))),
    }
    millis = {name: [second * 1e3 for second in values] for name, values in in_turn(measures, 4 * rounds).items()}
    size = f"{files[0].stat().st_size / 1e6:.0f} MB"
    for what, goal in (("swap", TWENTIETH), ("commit", None)):
        peer = "a new InferenceSession"
        yield compared(f"{what} {size}, engine onnx", "ms", millis[what], peer, millis["rebuild"], goal)


def _cold_start(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure `weightswap run` from process start to its end."""
    np.savez(folder / "inputs.npz", x=np.zeros((1, 2, WIDTH), np.float32))
    program = "from weightswap_tools.program import main; main()"
    files = [str(folder / name) for name in ("a.artifact", "v0.safetensors", "inputs.npz")]
    command = [sys.executable, "-c", program, "run", files[0], "-w", files[1], "-i", files[2], "--engine"]
    measures = {
        engine: partial(seconds, partial(subprocess.run, [*command, engine], capture_output=True, check=True))
        for engine in ("onnx", "torch")
    }
    timings = {name: [second * 1e3 for second in values] for name, values in in_turn(measures, rounds).items()}
    yield spread("weightswap run --engine onnx, start to end", "ms", timings["onnx"], SOON)
    yield compared(
        "weightswap run --engine onnx, start to end", "ms", timings["onnx"], "--engine torch", timings["torch"], THIRD
    )
