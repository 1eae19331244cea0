"""Executions of calls, by the eager model or by an engine with weights. Outputs are flat, in the graph's order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from weightswap_exporter.checkpoints.tensor import contents_of
from weightswap_exporter.goldens.eager import Eager, eager
from weightswap_exporter.goldens.recording import run_difference
from weightswap_exporter.models.user_errors import first_line, frame_of
from weightswap_runtime import Artifact, Model, load
from weightswap_runtime.errors import ParityError, WeightswapError
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.tensors.torch_tensors import copied_tensor
from weightswap_tools.call_inputs import call_flat

from .compared_calls import CallCase, PathLike

GRAPH = "graph"  # the graph itself, run node by node by torch's interpreter
_RANDOM = "Outputs must follow from inputs and weights alone: call model.eval(), and remove random draws."


class Side(Protocol):
    """One of two executions that are compared."""

    @property
    def name(self) -> str: ...

    def run(self, case: CallCase) -> list[Any]:
        """Return flat outputs, with tensors as `TensorBytes`. Raises the errors of the execution."""
        ...


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
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._moved, (args, kwargs))
        outputs = self.runner.run(method, args, kwargs, within)
        names = [leaf.name for leaf in leaves(self.artifact.manifest.methods[method].signature.output)]
        if outputs.names != names:
            raise ParityError(
                [f"{method}: the graph gives {', '.join(names)}, the model {', '.join(outputs.names)}"],
                "Compare with the model that was exported, or export it again.",
            )
        return contents_of(outputs.values)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


@contextmanager
def eager_side(
    model: nn.Module, artifact: Artifact, functions: Mapping[str, str] | None, device: str
) -> Iterator[EagerSide]:
    """Prepare the eager model for calls inside a `with` block; on devices other than the CPU, a copy of it.

    functions: the model's attribute for each method whose name differs. Raises ParityError on exit if calls in the
    block have changed the model's weights or constants.
    """
    placed = model if device == HOST else copy.deepcopy(model).to(device)
    with eager(placed, functions or {}, initial_state(artifact)) as runner:
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
