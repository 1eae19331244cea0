"""Executions of a call: by the eager model, or by an engine with weights. Outputs are flat, in the graph's order."""

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

from .compared_calls import Given, PathLike

GRAPH = "graph"  # the graph itself, run node by node by torch's interpreter


_RANDOM = "Outputs must follow from inputs and weights alone: call model.eval(), and fix what draws random numbers."


class Side(Protocol):
    """One of two executions that are compared."""

    @property
    def name(self) -> str: ...

    def run(self, given: Given) -> list[Any]:
        """Flat outputs, tensors as contents. Raises what the execution raises."""
        ...


class Run(NamedTuple):
    """An engine with the weights of a weight file or checkpoint."""

    weights: PathLike
    engine: str = "torch"

    @property
    def name(self) -> str:
        who = "the graph" if self.engine == GRAPH else f"the engine {self.engine}"
        return f"{who} with {Path(self.weights).name}"


class EngineSide:
    """A run that has been loaded. Each call starts from the initial state."""

    def __init__(self, artifact: Artifact, run: Run, device: str = HOST) -> None:
        """Raises what `load` raises."""
        self.name = run.name
        self._run = run
        chosen: Any = run.engine
        self.model: Model = load(artifact, engine=chosen, device=device, residency="single")
        self._swap()

    def _swap(self) -> None:
        self.model.swap(self._run.weights, verify="off", allow_other_graph=True)

    def run_of(self, method: str) -> Run:
        """The run with the engine that a method has: `torch` where there is no file for another."""
        return self._run._replace(engine=self.model.engines[method])

    def run(self, given: Given) -> list[Any]:
        if self.model.artifact.manifest.state:
            self._swap()
        return call(self.model, given)


def taken(reference: Side, given: Given, artifact: Artifact) -> list[Any] | str:
    """What the reference gives to a call, twice the same; a sentence for a generated one that it refuses.

    Raises ParityError where it refuses another, or gives something else the second time.
    """
    try:
        first, second = reference.run(given), reference.run(given)
    except Exception as error:
        if isinstance(error, WeightswapError) and not given.is_refused(error):
            raise
        text = f"{given.where}: {reference.name} raised {frame_of(error)}{first_line(error)}"
        if given.origin != "generated":
            raise ParityError([text], "Give inputs that the model takes.") from error
        return text
    outputs = leaves(artifact.manifest.methods[given.call.method].signature.output)
    pairs = zip(outputs, first, second, strict=True)
    told = ((leaf.name, run_difference(one, other, reference.name)) for leaf, one, other in pairs)
    if problems := [f"{given.where}, {name}{text}" for name, text in told if text]:
        raise ParityError(problems, _RANDOM)
    return first


def call(model: Model, given: Given) -> list[Any]:
    """Flat outputs, tensors as contents. Raises what the model's engine raises."""
    return call_flat(model, given.call.method, contents_of(given.flat))


@dataclass
class EagerSide:
    """The eager model, in an `eager()` block."""

    name = "the eager model"
    model: nn.Module
    runner: Eager
    artifact: Artifact
    device: str

    def run(self, given: Given, within: AbstractContextManager[object] | None = None) -> list[Any]:
        """within: a block for the model's call. Raises ParityError, too, for other outputs than the graph's."""
        method, args, kwargs = given.call
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
    """The eager model in a `with` block; on another device than the CPU it is a copy of the model.

    functions: a method's name -> the model's attribute, where those differ. Raises ParityError, too, if calls in the
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
    """Raise ParityError if calls have left other weights or constants than there were."""
    if problems := [f"a call of the model has changed {name}, which is no state" for name in runner.changed()]:
        raise ParityError(problems, f"{_RANDOM} Build the model again: its parameters keep what was written to them.")


def initial_state(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The state's initial values by FQN."""
    constants = artifact.constants()
    found: dict[str, torch.Tensor] = {}
    for row in artifact.manifest.state:
        found |= dict.fromkeys(row.names, copied_tensor(constants[row.name]))
    return found
