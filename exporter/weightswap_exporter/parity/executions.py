"""Calls to compare, and the two sides that run them: the eager model, or an engine with a weight file."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from weightswap_exporter.checkpoints.tensor import contents_of
from weightswap_exporter.engines.index_bounds import index_bounds
from weightswap_exporter.goldens import (
    Eager,
    GoldenCall,
    Requested,
    checked_inputs,
    eager,
    run_difference,
    wanted_goldens,
    with_literals,
)
from weightswap_exporter.modules.stand_ins import first_line, frame_of
from weightswap_exporter.modules.tensors import ModelView
from weightswap_runtime import Model, load
from weightswap_runtime.errors import InputMismatch, ParityError, WeightswapError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Goldens
from weightswap_runtime.format.signature import Signature, Sizes, call_arguments, leaves
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.torch_tensors import copied_tensor
from weightswap_tools.inputs import Signs, call_flat, common_sizes, edge_sizes, random_values, signs_of

from .report import Origin

GRAPH = "graph"  # the graph itself, run node by node by torch's interpreter
PathLike = str | os.PathLike[str]
Cases = Requested | Literal["goldens", "generated"]
_ADVICE = 'Give a list of (args, kwargs), a dict from methods to such lists, "goldens", "generated" or None.'
_RANDOM = "Outputs must follow from inputs and weights alone: call model.eval(), and remove random draws."


class CallCase(NamedTuple):
    """A call to compare."""

    name: str
    origin: Origin
    call: GoldenCall
    flat: list[Any]  # its arguments as the graph's flat inputs, on the CPU

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
    except ParityError as error:
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
        for sizes, signs in _inputs(described.signature):
            flat = random_values(described.signature, sizes, rng, bounds, signs)
            name = " and ".join(filter(None, (signs, ", ".join(f"{dim}={size}" for dim, size in sizes.items()))))
            yield _call_case(artifact, f"random with {name}" if name else "random", "generated", method, flat)


def _inputs(signature: Signature) -> Iterator[tuple[Sizes, Signs]]:
    """Yield ordinary sizes, those at the ends of the ranges, and ordinary sizes with values of one sign."""
    sizes = _sizes(signature)
    yield from ((one, "") for one in sizes)
    yield from ((one, signs) for one in sizes[:1] for signs in signs_of(signature))


def _sizes(signature: Signature) -> list[Sizes]:
    """Return one set of ordinary sizes, and those at the ends of the ranges."""
    unique = {tuple(sizes.items()): sizes for sizes in (*common_sizes(signature)[:1], *edge_sizes(signature))}
    return list(unique.values())


def _call_case(artifact: Artifact, name: str, origin: Origin, method: str, flat: Sequence[Any]) -> CallCase:
    signature = artifact.manifest.methods[method].signature
    values = [copied_tensor(value) if isinstance(value, TensorBytes) else value for value in flat]
    args, kwargs = call_arguments(signature, values)
    return CallCase(name, origin, GoldenCall(method, args, kwargs), values)


# The two sides of a comparison.


class Run(NamedTuple):
    """An engine, and the weight file or checkpoint that it runs with."""

    weights: PathLike
    engine: str = "torch"

    @property
    def name(self) -> str:
        subject = "the graph" if self.engine == GRAPH else f"the engine {self.engine}"
        return f"{subject} with {Path(self.weights).name}"


class EngineSide:
    """A loaded run. Each call starts from the initial state."""

    def __init__(self, artifact: Artifact, run: Run, device: str = HOST) -> None:
        """Load the model and its weights. Raises the errors of `load` and `Model.swap`."""
        self.name = run.name
        self._run = run
        engine: Any = run.engine
        self.model: Model = load(artifact, engine=engine, device=device, residency="single")
        self._swap()

    def _swap(self) -> None:
        self.model.swap(self._run.weights, verify="off", allow_other_graph=True)

    def run_of(self, method: str) -> Run:
        """Return the run with the engine that runs the method: `torch` if the artifact has no file for another."""
        return self._run._replace(engine=self.model.engines[method])

    def run(self, case: CallCase) -> list[Any]:
        if self.model.artifact.manifest.state:
            self._swap()
        return call(self.model, case)


def call(model: Model, case: CallCase) -> list[Any]:
    """Return flat outputs, with tensors as `TensorBytes`. Raises the errors of the engine."""
    return call_flat(model, case.call.method, contents_of(case.flat))


@dataclass
class EagerSide:
    """The eager model inside an `eager()` block."""

    name = "the eager model"
    model: nn.Module
    runner: Eager
    artifact: Artifact
    device: str

    def run(self, case: CallCase, within: AbstractContextManager[object] | None = None) -> list[Any]:
        """Run a case, with the call alone inside `within`. Raises ParityError, too, for outputs unlike the graph's."""
        method, args, kwargs = case.call
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), (args, kwargs))
        outputs = self.runner.run(method, args, kwargs, within)
        names = [leaf.name for leaf in leaves(self.artifact.manifest.methods[method].signature.output)]
        if outputs.names != names:
            raise ParityError(
                [f"{method}: the graph gives {', '.join(names)}, the model {', '.join(outputs.names)}"],
                "Compare with the model that was exported, or export it again.",
            )
        return contents_of(outputs.values)


Side = EagerSide | EngineSide
"""One of two executions that are compared."""


@contextmanager
def eager_side(
    model: nn.Module, artifact: Artifact, functions: Mapping[str, str] | None, device: str
) -> Iterator[EagerSide]:
    """Prepare the eager model for calls inside a `with` block; on devices other than the CPU, a copy of it.

    functions: the model's attribute for each method whose name differs. Raises ParityError on exit if calls in the
    block have changed the model's weights or constants.
    """
    placed = model if device == HOST else copy.deepcopy(model).to(device)
    with eager(ModelView(placed), functions or {}, initial_state(artifact)) as runner:
        try:
            yield EagerSide(placed, runner, artifact, device)
        except ParityError:
            _check_unchanged(runner)
            raise
        _check_unchanged(runner)


def _check_unchanged(runner: Eager) -> None:
    if problems := [f"a call of the model changed {name}, which is not state" for name in runner.changed()]:
        raise ParityError(problems, f"{_RANDOM} Build the model again: its parameters keep what was written to them.")


def initial_state(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Return the initial values of the state by FQN."""
    constants = artifact.constants()
    state: dict[str, torch.Tensor] = {}
    for row in artifact.manifest.state:
        state |= dict.fromkeys(row.names, copied_tensor(constants[row.name]))
    return state


def repeatable_outputs(reference: Side, case: CallCase, artifact: Artifact) -> list[Any] | str:
    """Run a case twice and return its outputs, or for a generated case that the reference refuses the reason.

    Raises ParityError if the reference refuses any other case, or if the two runs differ.
    """
    try:
        first, second = reference.run(case), reference.run(case)
    except Exception as error:
        if isinstance(error, WeightswapError) and not case.is_refused(error):
            raise
        text = f"{case.where}: {reference.name} raised {frame_of(error)}{first_line(error)}"
        if case.origin != "generated":
            raise ParityError([text], "Give inputs that the model takes.") from error
        return text
    outputs = leaves(artifact.manifest.methods[case.call.method].signature.output)
    pairs = zip(outputs, first, second, strict=True)
    differences = ((leaf.name, run_difference(one, other, reference.name)) for leaf, one, other in pairs)
    if problems := [f"{case.where}, {name}{text}" for name, text in differences if text]:
        raise ParityError(problems, _RANDOM)
    return first
