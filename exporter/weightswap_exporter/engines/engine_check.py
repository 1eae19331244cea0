"""Trials on random weights and inputs: of files compiled for another engine, and of a model that is split over ranks.

Outputs must be those of the graph, and those of the whole model. Translations for engines are sometimes wrong, and some
end the process that opens them. Their trial therefore runs in a process of its own: `python -m
weightswap_exporter.engines.engine_check FOLDER ENGINE DEVICE` prints a JSON list of problems, or a string that says why
nothing could be tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weightswap_runtime import Artifact, Model, Ranks, load
from weightswap_runtime.errors import CaptureError, WeightswapError, listed, warn
from weightswap_runtime.format.signature import (
    Leaf,
    Signature,
    Sizes,
    Tensor,
    call_arguments,
    flatten,
    input_leaves,
    leaves,
)
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.process_groups import groups_of_threads
from weightswap_runtime.tensors import TensorBytes, as_float64, describe, has_fractions, same_type
from weightswap_tools.inputs import (
    Signs,
    call_flat,
    common_sizes,
    edge_sizes,
    engine_inputs,
    output_contents,
    random_values,
    signs_of,
    write_random_weights,
)

from .index_bounds import index_bounds

MOST_BYTES = 2 << 30  # of random weights
MOST_SPLIT_BYTES = 1 << 30  # the same of a model that all ranks then have in parts in this process
_TIMEOUT = 120.0  # seconds for which a rank waits for another
# relative to an output's largest value; wrong translations are off by more, rounding errors by less
TOLERANCES = {"F64": 1e-4, "F32": 1e-3, "C64": 1e-3, "F16": 3e-2}
COARSE = 0.15  # for dtypes with fewer digits
_Trial = tuple[Sizes, list[Any], Signs, dict[str, str]]
_Outcome = list[tuple[str, Any]]  # of a call: its outputs, and the inputs and state as it left them, with names
_LEFT = " after the call"
_Call = tuple[str, str, list[Any], list[Any]]  # the method, the call in words, its inputs and outputs


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
    with _random_weights(artifact) as (weights, rng):
        ours, theirs = (
            load(artifact.folder, weights, engine=name, device=device, verify="off") for name in ("torch", engine)
        )
        resident = _random_variants(artifact, weights.parent, (ours, theirs), rng)
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
        expected, again = (_outcome(ours, name, flat, variants) for _ in range(2))
    except Exception:
        return  # the model does not accept random inputs
    if any(_differ(one, other) for (_, one), (_, other) in zip(expected, again, strict=True)):
        return  # it draws random numbers
    try:
        found, _ = (_outcome(theirs, name, flat, variants) for _ in range(2))
    except Exception as error:
        yield f"{where}: raised {type(error).__name__}: {error}"
        return
    yield from _problems(where, expected, found)


def _outcome(model: Model, name: str, flat: list[Any], variants: dict[str, str]) -> _Outcome:
    """Call a method from the initial state. Return its outputs, then the inputs and the state as it left them.

    Where a call gives its outputs first and writes afterwards, only later calls would show what it wrote.
    """
    engine, signature = engine_of(model), model.signatures[name]
    inputs = engine_inputs(flat, engine)
    args, kwargs = call_arguments(signature, inputs)
    if variants:
        kwargs["variants"] = variants
    with model.new_context() as context:
        if "context" not in kwargs:  # else the method has an input of that name
            kwargs["context"] = context
        outputs = output_contents(flatten(signature.output, model.method(name)(*args, **kwargs)), engine)
        with context.used() as state:
            after = [(row.name + _LEFT, state.content(row.name)) for row in model.artifact.manifest.state]
    left = output_contents(inputs, engine)
    return [*_named(leaves(signature.output), outputs), *_named(input_leaves(signature), left, _LEFT), *after]


def _named(of: Sequence[Leaf], values: Sequence[Any], suffix: str = "") -> Iterator[tuple[str, Any]]:
    return ((leaf.name + suffix, value) for leaf, value in zip(of, values, strict=True))


def main(folder: str, engine: str, device: str) -> None:
    try:
        result: list[str] | str = list(differences(Artifact.open(folder), engine, device))
    except WeightswapError as error:  # such as a missing operator in this process or on this machine
        result = str(error)
    print(json.dumps(result))


# Ranks. Shapes cannot tell whether a plan is right. What reads all features between two layers, such as a softmax or a
# mean, runs on a part of them as well, and gives other numbers. Here each rank is a thread.


def try_ranks(whole: Artifact, split: Artifact) -> None:
    """Run a model and the same one split over ranks on random weights, and compare the outputs.

    Raises CaptureError. Warns if nothing could be tried.
    """
    if whole.manifest.total_bytes > MOST_SPLIT_BYTES:
        _warn_of_ranks(f"its weights take more than {MOST_SPLIT_BYTES >> 30} GB")
        return
    with _random_weights(whole) as (weights, rng):
        calls = list(_calls(whole, weights, rng))
        if not calls:
            _warn_of_ranks("the whole model answers random inputs with an error")
            return
        problems = list(dict.fromkeys(_rank_problems(split, weights, calls)))
    if problems:
        raise CaptureError(
            f"split as planned, the model computes something else on random weights and inputs: "
            f"{listed(problems, between='; ')}. What reads all features between two layers, such as a softmax, a norm "
            "or a mean, needs them whole: split the layer before it by 'colwise_gather_output', or leave it whole; "
            "layers that are several in one tensor are 'packed_colwise'"
        )


def _warn_of_ranks(reason: str) -> None:
    warn(f"whether the ranks compute what the whole model does could not be tried: {reason}; record goldens")


def _calls(whole: Artifact, weights: Path, rng: np.random.Generator) -> Iterator[_Call]:
    """Yield calls that the whole model answers, with its answers. Raises CaptureError for answers at random."""
    model = load(whole, weights, verify="off")
    with model:
        for name, signature in model.signatures.items():
            for sizes in common_sizes(signature):
                flat = random_values(signature, sizes, rng)
                answers = _answers(model, name, flat)
                if answers is None:
                    continue
                if any(map(_differ, *answers)):
                    raise CaptureError(
                        f"method {name!r}: answers the same inputs in different ways, so it draws random numbers, and "
                        "each rank would draw others. Call model.eval(), or pass random tensors in"
                    )
                yield name, f"{name} with {dict(sizes)}" if sizes else name, flat, answers[0]


def _rank_problems(split: Artifact, weights: Path, calls: Sequence[_Call]) -> Iterator[str]:
    assert split.manifest.ranks is not None
    groups = groups_of_threads(split.manifest.ranks.size)

    def run(group: Any) -> list[list[Any]]:
        model = load(split, weights, verify="off", ranks=Ranks(group, timeout=_TIMEOUT))
        with model:
            return [call_flat(model, method, inputs) for method, _, inputs, _ in calls]

    with ThreadPoolExecutor(len(groups)) as pool:
        answers = list(pool.map(run, groups))
    for of_rank in answers:
        for (method, where, _, expected), found in zip(calls, of_rank, strict=True):
            outputs = leaves(split.manifest.methods[method].signature.output)
            yield from _problems(where, _named(outputs, expected), _named(outputs, found))


# What both trials need.


@contextmanager
def _random_weights(artifact: Artifact) -> Iterator[tuple[Path, np.random.Generator]]:
    """Yield a file with random weights, in a folder that is removed, and the generator that made them."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="weightswap-") as folder:
        weights = Path(folder) / "random.safetensors"
        write_random_weights(artifact.manifest, weights, rng)
        yield weights, rng


def _answers(model: Model, name: str, flat: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """Return the outputs of the same call, made twice; None if the model does not accept these random inputs."""
    try:
        return call_flat(model, name, flat), call_flat(model, name, flat)
    except Exception:
        return None


def _differ(one: Any, other: Any) -> bool:
    """Return whether two outputs are not the same bits."""
    return bool(one.data != other.data if isinstance(one, TensorBytes) else one != other)


def _problems(where: str, expected: Iterable[tuple[str, Any]], found: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for (name, one), (_, other) in zip(expected, found, strict=True):
        if text := _problem_of(one, other):
            yield f"{where}: {name}: {text}"


def _problem_of(expected: Any, found: Any) -> str | None:
    """Return how an output differs from the expected one by more than rounding; None if it does not."""
    if not isinstance(expected, TensorBytes):
        return None if expected == found else f"{found}, expected {expected}"
    if not same_type(expected, found):
        return f"{describe(found)}, expected {describe(expected)}"
    if expected.data == found.data:
        return None
    if not has_fractions(expected.dtype):
        return "other integers"
    one, other = as_float64(expected), as_float64(found)
    finite = np.isfinite(one)
    if not np.isfinite(other[finite]).all():
        return "values that are not finite"
    largest = np.abs(one[finite]).max(initial=0.0)
    worst = np.abs(other[finite] - one[finite]).max(initial=0.0)
    tolerance = TOLERANCES.get(expected.dtype, COARSE)
    return None if worst <= tolerance * largest else f"off by {worst:.3g}, where the largest value is {largest:.3g}"


if __name__ == "__main__":
    main(*sys.argv[1:])
