"""Trial of a model that is split over ranks: on random weights and inputs, all ranks must compute what the whole does.

Shapes cannot tell whether a plan is right. What reads all features between two layers, such as a softmax or a mean,
runs on a part of them as well, and gives other numbers. Here each rank is a thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from weightswap_runtime import Artifact, Ranks, load
from weightswap_runtime.errors import CaptureError, listed, warn
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.process_groups import groups_of_threads
from weightswap_tools.inputs import call_flat, common_sizes, random_values, write_random_weights

from .engine_check import differ, problem_of

MOST_BYTES = 1 << 30  # of random weights
_TIMEOUT = 120.0  # seconds for which a rank waits for another
_Call = tuple[str, str, list[Any], list[Any]]  # the method, the call in words, its inputs and outputs


def try_ranks(whole: Artifact, split: Artifact) -> None:
    """Run both on random weights, and compare the outputs. Raises CaptureError. Warns if nothing could be tried."""
    if whole.manifest.total_bytes > MOST_BYTES:
        _warn(f"its weights take more than {MOST_BYTES >> 30} GB")
        return
    with tempfile.TemporaryDirectory(prefix="weightswap-") as folder:
        weights = Path(folder) / "random.safetensors"
        rng = np.random.default_rng(0)
        write_random_weights(whole.manifest, weights, rng)
        calls = list(_calls(whole, weights, rng))
        if not calls:
            _warn("the whole model answers random inputs with an error")
            return
        problems = list(dict.fromkeys(_problems(split, weights, calls)))
    if problems:
        raise CaptureError(
            f"split as planned, the model computes something else on random weights and inputs: "
            f"{listed(problems, between='; ')}. What reads all features between two layers, such as a softmax, a norm "
            "or a mean, needs them whole: split the layer before it by 'colwise_gather_output', or leave it whole; "
            "layers that are several in one tensor are 'packed_colwise'"
        )


def _warn(reason: str) -> None:
    text = f"whether the ranks compute what the whole model does could not be tried: {reason}; record goldens"
    warn(text)


def _calls(whole: Artifact, weights: Path, rng: np.random.Generator) -> Iterator[_Call]:
    """Yield calls that the whole model answers, with its answers. Raises CaptureError for answers at random."""
    model = load(whole, weights, verify="off")
    with model:
        for name, signature in model.signatures.items():
            for sizes in common_sizes(signature):
                flat = random_values(signature, sizes, rng)
                try:
                    expected, again = (call_flat(model, name, flat) for _ in range(2))
                except Exception:  # it may not accept random inputs
                    continue
                if any(map(differ, expected, again)):
                    raise CaptureError(
                        f"method {name!r}: answers the same inputs in different ways, so it draws random numbers, and "
                        "each rank would draw others. Call model.eval(), or pass random tensors in"
                    )
                yield name, f"{name} with {dict(sizes)}" if sizes else name, flat, expected


def _problems(split: Artifact, weights: Path, calls: Sequence[_Call]) -> Iterator[str]:
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
            for leaf, one, other in zip(outputs, expected, found, strict=True):
                if text := problem_of(one, other):
                    yield f"{where}: {leaf.name}: {text}"
