"""Recording of goldens: calls of the eager model with the user's inputs, and their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weightswap_exporter.checkpoints.tensor import content_of, contents_of, dtype_of, pieces
from weightswap_exporter.models.tensors import is_fake, named_tensors
from weightswap_exporter.models.user_errors import first_line, frame_of
from weightswap_runtime.engines.torch.cpu import environment_here
from weightswap_runtime.errors import RecordingError
from weightswap_runtime.format.goldens import Environment, encode_goldens
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.recorded_call import Case, Value, type_problem
from weightswap_runtime.format.signature import Integer, Leaf, Literal, Tensor, input_leaves, leaves
from weightswap_runtime.format.weight_file import weights_id
from weightswap_runtime.tensors.comparing import Tolerance, difference
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.digests import digest_of
from weightswap_runtime.tensors.dtypes import TensorType, describe, same_type
from weightswap_runtime.tensors.torch_tensors import copied_tensor

from .calls import GoldenCall, GoldensRequest, checked_inputs, with_literals
from .eager import Eager, Outputs, eager


class Recording(NamedTuple):
    """Recorded cases, to be encoded once the weights id is known. A recording of inputs alone has no environment."""

    graph_id: str
    environment: Environment | None
    tolerance: Tolerance | None
    cases: list[Case]
    tensors: dict[str, TensorBytes]

    def encode(self, weights_id: str | None) -> bytes:
        """Return the bytes of the goldens file for these weights. None: a file with inputs alone."""
        return encode_goldens(
            self.cases,
            self.tensors,
            graph_id=self.graph_id,
            weights_id=weights_id,
            environment=self.environment,
            tolerance=self.tolerance,
        )


def is_skeleton(model: nn.Module) -> bool:
    """Return whether the model has tensors without values, so that it cannot be called."""
    return any(map(is_fake, named_tensors(model).values()))


def record_inputs(wanted: GoldensRequest, manifest: Manifest) -> Recording:
    """Record the inputs alone, for a model that cannot be called. The tolerance is ignored.

    Raises RecordingError with every input that a server would refuse or that has no values.
    """
    recorder = _CaseRecorder(manifest)
    for call, flat in zip(wanted.calls, checked_inputs(wanted.calls, manifest), strict=True):
        recorder.keep(call, flat, ())
    if recorder.problems:
        raise RecordingError(recorder.problems, "Make the inputs outside skeleton().")
    return Recording(manifest.graph_id, None, None, recorder.cases, recorder.tensors)


def check_has_values(model: nn.Module) -> None:
    """Raise RecordingError if the model is a skeleton."""
    if fake := [name for name, tensor in named_tensors(model).items() if is_fake(tensor)]:
        raise RecordingError(
            [f"{len(fake)} tensors of the model have no values, the first is {fake[0]}"],
            "A skeleton cannot be run: build the model outside skeleton(), or leave the goldens out and record them "
            "when weights are packed.",
        )


def record(
    model: nn.Module,
    wanted: GoldensRequest,
    manifest: Manifest,
    constants: Mapping[str, TensorBytes],
    functions: Mapping[str, str],
) -> Recording:
    """Run each call on the eager model twice and record its inputs and outputs.

    constants: as `Artifact.constants()` returns them. functions: the model's attribute for each method whose name
    differs. The model must have the weights of the file, and be in the mode in which it was exported. Raises
    RecordingError with every problem: a model that does not fit the artifact, inputs that a server would refuse,
    outputs that differ between the two runs.
    """
    calls = wanted.calls
    values = {name: copied_tensor(content) for name, content in constants.items()}
    check_has_values(model)
    if problems := [*_model_problems(model, manifest, values), *_function_problems(model, calls, functions)]:
        raise RecordingError(problems, "Record with the model that was exported, on the CPU and in its dtypes.")
    inputs = checked_inputs(calls, manifest)
    initial = {name: values[row.name] for row in manifest.state for name in row.names}
    recorder = _CaseRecorder(manifest)
    with eager(model, functions, initial) as runner:
        for call, flat in zip(calls, inputs, strict=True):
            recorder.record(runner, call, flat)
        recorder.problems += [f"a call changed {name}, which is not state" for name in runner.changed()]
    if recorder.problems:
        raise RecordingError(recorder.problems, "Outputs must follow from inputs and weights alone: call model.eval().")
    return Recording(manifest.graph_id, environment_here(), wanted.tolerance, recorder.cases, recorder.tensors)


class _CaseRecorder:
    """Recorded cases, their tensors, and the problems found so far."""

    def __init__(self, manifest: Manifest) -> None:
        self.cases: list[Case] = []
        self.tensors: dict[str, TensorBytes] = {}
        self.problems: list[str] = []
        self._manifest = manifest

    def record(self, runner: Eager, call: GoldenCall, flat: list[Any]) -> None:
        """Run a call twice and append it as the next case. flat: its inputs as the graph takes them."""
        number = len(self.cases)
        expected = leaves(self._manifest.methods[call.method].signature.output)
        complete = with_literals(call, self._manifest)
        try:
            first, second = (runner.run(*complete) for _ in range(2))
        except Exception as error:
            problems = [f": the model raised {frame_of(error)}{first_line(error)}"]
            outputs: list[Any] = []
        else:
            problems, outputs = list(_output_problems(expected, first, second)), first.values
        self.problems += [f"case {number}, {call.method}{text}" for text in problems]
        self.keep(call, flat, () if problems else self._values(f"{number}.output", outputs, expected))

    def keep(self, call: GoldenCall, flat: list[Any], outputs: tuple[Value, ...]) -> None:
        """Append a call as the next case."""
        number, expected = len(self.cases), input_leaves(self._manifest.methods[call.method].signature)
        pairs = zip(expected, flat, strict=True)
        fake = [leaf.name for leaf, value in pairs if isinstance(value, torch.Tensor) and is_fake(value)]
        self.problems += [f"case {number}, {call.method}, {name}: has no values" for name in fake]
        inputs = () if fake else self._values(f"{number}.input", flat, expected)
        self.cases.append(Case(method=call.method, inputs=inputs, outputs=outputs))

    def _values(self, prefix: str, values: list[Any], expected: list[Leaf]) -> tuple[Value, ...]:
        return tuple(
            self._value(f"{prefix}.{index}", value, leaf)
            for index, (value, leaf) in enumerate(zip(values, expected, strict=True))
        )

    def _value(self, name: str, value: Any, leaf: Leaf) -> Value:
        if not isinstance(leaf, Tensor):
            return int(value) if isinstance(leaf, Integer) else None
        self.tensors[name] = content_of(value)
        return name


def _model_problems(model: nn.Module, manifest: Manifest, values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield differences between the model and the artifact that make the model compute something else."""
    yield from type_problems(model, manifest)
    tensors = named_tensors(model)
    for row in manifest.constants:
        tensor = tensors.get(row.name)
        if tensor is not None and (text := difference(content_of(values[row.name]), content_of(tensor), None)):
            yield f"{row.name} is not the artifact's constant{text}"


def type_problems(model: nn.Module, manifest: Manifest) -> Iterator[str]:
    """Yield the weights and state that the model lacks, or has with another type or not on the CPU."""
    tensors = named_tensors(model)
    for row in (*manifest.weights, *manifest.state):
        expected = f"{row.name}: the artifact has {describe(row)}"
        if (tensor := tensors.get(row.name)) is None:
            yield f"{expected}, the model has no such tensor"
            continue
        found = TensorType(dtype_of(tensor.dtype), tuple(tensor.shape))
        if not same_type(found, row) or tensor.device.type != "cpu":
            yield f"{expected} on the CPU, the model has {found} on {tensor.device}"


def _function_problems(model: nn.Module, calls: Sequence[GoldenCall], functions: Mapping[str, str]) -> Iterator[str]:
    for method in dict.fromkeys(call.method for call in calls):
        name = functions.get(method, method)
        if not callable(getattr(model, name, None)):
            yield (
                f"the model has no attribute {name!r} to call for the method {method!r}; give it one "
                f"(model.{name} = ...), or record with export()"
            )


def _output_problems(expected: list[Leaf], first: Outputs, second: Outputs) -> Iterator[str]:
    names = [leaf.name for leaf in expected]
    for outputs in (first, second):
        if outputs.names != names:
            yield f": expected the outputs {', '.join(names)}, the model gives {', '.join(outputs.names)}"
            return
    for leaf, one, other in zip(expected, first.values, second.values, strict=True):
        if text := _value_problem(leaf, one) or run_difference(*contents_of((one, other))):
            yield f", {leaf.name}{text}"


def _value_problem(leaf: Leaf, value: Any) -> str | None:
    """Return why the graph cannot have this output; None if it can."""
    if isinstance(leaf, Literal):
        same = type(value) is type(leaf.content) and Literal.of(leaf.name, value) == leaf
        return None if same else f": the graph gives {leaf.content!r}, the model {value!r:.80}"
    if isinstance(leaf, Integer):
        return None if type(value) is int else f": expected an integer, the model gives {value!r:.80}"
    if not isinstance(value, torch.Tensor):
        return f": expected a tensor, the model gives {value!r:.80}"
    return type_problem(leaf, TensorType(dtype_of(value.dtype), tuple(value.shape)))


def run_difference(one: Any, other: Any, who: str = "the eager model") -> str | None:
    """Describe how an output differs between two runs of one call; None if it does not. Tensors are `TensorBytes`."""
    if not isinstance(one, TensorBytes) or not isinstance(other, TensorBytes):
        return None if one == other else f": is {one!r:.80} in one run and {other!r:.80} in the next"
    text = difference(one, other, None)
    return f" is not deterministic: two runs of {who} differ at {text.lstrip(': ')}" if text else None


def weights_identity(model: nn.Module, manifest: Manifest) -> str:
    """Return the weights id that a packed file of the model would have, without copying the weights."""
    tensors = named_tensors(model)
    return weights_id((row.row, digest_of(pieces(tensors[row.name]))) for row in manifest.weights)
