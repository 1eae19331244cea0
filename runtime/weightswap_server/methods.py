"""The methods of a model, as the server calls them: from bytes to bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import InputMismatch, Unsupported, WeightswapError, brief
from weightswap_runtime.format.calls import CallCheck
from weightswap_runtime.format.expressions import all_hold, parse_condition
from weightswap_runtime.format.signature import (
    Dict,
    Integer,
    Items,
    Leaf,
    Literal,
    Node,
    Signature,
    Size,
    Tensor,
    Tuple,
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

# how the engines' operators refuse indices, lengths and other values that are no numbers to compute with
_OF_VALUES = re.compile(
    r"out of (range|bounds|data bounds)|not in the valid range|input appears to be incorrect|offsets\[|split_sizes"
    r"|^Runtime assertion failed|Class values must|negative (dimension|length)|repeats? can not be negative"
    r"|does not match required size|exceeds dimension size",
    re.IGNORECASE,
)
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
        self._jagged = [jagged for _, node in _parameters(self.signature) for jagged in _jagged(node)]
        checked = {leaf.name for fields in self._jagged for leaf in fields if leaf and leaf.name != fields[0].name}
        free = [leaf.name for leaf in self._inputs if isinstance(leaf, Tensor) and leaf.name not in checked]
        integers = [name for name in free if self.dtypes[name].kind in "iu"]
        self._suspects = ", ".join(
            integers or free
        )  # inputs whose values may be at fault when an operator refuses them
        self._check = CallCheck(name, self.signature, TensorBytes, known, lambda _: None, lambda value: value[:2])

    def arguments(self, given: Mapping[str, TensorBytes]) -> list[Any]:
        """Check the tensors of a call, given by name, and return its flat inputs. Raises InputMismatch."""
        if given.keys() != self.dtypes.keys():
            problems = [f"{leaf}: missing" for leaf in sorted(self.dtypes.keys() - given.keys())]
            problems += [f"{name}: no such input" for name in given if name not in self.dtypes]
            raise InputMismatch(self.name, problems)
        flat = [_value(leaf, given) for leaf in self._inputs]
        args, kwargs = call_arguments(self.signature, flat)
        checked = self._check.flatten(args, kwargs)
        if problems := [problem for fields in self._jagged for problem in _jagged_problems(*fields, given)]:
            raise InputMismatch(self.name, problems)
        return checked

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raise BadRequest for names of no output, and for duplicates, with which responses could have any size."""
        known = [tensor.name for tensor in self.outputs]
        if unknown := [name for name in names if name not in known]:
            raise BadRequest(f"no output is named {brief(unknown[0])}; there are: {', '.join(known)}")
        if len(set(names)) < len(names):
            raise BadRequest("an output is requested more than once")

    def call(self, caller: Caller, flat: Flat, variants: VariantNames | Choice | None = None) -> Outputs:
        """Call the method on one version of the weights, and return its named outputs. The inputs are copied first.
        variants: as in calls of a model. Raises InputMismatch if an operator refuses the inputs' values, such as the
        number of a row that a table does not have."""
        tensors = [self._engine.tensor(value) if isinstance(value, TensorBytes) else value for value in flat]
        try:
            values = caller.call_flat(self.name, tensors, variants)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            if not self._suspects or isinstance(error, WeightswapError) or not _OF_VALUES.search(reason):
                raise
            raise InputMismatch(
                self.name, [f"{self._suspects}: the model cannot compute with these values: {reason}"]
            ) from error
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
        """Return flat inputs of zeros of the smallest allowed sizes, at least 1; None if no call may have these.

        All ids of a jagged tensor are in its first row.
        """
        sizes = {name: max(1, limits.min) for name, limits in self.signature.dims.items()}
        if not all_hold(self.signature.conditions, sizes):
            return None
        filled: dict[str, TensorBytes] = {}
        for values, lengths, offsets in self._jagged:
            (count,) = _shape(values, sizes)[:1]
            if lengths:
                filled[lengths.name] = _zeros(lengths, sizes, {0: count})
            if offsets:
                filled[offsets.name] = _zeros(offsets, sizes, {slice(1, None): count})
        return [filled.get(leaf.name) or _sample(leaf, sizes) for leaf in self._inputs]

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


_Fields = tuple[Tensor, Tensor | None, Tensor | None]  # of a jagged tensor: values, lengths, offsets


def _parameters(signature: Signature) -> tuple[tuple[str, Node], ...]:
    return (*signature.args, *signature.kwargs)


def _jagged(node: Node) -> Iterator[_Fields]:
    """Yield the fields of torchrec's jagged tensors in a tree."""
    match node:
        case Items(items) | Tuple(items):
            for item in items:
                yield from _jagged(item)
        case Dict(items):
            fields = {str(key): item for key, item in items if isinstance(item, Tensor)}
            if node.kind.endswith("JaggedTensor") and "_values" in fields:
                yield fields["_values"], fields.get("_lengths"), fields.get("_offsets")
            else:
                for _, item in items:
                    yield from _jagged(item)


def _jagged_problems(
    values: Tensor, lengths: Tensor | None, offsets: Tensor | None, given: Mapping[str, TensorBytes]
) -> Iterator[str]:
    """Yield what contradicts itself in a jagged tensor: not every graph checks it, and none names the input.

    Lengths and offsets that are not yet read from a request's JSON are not looked at.
    """
    count = given[values.name].shape[0]
    rows: NDArray[Any] | None = None
    if offsets and given[offsets.name].data:
        ends = as_array(given[offsets.name]).astype(np.int64)
        rows = np.diff(ends)
        if not len(ends) or ends[0] or (rows < 0).any() or ends[-1] != count:
            yield f"{offsets.name}: must rise from 0 to {count}, the number of {values.name}"
    if lengths and given[lengths.name].data:
        found = as_array(given[lengths.name]).astype(np.int64)
        if (found < 0).any():
            yield f"{lengths.name}: {int(found.min())} is negative"
        elif (found > count).any() or int(found.sum()) != count:  # a sum of large numbers may wrap around
            yield f"{lengths.name}: add up to {int(found.sum())}, and {values.name} has {count}"
        elif rows is not None and not np.array_equal(found, rows):
            yield f"{lengths.name}: are not the differences of {offsets.name if offsets else ''}"


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


def _sample(leaf: Leaf, sizes: Mapping[str, int]) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    return _zeros(leaf, sizes)


def _zeros(leaf: Tensor, sizes: Mapping[str, int], filled: Mapping[int | slice, int] | None = None) -> TensorBytes:
    """Return zeros of the given sizes; filled: other values by place."""
    values = np.zeros(_shape(leaf, sizes), numpy_dtype(leaf.dtype))
    for place, value in (filled or {}).items():
        values[place] = value
    return array_content(values)


def _shape(leaf: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size_at(size, sizes) for size in leaf.shape)


def _integer_content(value: int) -> TensorBytes:
    return TensorBytes("I64", (1,), memoryview(value.to_bytes(8, "little", signed=True)))
