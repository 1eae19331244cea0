"""Goldens: calls of the eager model, recorded so that a server can show that it computes the same.

`export()` and `pack()` parse the calls, check their inputs as a server would, run each call twice from the initial
state, and record what the two runs agree on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from weightswap_exporter.checkpoints.tensor import content_of, contents_of, dtype_of, pieces
from weightswap_exporter.modules.libraries import without_cache
from weightswap_exporter.modules.stand_ins import first_line, frame_of
from weightswap_exporter.modules.tensors import ModelView, is_fake, parts_of, tree_of
from weightswap_runtime.engines.torch_cpu import TorchEngine, environment_here
from weightswap_runtime.errors import InputMismatch, ParityError
from weightswap_runtime.format.goldens import Case, Environment, Value, encode_goldens, type_problem
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.safetensors import weights_id
from weightswap_runtime.format.signature import (
    CallCheck,
    Integer,
    Leaf,
    Literal,
    Node,
    Tensor,
    input_leaves,
    leaves,
    unflatten,
)
from weightswap_runtime.tensors import TensorBytes, TensorType, Tolerance, describe, difference, digest_of, same_type
from weightswap_runtime.torch_tensors import DTYPE_NAMES, copied_tensor, tensor_bytes

Requested = Sequence[Any] | Mapping[str, Sequence[Any]]
_COARSEST: dict[str, Tolerance] = {"BF16": (5e-2, 5e-2), "F16": (1e-2, 1e-2), "F32": (1e-4, 1e-5)}  # by dtype
_ADVICE = "Give a list of (args, kwargs) or of tuples of args, or a dict from methods to such lists."


class GoldenCall(NamedTuple):
    """A call to record: the method and its arguments."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class GoldensRequest(NamedTuple):
    """Calls to record, and the tolerance (rtol, atol) for servers that reproduce them. None: bit for bit."""

    calls: list[GoldenCall]
    tolerance: Tolerance | None


def wanted_goldens(
    goldens: Requested | None, tolerance: Tolerance | None, methods: Sequence[str]
) -> GoldensRequest | None:
    """Parse the arguments `goldens` and `tolerance` of `export()` and `pack()`. Raises ParityError."""
    if goldens is None:
        if tolerance is not None:
            raise ParityError(
                ["tolerance: sets how goldens are compared, but there are none"],
                "Give `goldens`, too.",
                where="goldens",
            )
        return None
    calls = _parse_calls(goldens, methods)
    if tolerance is not None:
        if problem := tolerance_problem(tolerance):
            raise ParityError([problem], "Leave it out if the outputs must be reproduced exactly.", where="goldens")
        tolerance = float(tolerance[0]), float(tolerance[1])
    return GoldensRequest(calls, tolerance)


def _parse_calls(goldens: Requested, methods: Sequence[str]) -> list[GoldenCall]:
    if isinstance(goldens, Mapping):
        by_method = dict(goldens)
    else:
        by_method = {methods[0] if len(methods) == 1 else "forward": goldens}
    calls: list[GoldenCall] = []
    problems: list[str] = []
    for method, items in by_method.items():
        if method not in methods:
            problems.append(f"no method {method!r}; the methods are {', '.join(methods)}")
        elif not isinstance(items, list):
            problems.append(f"{method}: expected a list of calls, got a {type(items).__qualname__}")
        else:
            for number, item in enumerate(items):
                if isinstance(item, tuple):
                    calls.append(_parse_call(method, item))
                else:
                    kind = type(item).__qualname__
                    problems.append(f"{method}, call {number}: expected (args, kwargs), got a {kind}")
    if problems or not calls:
        raise ParityError(problems or ["no calls to record"], _ADVICE, where="goldens")
    return calls


def _parse_call(method: str, item: tuple[Any, ...]) -> GoldenCall:
    """Parse `(args, kwargs)` or a tuple of args. A pair of a tuple and a dict is always the former."""
    if len(item) == 2 and isinstance(item[0], tuple) and isinstance(item[1], Mapping):
        return GoldenCall(method, item[0], dict(item[1]))
    return GoldenCall(method, item, {})


def tolerance_problem(tolerance: Any) -> str | None:
    """Return why the value is not a tolerance; None if it is one."""
    numbers = isinstance(tolerance, tuple | list) and all(type(part) in (int, float) for part in tolerance)
    if numbers and len(tolerance) == 2 and all(math.isfinite(part) and part >= 0 for part in tolerance):
        return None
    return f"tolerance: expected (rtol, atol), finite and not negative, got {tolerance!r:.80}"


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


def record(
    view: ModelView,
    wanted: GoldensRequest,
    manifest: Manifest,
    constants: Mapping[str, TensorBytes],
    functions: Mapping[str, str],
) -> Recording:
    """Run each call on the eager model twice and record its inputs and outputs.

    constants: as `Artifact.constants()` returns them. functions: the model's attribute for each method whose name
    differs. The model must have the weights of the file, and be in the mode in which it was exported. Raises
    ParityError with every problem: a model that does not fit the artifact, inputs that a server would refuse,
    outputs that differ between the two runs.
    """
    calls = wanted.calls
    values = {name: copied_tensor(content) for name, content in constants.items()}
    check_has_values(view)
    if problems := [*_model_problems(view, manifest, values), *_function_problems(view, calls, functions)]:
        raise ParityError(
            problems, "Record with the model that was exported, on the CPU and in its dtypes.", where="goldens"
        )
    inputs = checked_inputs(calls, manifest)
    initial = {name: values[row.name] for row in manifest.state for name in row.names}
    recorder = _CaseRecorder(manifest)
    with eager(view, functions, initial) as runner:
        for call, flat in zip(calls, inputs, strict=True):
            recorder.record(runner, call, flat)
        recorder.problems += [f"a call changed {name}, which is not state" for name in runner.changed()]
    if recorder.problems:
        raise ParityError(
            recorder.problems, "Outputs must follow from inputs and weights alone: call model.eval().", where="goldens"
        )
    tolerance = _of_ranks(manifest) if wanted.tolerance is None and manifest.ranks else wanted.tolerance
    return Recording(manifest.packed_for, environment_here(), tolerance, recorder.cases, recorder.tensors)


def _of_ranks(manifest: Manifest) -> Tolerance:
    """Return the default tolerance where ranks add in another order than the whole model: of the coarsest dtype."""
    dtypes = {row.dtype for row in manifest.weights}
    return next((tolerance for dtype, tolerance in _COARSEST.items() if dtype in dtypes), _COARSEST["F32"])


def record_inputs(wanted: GoldensRequest, manifest: Manifest) -> Recording:
    """Record the inputs alone, for a model that cannot be called. The tolerance is ignored.

    Raises ParityError with every input that a server would refuse or that has no values.
    """
    recorder = _CaseRecorder(manifest)
    for call, flat in zip(wanted.calls, checked_inputs(wanted.calls, manifest), strict=True):
        recorder.keep(call, flat, ())
    if recorder.problems:
        raise ParityError(recorder.problems, "Make the inputs outside skeleton().", where="goldens")
    return Recording(manifest.packed_for, None, None, recorder.cases, recorder.tensors)


def check_has_values(view: ModelView) -> None:
    """Raise ParityError if the model is a skeleton."""
    if view.hollow:
        raise ParityError(
            [f"{len(view.hollow)} tensors of the model have no values, the first is {view.hollow[0]}"],
            "A skeleton cannot be run: build the model outside skeleton(), or leave the goldens out and record them "
            "when weights are packed.",
            where="goldens",
        )


def weights_identity(view: ModelView, manifest: Manifest) -> str:
    """Return the weights id that a packed file of the model would have, without copying the weights."""
    return weights_id((row.row, digest_of(pieces(view.tensors[row.name]))) for row in manifest.weights)


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


def _model_problems(view: ModelView, manifest: Manifest, values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield differences between the model and the artifact that make the model compute something else."""
    yield from type_problems(view, manifest)
    for row in manifest.constants:
        tensor = view.tensors.get(row.name)
        if tensor is not None and (text := difference(content_of(values[row.name]), content_of(tensor), None)):
            yield f"{row.name} is not the artifact's constant{text}"


def type_problems(view: ModelView, manifest: Manifest) -> Iterator[str]:
    """Yield the weights and state that the model lacks, or has with another type or not on the CPU."""
    for row in (*manifest.weights, *manifest.state):
        expected = f"{row.name}: the artifact has {describe(row)}"
        if (tensor := view.tensors.get(row.name)) is None:
            yield f"{expected}, the model has no such tensor"
            continue
        found = TensorType(dtype_of(tensor.dtype), tuple(tensor.shape))
        if not same_type(found, row) or tensor.device.type != "cpu":
            yield f"{expected} on the CPU, the model has {found} on {tensor.device}"


def _function_problems(view: ModelView, calls: Sequence[GoldenCall], functions: Mapping[str, str]) -> Iterator[str]:
    for method in dict.fromkeys(call.method for call in calls):
        name = functions.get(method, method)
        if not callable(getattr(view.model, name, None)):
            yield (
                f"the model has no attribute {name!r} to call for the method {method!r}; give it one "
                f"(model.{name} = ...), or record with export()"
            )


def checked_inputs(calls: Sequence[GoldenCall], manifest: Manifest) -> list[list[Any]]:
    """Return copies of the flat inputs of each call. Raises ParityError for those that a server would refuse."""
    flat: list[list[Any]] = []
    problems: list[str] = []
    for number, call in enumerate(calls):
        signature = manifest.methods[call.method].signature
        check = CallCheck(call.method, signature, torch.Tensor, DTYPE_NAMES, TorchEngine.misplaced, TorchEngine.kind)
        try:
            given = check.flatten(tuple(call.args), dict(call.kwargs))
            flat.append([value.detach().clone() if isinstance(value, torch.Tensor) else value for value in given])
        except InputMismatch as error:
            problems += [f"case {number}, {call.method}: {problem}" for problem in error.problems]
    if problems:
        raise ParityError(
            problems, "Give inputs that the method was exported for; a server would refuse these.", where="goldens"
        )
    return flat


def _plain_tree(value: Any) -> tuple[Node, list[Any]]:
    """Return the tree that a server has in place of a value, with leaves named by path, and its flat values."""
    flat, spec = pytree.tree_flatten(value)
    return tree_of(spec, "", iter(flat), lambda _, path: Integer(path or "output", 0)), flat


def with_literals(call: GoldenCall, manifest: Manifest) -> GoldenCall:
    """Return the call with the literals that it leaves out added as keyword arguments; the graph fixes their values."""
    signature = manifest.methods[call.method].signature
    rest = (*signature.args[len(call.args) :], *signature.kwargs)
    literals = {name: unflatten(node, list(leaves(node))) for name, node in rest if name not in call.kwargs}
    return call._replace(kwargs=literals | call.kwargs)


@contextmanager
def eager(view: ModelView, functions: Mapping[str, str], initial: Mapping[str, torch.Tensor]) -> Iterator[Eager]:
    """Prepare the model for calls inside a `with` block.

    functions: the model's attribute for each method whose name differs. initial: the initial state by FQN. Inside the
    block, gradients and autocast are off, attention takes its ordinary path, which is the captured one, and a
    transformers model has no key-value cache. On exit, torch's random state and the model's buffers are restored, also
    after an exception; a copy of every buffer is held until then.
    """
    buffers = _Buffers(view, initial)
    fast = torch.backends.mha.get_fastpath_enabled()
    plain = torch.autocast("cpu", enabled=False)
    with torch.no_grad(), plain, torch.random.fork_rng(devices=[]), without_cache(view.model):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield Eager(view, functions, buffers)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            buffers.restore()


class Outputs(NamedTuple):
    """Flat outputs of a call with their names, in the graph's order. Tensors are copies."""

    names: list[str]
    values: list[Any]


class Eager:
    """An eager model that is ready to be called, as yielded by `eager()`."""

    def __init__(self, view: ModelView, functions: Mapping[str, str], buffers: _Buffers) -> None:
        self._model, self._functions, self._buffers = view.model, functions, buffers
        self._parameters = _parameters(view)

    def run(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        within: AbstractContextManager[object] | None = None,
    ) -> Outputs:
        """Call a method from the initial state, with row-major copies of the inputs, as goldens keep them.

        within: a context manager around the call alone.
        """
        self._buffers.reset()
        args, kwargs = pytree.tree_map(_row_major, (args, kwargs))
        name = self._functions.get(method, method)
        call = self._model if name == "forward" else getattr(self._model, name)
        with within or nullcontext():
            result = call(*args, **kwargs)
        tree, values = _plain_tree(result)
        return Outputs([leaf.name for leaf in leaves(tree)], [_row_major(value) for value in values])

    def changed(self) -> list[str]:
        """Return the names of weights and constants that calls have changed."""
        now = _parameters(ModelView(self._model))
        return self._buffers.changed() + [name for name, value in self._parameters.items() if now.get(name) != value]


def _row_major(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return value.detach().clone(memory_format=torch.contiguous_format)


def _parameters(view: ModelView) -> dict[str, tuple[int, str]]:
    """Return the identity and digest of each parameter: writes through `.data` do not change its version counter."""
    distinct = {id(value): value for value in view.parameters.values()}
    digests = {key: _digest(value) for key, value in distinct.items()}
    return {name: (id(value), digests[id(value)]) for name, value in view.parameters.items()}


def _digest(value: torch.Tensor) -> str:
    parts = parts_of("", value).values() if value.layout is torch.strided else ()
    return " ".join(digest_of(pieces(part)) for part in parts)


class _Buffers:
    """Buffers of a model. `initial` has the values, before each call, of those that a call may change."""

    def __init__(self, view: ModelView, initial: Mapping[str, torch.Tensor]) -> None:
        self._initial = initial
        self._buffers = {
            fqn: (view.model.get_submodule(fqn.rpartition(".")[0]), buffer, buffer.detach().clone())
            for fqn, buffer in view.buffers.items()
        }

    def reset(self) -> None:
        for fqn in self._buffers:
            if fqn in self._initial:
                self._put(fqn, self._initial[fqn])

    def changed(self) -> list[str]:
        return [fqn for fqn in self._buffers if fqn not in self._initial and self._is_changed(fqn)]

    def restore(self) -> None:
        for fqn, (_, _, values) in self._buffers.items():
            if self._is_changed(fqn):
                self._put(fqn, values)

    def _put(self, fqn: str, values: torch.Tensor) -> None:
        module, buffer, _ = self._buffers[fqn]
        module._buffers[fqn.rpartition(".")[2]] = buffer  # a call may have assigned another tensor
        buffer.copy_(values)

    def _is_changed(self, fqn: str) -> bool:
        module, buffer, values = self._buffers[fqn]
        return module._buffers.get(fqn.rpartition(".")[2]) is not buffer or not _same_bits(values, buffer)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_type = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_type and np.array_equal(tensor_bytes(one), tensor_bytes(other))


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
