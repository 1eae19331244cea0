"""Calls to compare: the caller's, recorded ones, and generated ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from weightswap_exporter.goldens.calls import GoldenCall, Requested, checked_inputs, wanted_goldens, with_literals
from weightswap_runtime import Artifact
from weightswap_runtime.errors import InputMismatch, ParityError, RecordingError, WeightswapError
from weightswap_runtime.format.goldens import Goldens
from weightswap_runtime.format.signature import Signature, Sizes, call_arguments
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.torch_tensors import copied_tensor
from weightswap_tools.random_inputs import common_sizes, edge_sizes, random_values

from .index_bounds import index_bounds
from .report import Origin

PathLike = str | os.PathLike[str]
Cases = Requested | Literal["goldens", "generated"]
_ADVICE = 'Give a list of (args, kwargs), a dict from methods to such lists, "goldens", "generated" or None.'


class CallCase(NamedTuple):
    """A call to compare, with its arguments also as the graph's flat inputs, all on the CPU."""

    name: str
    origin: Origin
    call: GoldenCall
    flat: list[Any]

    @property
    def may_be_refused(self) -> bool:
        """True if an engine may refuse the call, because it is generated and has an input without elements."""
        return self.origin == "generated" and any(
            isinstance(value, torch.Tensor) and not value.numel() for value in self.flat
        )

    def is_refused(self, error: Exception) -> bool:
        """Return whether an engine that may refuse the call did so with this error."""
        return self.may_be_refused and (isinstance(error, InputMismatch) or not isinstance(error, WeightswapError))

    @property
    def where(self) -> str:
        return f"{self.call.method}, {self.name}"


def calls_to_compare(artifact: Artifact, cases: Cases | None, goldens: Sequence[Goldens], seed: int) -> list[CallCase]:
    """Return the calls that `cases` names; None: those of the goldens, and generated ones. Raises ParityError."""
    if isinstance(cases, str) and cases not in ("goldens", "generated"):
        raise ParityError([f"unknown cases={cases!r}"], _ADVICE)
    if cases is not None and not isinstance(cases, str):
        return _calls_of_user(artifact, cases)
    if type(seed) is not int or seed < 0:
        raise ParityError([f"seed: expected an integer >= 0, got {seed!r:.80}"], "It makes random inputs repeatable.")
    recorded = [] if cases == "generated" else list(recorded_calls(artifact, goldens))
    if cases == "goldens" and not recorded:
        raise ParityError(["there are no goldens for these weights"], "Record them: pack(..., goldens=[...]).")
    return recorded if cases == "goldens" else [*recorded, *_generated(artifact, seed)]


def _calls_of_user(artifact: Artifact, cases: Requested) -> list[CallCase]:
    try:
        request = wanted_goldens(cases, None, artifact.methods)
        assert request is not None
        flat = checked_inputs(request.calls, artifact.manifest)
    except RecordingError as error:
        raise ParityError(error.problems, error.advice) from error
    return [
        CallCase(f"case {number}", "given", with_literals(call, artifact.manifest), values)
        for number, (call, values) in enumerate(zip(request.calls, flat, strict=True))
    ]


def recorded_calls(artifact: Artifact, goldens: Sequence[Goldens]) -> Iterator[CallCase]:
    """Yield each recorded call, whatever weights it was recorded for: only its inputs are used."""
    for file in goldens:
        for number, case in enumerate(file.cases):
            flat = [file.tensors[value] if isinstance(value, str) else value for value in case.inputs]
            name = f"golden {number}{' of the artifact' if file.bundled else ''}"
            yield _call_case(artifact, name, "golden", case.method, flat)


def _generated(artifact: Artifact, seed: int) -> Iterator[CallCase]:
    rng = np.random.default_rng(seed)
    for method, described in artifact.manifest.methods.items():
        bounds = index_bounds(artifact, method)
        for sizes in _sizes(described.signature):
            flat = random_values(described.signature, sizes, rng, bounds)
            name = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
            yield _call_case(artifact, f"random with {name}" if name else "random", "generated", method, flat)


def _sizes(signature: Signature) -> list[Sizes]:
    """Return one set of ordinary sizes, and those at the ends of the ranges."""
    unique = {tuple(sizes.items()): sizes for sizes in (*common_sizes(signature)[:1], *edge_sizes(signature))}
    return list(unique.values())


def _call_case(artifact: Artifact, name: str, origin: Origin, method: str, flat: Sequence[Any]) -> CallCase:
    signature = artifact.manifest.methods[method].signature
    values = [copied_tensor(value) if isinstance(value, TensorBytes) else value for value in flat]
    args, kwargs = call_arguments(signature, values)
    return CallCase(name, origin, GoldenCall(method, args, kwargs), values)
