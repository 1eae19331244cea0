"""The methods of a model, as the server calls them: from bytes to bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from weightswap_runtime.errors import InputMismatch, Unsupported, brief
from weightswap_runtime.format.calls import CallCheck
from weightswap_runtime.format.expressions import all_hold, parse_condition
from weightswap_runtime.format.signature import (
    Integer,
    Leaf,
    Literal,
    Signature,
    Size,
    Tensor,
    call_arguments,
    input_leaves,
    leaves,
    parse_size,
    size_at,
)
from weightswap_runtime.live.calls import Caller
from weightswap_runtime.live.variants import Choice, VariantNames
from weightswap_runtime.model.served import Pinned, ServedModel, engine_of
from weightswap_runtime.tensors import DTYPES, TensorBytes, array_content, as_array, numpy_dtype

from .errors import BadRequest
from .protocol import DATATYPE_OF, DATATYPES, TensorMetadata

Flat = Sequence[Any]  # a method's flat inputs: TensorBytes, ints and literals, in the graph's order
Outputs = Sequence[tuple[str, TensorBytes]]


class ServedMethod:
    """One method of a model, called with bytes and returning bytes. `inputs` and `outputs` are the protocol's metadata,
    `dtypes` the numpy dtype of each input by name."""

    def __init__(self, model: ServedModel, name: str) -> None:
        """Raises Unsupported if an input or output has a dtype that the protocol has no name for."""
        self.name = name
        self._model = model
        self._engine = engine_of(model)
        self.signature: Signature = model.signatures[name]
        self._inputs = input_leaves(self.signature)
        self._outputs = leaves(self.signature.output)
        self.inputs, self.outputs = _metadata(name, self._inputs), _metadata(name, self._outputs)
        self.dtypes = {tensor.name: numpy_dtype(DATATYPES[tensor.datatype]) for tensor in self.inputs}
        known = {dtype: dtype for dtype in DTYPES}
        self._check = CallCheck(name, self.signature, TensorBytes, known, lambda _: None, lambda value: value[:2])

    def arguments(self, given: Mapping[str, TensorBytes]) -> list[Any]:
        """Check the tensors of a call, given by name, and return its flat inputs. Raises InputMismatch."""
        if given.keys() != self.dtypes.keys():
            problems = [f"{leaf}: missing" for leaf in sorted(self.dtypes.keys() - given.keys())]
            problems += [f"{name}: no such input" for name in given if name not in self.dtypes]
            raise InputMismatch(self.name, problems)
        flat = [_value(leaf, given) for leaf in self._inputs]
        args, kwargs = call_arguments(self.signature, flat)
        return self._check.flatten(args, kwargs)

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raise BadRequest for names of no output, and for duplicates, with which responses could have any size."""
        known = [tensor.name for tensor in self.outputs]
        if unknown := [name for name in names if name not in known]:
            raise BadRequest(f"no output is named {brief(unknown[0])}; there are: {', '.join(known)}")
        if len(set(names)) < len(names):
            raise BadRequest("an output is requested more than once")

    def call(self, caller: Caller, flat: Flat, variants: VariantNames | Choice | None = None) -> Outputs:
        """Call the method on one version of the weights, and return its named outputs. The inputs are copied first.
        variants: as in calls of a model."""
        tensors = [self._engine.tensor(value) if isinstance(value, TensorBytes) else value for value in flat]
        values = caller.call_flat(self.name, tensors, variants)
        return [
            (leaf.name, _integer_content(value) if isinstance(leaf, Integer) else self._engine.content(value))
            for leaf, value in zip(self._outputs, values, strict=True)
            if not isinstance(leaf, Literal)
        ]

    def answer(self, pinned: Pinned, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Call the method with arrays by the inputs' names, for other servers. Raises what a call raises."""
        flat = self.arguments({name: array_content(array) for name, array in arrays.items()})
        return {name: as_array(content) for name, content in self.call(pinned, flat)}

    def sample(self) -> list[Any] | None:
        """Return flat inputs of zeros of the smallest allowed sizes, at least 1; None if no call may have these."""
        sizes = {name: max(1, limits.min) for name, limits in self.signature.dims.items()}
        if not all_hold(self.signature.conditions, sizes):
            return None
        return [_zeros(leaf, sizes) for leaf in self._inputs]

    def batch_limit(self, dim: str) -> int | None:
        """Return the most rows of a call along `dim`, the first dimension of all inputs and outputs; None: unlimited.
        Raises Unsupported if calls cannot be batched along it."""
        tensors = [leaf for leaf in (*self._inputs, *self._outputs) if isinstance(leaf, Tensor)]
        conditions = [parse_condition(text).names for text in self.signature.conditions]
        if (
            dim not in self.signature.dims
            or any(isinstance(leaf, Integer) for leaf in (*self._inputs, *self._outputs))
            or any(leaf.shape[:1] != (dim,) or _uses(leaf.shape[1:], dim) for leaf in tensors)
            or any(dim in dims for dims in conditions)
        ):
            raise Unsupported(
                f"{self.name}: calls cannot be batched along {dim!r}: it must be the first dimension of all inputs and "
                "outputs, and occur nowhere else"
            )
        return self.signature.dims[dim].max


def _uses(shape: Sequence[Size], dim: str) -> bool:
    return any(isinstance(size, str) and parse_size(size).dim == dim for size in shape)


def _metadata(method: str, method_leaves: Sequence[Leaf]) -> list[TensorMetadata]:
    tensors = []
    for leaf in method_leaves:
        if isinstance(leaf, Integer):
            tensors.append(TensorMetadata(leaf.name, "INT64", [1]))
        elif isinstance(leaf, Tensor):
            if leaf.dtype not in DATATYPE_OF:
                raise Unsupported(
                    f"{method}: {leaf.name} is {leaf.dtype}, for which the inference protocol has no datatype"
                )
            shape = [size if isinstance(size, int) else -1 for size in leaf.shape]
            tensors.append(TensorMetadata(leaf.name, DATATYPE_OF[leaf.dtype], shape))
    return tensors


def _value(leaf: Leaf, tensors: Mapping[str, TensorBytes]) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    content = tensors[leaf.name]
    if isinstance(leaf, Tensor):
        return content
    if content.dtype != "I64" or math.prod(content.shape) != 1:
        raise BadRequest(f"{leaf.name}: expected INT64[1], got {DATATYPE_OF[content.dtype]}{list(content.shape)}")
    return int(as_array(content).reshape(-1)[0])


def _zeros(leaf: Leaf, sizes: Mapping[str, int]) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    shape = tuple(size_at(size, sizes) for size in leaf.shape)
    return TensorBytes(leaf.dtype, shape, memoryview(bytes(numpy_dtype(leaf.dtype).itemsize * math.prod(shape))))


def _integer_content(value: int) -> TensorBytes:
    return TensorBytes("I64", (1,), memoryview(value.to_bytes(8, "little", signed=True)))
