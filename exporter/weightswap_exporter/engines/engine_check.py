"""Trial of files compiled for another engine: on random weights and inputs, outputs must be those of the graph.

Translations are sometimes wrong, and some end the process that opens them. The trial therefore runs in a process of its
own: `python -m weightswap_exporter.engines.engine_check FOLDER ENGINE DEVICE` prints a JSON list of problems, or a
string that says why nothing could be tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weightswap_runtime import Artifact, Model, load
from weightswap_runtime.errors import CaptureError, WeightswapError, listed, warn
from weightswap_runtime.format.signature import Signature, Sizes, Tensor, input_leaves, leaves
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.tensors import TensorBytes, as_float64, describe, has_fractions, same_type
from weightswap_tools.inputs import (
    Signs,
    call_flat,
    common_sizes,
    edge_sizes,
    random_values,
    signs_of,
    write_random_weights,
)

from .index_bounds import index_bounds

MOST_BYTES = 2 << 30  # of random weights
# relative to an output's largest value; wrong translations are off by more, rounding errors by less
TOLERANCES = {"F64": 1e-4, "F32": 1e-3, "C64": 1e-3, "F16": 3e-2}
COARSE = 0.15  # for dtypes with fewer digits
_Trial = tuple[Sizes, list[Any], Signs, dict[str, str]]


def try_engine(artifact: Artifact, engine: str, device: str) -> None:
    """Run the methods compiled for an engine on random weights, with it and with `torch`, and compare the outputs.

    Raises CaptureError if the outputs differ or the engine ends the process. Warns if nothing could be tried.
    """
    if artifact.manifest.total_bytes > MOST_BYTES:
        _warn(engine, f"its weights take more than {MOST_BYTES >> 30} GB")
        return
    command = [sys.executable, "-m", __name__, str(artifact.path), engine, device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    trial = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if trial.returncode < 0:
        raise CaptureError(
            f"what was compiled for the engine {engine!r} crashes the process that runs it (signal "
            f"{-trial.returncode}). Use the engine 'torch'"
        )
    if trial.returncode:
        _warn(engine, (trial.stderr.strip().splitlines() or ["no reason was given"])[-1])
        return
    problems = json.loads(trial.stdout.splitlines()[-1])
    if isinstance(problems, str):
        _warn(engine, problems.replace(f"{artifact.path}{os.sep}", "").removeprefix(f"{artifact.path}: "))
    elif problems:
        raise CaptureError(
            f"what was compiled for the engine {engine!r} differs from the graph on random weights and inputs: "
            f"{listed(problems, between='; ')}. Use the engine 'torch'"
        )


def _warn(engine: str, reason: str) -> None:
    warn(f"what was compiled for the engine {engine!r} could not be tried: {reason}")


def differences(artifact: Artifact, engine: Any, device: str = HOST) -> Iterator[str]:
    """Yield differences between an engine's outputs and the graph's, for the methods that are compiled for it."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="weightswap-") as folder:
        weights = Path(folder) / "random.safetensors"
        write_random_weights(artifact.manifest, weights, rng)
        ours, theirs = (
            load(artifact.folder, weights, engine=name, device=device, verify="off") for name in ("torch", engine)
        )
        resident = _random_variants(artifact, Path(folder), (ours, theirs), rng)
        for name in (name for name, runs in theirs.engines.items() if runs == engine):
            signature = ours.signatures[name]
            trials = [
                (sizes, random_values(signature, sizes, rng), "", variants)
                for sizes in (*common_sizes(signature), *_ends(signature))
                for variants in (({}, resident) if resident else ({},))
            ]
            trials += _of_one_sign(artifact, name, signature, rng, device)
            for sizes, flat, signs, variants in trials:
                texts = (str(dict(sizes)) if sizes else "", signs, "variants" if variants else "")
                where = " and ".join(filter(None, texts))
                yield from _one_call(name, flat, f"{name} with {where}" if where else name, ours, theirs, variants)


def _ends(signature: Signature) -> list[Sizes]:
    """Return sizes at the ends of the ranges: at 1, engines may drop a dimension; large ones fill vectors."""
    return [sizes for sizes in edge_sizes(signature) if 0 not in sizes.values()] if signature.dims else []


def _of_one_sign(
    artifact: Artifact, name: str, signature: Signature, rng: np.random.Generator, device: str
) -> Iterator[_Trial]:
    if device != HOST and any(
        isinstance(leaf, Tensor) and not has_fractions(leaf.dtype) for leaf in input_leaves(signature)
    ):
        return  # an index out of range would end a process's use of a GPU
    bounds = index_bounds(artifact, name)
    for sizes in (*common_sizes(signature)[:1], *_ends(signature)):
        for signs in signs_of(signature):
            yield sizes, random_values(signature, sizes, rng, bounds, signs), signs, {}


def _random_variants(
    artifact: Artifact, folder: Path, models: tuple[Model, Model], rng: np.random.Generator
) -> dict[str, str]:
    """Add a random variant of each group to the models. Returns their names by group."""
    for group in artifact.manifest.variants:
        path = folder / f"{group}.safetensors"
        write_random_weights(artifact.manifest, path, rng, group)
        for model in models:
            model.add_variant(group, "random", path)
    return dict.fromkeys(artifact.manifest.variants, "random")


def _one_call(
    name: str, flat: list[Any], where: str, ours: Model, theirs: Model, variants: dict[str, str]
) -> Iterator[str]:
    try:
        expected, again = (call_flat(ours, name, flat, variants) for _ in range(2))
    except Exception:  # the model may not accept random inputs
        return
    if not ours.artifact.manifest.state and any(map(differ, expected, again)):
        return  # the model draws random numbers
    try:
        found, again = (call_flat(theirs, name, flat, variants) for _ in range(2))
    except Exception as error:
        yield f"{where}: raised {type(error).__name__}: {error}"
        return
    for leaf, one, other in zip(leaves(ours.signatures[name].output), expected, found, strict=True):
        if text := problem_of(one, other):
            yield f"{where}: {leaf.name}: {text}"


def differ(one: Any, other: Any) -> bool:
    """Return whether two outputs are not the same bits."""
    return bool(one.data != other.data if isinstance(one, TensorBytes) else one != other)


def problem_of(expected: Any, found: Any) -> str | None:
    """Return how an output differs from the expected one by more than rounding; None if it does not."""
    if not isinstance(expected, TensorBytes):
        return None if expected == found else f"{found}, expected {expected}"
    if not same_type(expected, found):
        return f"{describe(found)}, expected {describe(expected)}"
    if not has_fractions(expected.dtype):
        return None if expected.data == found.data else "other integers"
    one, other = as_float64(expected), as_float64(found)
    finite = np.isfinite(one)
    if not np.isfinite(other[finite]).all():
        return "values that are not finite"
    largest = np.abs(one[finite]).max(initial=0.0)
    worst = np.abs(other[finite] - one[finite]).max(initial=0.0)
    tolerance = TOLERANCES.get(expected.dtype, COARSE)
    return None if worst <= tolerance * largest else f"off by {worst:.3g}, where the largest value is {largest:.3g}"


def main(folder: str, engine: str, device: str) -> None:
    try:
        result: list[str] | str = list(differences(Artifact.open(folder), engine, device))
    except WeightswapError as error:  # such as a missing operator in this process or on this machine
        result = str(error)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
