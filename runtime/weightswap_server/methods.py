"""The methods of a model, as the server calls them: from bytes to bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.engines.graph_archive import bag_inputs
from weightswap_runtime.errors import InputMismatch, Unsupported, WeightswapError, brief
from weightswap_runtime.format.expressions import all_hold, parse_condition
from weightswap_runtime.format.signature import (
    CallCheck,
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
from weightswap_runtime.tensors import DTYPES, TensorBytes, array_content, as_array, as_float64, numpy_dtype

from .errors import BadRequest
from .protocol import DATATYPE_OF, DATATYPES, TensorMetadata

# how the engines' operators refuse indices, lengths and other values that are no numbers to compute with
_OF_VALUES = re.compile(
    r"out of (range|bounds|data bounds)|not in the valid range|input appears to be incorrect|offsets\[|split_sizes"
    r"|^Runtime assertion failed|Class values must|negative (dimension|length)|repeats? can not be negative"
    r"|does not match required size|exceeds dimension size|i < index_size|idx < num_embeddings",
    re.IGNORECASE,
)
_JAGGED = {f"torchrec.sparse.jagged_tensor.{name}" for name in ("JaggedTensor", "KeyedJaggedTensor")}
_MOST_TRIED = 4096  # rows of a batch, for which conditions of a graph are tried
_NOISE = 0.05  # of the largest value: half-precision numbers that were summed in another order differ by less
_NOISE_BESIDE, _LAST_BITS = 1e-3, 1e-6  # of the largest value of a column, and of all
_Draw = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
Flat = Sequence[Any]  # a method's flat inputs: TensorBytes, ints and literals, in the graph's order
Outputs = Sequence[tuple[str, TensorBytes]]
_Bags = tuple[str, str | None, bool]  # names of offsets and, if given, of indices; whether the last offset ends a bag


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
        self._jagged = [
            jagged for _, node in (*self.signature.args, *self.signature.kwargs) for jagged in _jagged(node)
        ]
        self._bags = list(_bags(model, name, self._inputs))
        self._joins: list[_Join] = []
        self._batch_dim = ""
        self._rows: tuple[int, int] = 0, 1  # index of an input, and how many of its rows each row of a batch has
        checked = {leaf.name for jagged in self._jagged for leaf in (jagged.lengths, jagged.offsets) if leaf}
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
        problems = [problem for jagged in self._jagged for problem in _jagged_problems(jagged, given)]
        problems += [problem for bags in self._bags for problem in _bag_problems(bags, given)]
        if problems:
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
            (
                leaf.name,
                _integer_content(leaf.name, value) if isinstance(leaf, Integer) else self._engine.content(value),
            )
            for leaf, value in zip(self._outputs, values, strict=True)
            if not isinstance(leaf, Literal)
        ]

    def answer(self, pinned: Pinned, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Call the method with arrays by the inputs' names, for other servers. Raises what a call raises."""
        flat = self.arguments({name: array_content(array) for name, array in arrays.items()})
        return {name: as_array(content) for name, content in self.call(pinned, flat)}

    def sample(self, draw: _Draw = np.zeros, rows: int = 1) -> list[Any] | None:
        """Return flat inputs of the smallest allowed sizes, at least 1, and of at least so many rows of a batch.

        None if no call may have these. draw: returns values of a shape and dtype. All ids of a jagged tensor are in its
        first row; where calls are batched, it has an id for each row.
        """
        least = dict.fromkeys((self._batch_dim, *(join.dim for join in self._joins)), rows)
        limits = self.signature.dims
        sizes = {name: max(least.get(name, 1), limits[name].min) for name in limits}
        sizes |= {join.dim: min(sizes[join.dim], join.most or sizes[join.dim]) for join in self._joins}
        if not all_hold(self.signature.conditions, sizes):
            return None
        filled: dict[str, TensorBytes] = {}
        for jagged in self._jagged:
            (count,) = _shape(jagged.values, sizes)[:1]
            if jagged.lengths:
                filled[jagged.lengths.name] = _zeros(jagged.lengths, sizes, {0: count})
            if jagged.offsets:
                filled[jagged.offsets.name] = _zeros(jagged.offsets, sizes, {slice(1, None): count})
        return [filled.get(leaf.name) or _sample(leaf, sizes, draw) for leaf in self._inputs]

    def batch_limit(self, dim: str) -> int | None:
        """Return the most rows of a call along `dim`, the first dimension of all inputs and outputs; None: unlimited.

        A jagged tensor has so many rows for each of its keys. Raises Unsupported if calls cannot be batched along it.
        """
        every = (*self._inputs, *self._outputs)
        joins = [join for jagged in self._jagged if (join := self._join(jagged, dim))]
        names = {self._inputs[index].name for join in joins for index in (join.lengths, *join.values)}
        tensors = [leaf for leaf in every if isinstance(leaf, Tensor) and leaf.name not in names]
        limit = self.signature.dims[dim].max if dim in self.signature.dims else None
        tried = [{dim: size} for size in range(2, min(limit or _MOST_TRIED, _MOST_TRIED) + 1)]
        conditions = [parse_condition(text) for text in self.signature.conditions]
        # such as `batch != 1`: what holds for every size of a batch does not matter
        narrow = [found.names for found in conditions if found.names != {dim} or not all(map(found.holds, tried))]
        if (
            dim not in self.signature.dims
            or self._bags  # offsets of one call do not go on where those of another end
            or any(isinstance(leaf, Integer) for leaf in every)
            or any(leaf.shape[:1] != (dim,) or _uses(leaf.shape[1:], dim) for leaf in tensors)
            or any(_uses(leaf.shape, join.dim) for leaf in tensors for join in joins)
            or any(dims & {dim, *(join.dim for join in joins)} for dims in narrow)
        ):
            raise Unsupported(
                f"{self.name}: calls cannot be batched along {dim!r}: it must be the first dimension of all inputs and "
                "outputs, and occur nowhere else; a jagged tensor must have lengths, and a number of ids of its own"
            )
        self._joins, self._batch_dim = joins, dim
        first = next((index for index, leaf in enumerate(self._inputs) if leaf in tensors), None)
        self._rows = (joins[0].lengths, joins[0].keys) if first is None and joins else (first or 0, 1)
        return min(limit or _MOST_TRIED, _MOST_TRIED) if conditions else limit

    def _join(self, jagged: _Jagged, dim: str) -> _Join | None:
        """Return how jagged tensors of several calls are joined; None if they cannot be, with rows along `dim`."""
        lengths, values = jagged.lengths, [leaf for leaf in (jagged.values, jagged.weights) if leaf]
        counts = {leaf.shape[0] for leaf in values}
        if lengths is None or jagged.offsets or len(lengths.shape) != 1 or len(counts) != 1:
            return None
        (count,), (rows,) = counts, lengths.shape
        if not isinstance(count, str) or count not in self.signature.dims or not isinstance(rows, str):
            return None
        keys, name, offset = parse_size(rows)
        if name != dim or offset:
            return None
        places = {leaf.name: index for index, leaf in enumerate(self._inputs)}
        most = self.signature.dims[count].max
        return _Join(places[lengths.name], tuple(places[leaf.name] for leaf in values), keys, count, most)

    def mixed_output(self, caller: Caller, limit: int, choice: Choice | None = None) -> str | None:
        """Return an output whose rows depend on the other rows of a batch, of which at most `limit` are tried.

        None if random inputs show no such output, or that outputs are random, too. Raises what calls raise.
        """
        try:
            return self._mixed_output(caller, limit, choice, ids=2)
        except InputMismatch:
            return self._mixed_output(caller, limit, choice, ids=1)  # a table may have one row

    def _mixed_output(self, caller: Caller, limit: int, choice: Choice | None, ids: int) -> str | None:
        draw = _drawing(ids)
        least = max(1, self.signature.dims[self._batch_dim].min)
        # of different sizes, also where torch has captured a graph for two rows or more
        sizes = (least, least + 1 if least < limit - least else least)
        calls = [flat for rows in (*sizes, *sizes) if (flat := self.sample(draw, rows))]
        if len(calls) < 4 or sum(map(self.rows, calls[:2])) > limit:
            return None
        first, second, *others = calls
        one, again, other = (self.call(caller, flat, choice) for flat in (first, first, second))
        if any(_differ([left], right) for (_, left), (_, right) in zip(one, again, strict=True)):
            return None
        together = self.call(caller, self.joined([first, second]), choice)
        rows = [self.rows(first), self.rows(second)]
        for (name, content), (_, left), (_, right) in zip(together, one, other, strict=True):
            if _differ([left, right], content):
                return name
        # in batches of one size the same rows have the same bits, so that much less than that shows a dependence
        for place, flats in enumerate(([first, others[1]], [others[0], second])):
            beside = split(self.call(caller, self.joined(flats), choice), rows)[place]
            for (name, content), (_, changed) in zip(split(together, rows)[place], beside, strict=True):
                if _differ_beside(content, changed):
                    return name
        return None

    def rows(self, flat: Flat) -> int:
        """Return the number of rows of a call that may be batched."""
        index, keys = self._rows
        return int(flat[index].shape[0]) // keys

    def joined(self, calls: Sequence[Flat]) -> list[Any]:
        """Concatenate the inputs of several calls along the first dimension, those of jagged tensors key by key.

        Raises InputMismatch if together they have more ids than a call may have.
        """
        inside = {index for join in self._joins for index in (join.lengths, *join.values)}
        columns = enumerate(zip(*calls, strict=True))
        flat = [
            _concatenated(values) if isinstance(values[0], TensorBytes) and index not in inside else values[0]
            for index, values in columns
        ]
        for join in self._joins:
            rows = [as_array(call[join.lengths]).reshape(join.keys, -1) for call in calls]
            flat[join.lengths] = array_content(np.concatenate(rows, axis=1).reshape(-1))
            ends = [found.sum(axis=1).cumsum()[:-1] for found in rows]
            for index in join.values:
                parts = [np.split(as_array(call[index]), places) for call, places in zip(calls, ends, strict=True)]
                flat[index] = array_content(np.concatenate([part for key in zip(*parts, strict=True) for part in key]))
            if join.most is not None and flat[join.values[0]].shape[0] > join.most:
                raise InputMismatch(self.name, [f"{join.dim} is at most {join.most}, in a batch, too"])
        return flat


class _Jagged(NamedTuple):
    """The inputs that are the fields of one jagged tensor."""

    values: Tensor
    weights: Tensor | None
    lengths: Tensor | None
    offsets: Tensor | None


class _Join(NamedTuple):
    """How jagged tensors of several calls become one."""

    lengths: int  # index of the input
    values: tuple[int, ...]  # and of those with an element for each id
    keys: int  # as many as there are lengths for each row of a batch
    dim: str  # the number of ids
    most: int | None


def _concatenated(values: Sequence[TensorBytes]) -> TensorBytes:
    shape = (sum(value.shape[0] for value in values), *values[0].shape[1:])
    return TensorBytes(values[0].dtype, shape, memoryview(b"".join(value.data for value in values)))


def _jagged(node: Node) -> Iterator[_Jagged]:
    """Yield torchrec's jagged tensors in a tree."""
    match node:
        case Items(items) | Tuple(items):
            for item in items:
                yield from _jagged(item)
        case Dict(items):
            fields = {str(key): item for key, item in items if isinstance(item, Tensor)}
            if node.kind in _JAGGED and "_values" in fields:
                yield _Jagged(fields["_values"], *map(fields.get, ("_weights", "_lengths", "_offsets")))
            else:
                for _, item in items:
                    yield from _jagged(item)


def _bags(model: ServedModel, name: str, inputs: Sequence[Leaf]) -> Iterator[_Bags]:
    """Yield the inputs that a method's graph takes for bags as they are. Raises ArtifactError."""
    if not any(isinstance(leaf, Tensor) and leaf.dtype in ("I32", "I64") and len(leaf.shape) == 1 for leaf in inputs):
        return  # most graphs need not be read
    method = model.artifact.manifest.methods[name]
    places = [place for place, item in enumerate(method.inputs) if item.kind == "input"]
    names = {place: leaf.name for place, leaf in zip(places, inputs, strict=True) if isinstance(leaf, Tensor)}
    for bags in bag_inputs(model.artifact.read(method.graph), str(model.artifact.path / method.graph)):
        if bags.offsets in names:
            indices = None if bags.indices is None else names.get(bags.indices)
            yield names[bags.offsets], indices, bags.includes_last


def _bag_problems(bags: _Bags, given: Mapping[str, TensorBytes]) -> Iterator[str]:
    """Yield what is wrong with the offsets of bags: some kernels read the rows of other calls, or end the process."""
    offsets, indices, includes_last = bags
    if not _is_read(given[offsets]):
        return
    ends = as_array(given[offsets]).astype(np.int64)
    count = None if indices is None else math.prod(given[indices].shape)
    if (ends[1:] < ends[:-1]).any() or ends[:1].any() or (count is not None and ends[-1:].max(initial=0) > count):
        yield f"{offsets}: must rise from 0" + ("" if count is None else f" to at most {count}")
    elif count and len(ends) <= includes_last:
        yield f"{offsets}: has no bag for the {count} values of {indices}"


def _is_read(content: TensorBytes) -> bool:
    """Return whether a tensor's bytes are there; those of a request's JSON are read after a first look at it."""
    return len(content.data) > 0 or 0 in content.shape


def _jagged_problems(jagged: _Jagged, given: Mapping[str, TensorBytes]) -> Iterator[str]:
    """Yield what contradicts itself in a jagged tensor: not every graph checks it, and none names the input.

    Lengths and offsets that are not yet read from a request's JSON are not looked at.
    """
    values, _, lengths, offsets = jagged
    count = given[values.name].shape[0]
    rows: NDArray[Any] | None = None
    if offsets and _is_read(given[offsets.name]):
        ends = as_array(given[offsets.name]).astype(np.int64)
        rows = np.diff(ends)
        if not len(ends) or ends[0] or (rows < 0).any() or ends[-1] != count:
            yield f"{offsets.name}: must rise from 0 to {count}, the number of {values.name}"
    if lengths and _is_read(given[lengths.name]):
        found = as_array(given[lengths.name]).astype(np.int64)
        if (found < 0).any():
            yield f"{lengths.name}: {int(found.min())} is negative"
        elif (found > count).any() or int(found.sum()) != count:  # a sum of large numbers may wrap around
            yield f"{lengths.name}: add up to {int(found.sum())}, and {values.name} has {count}"
        elif rows is not None and not np.array_equal(found, rows):
            yield f"{lengths.name}: are not the differences of {offsets.name if offsets else ''}"


def _uses(shape: Sequence[Size], dim: str) -> bool:
    return any(isinstance(size, str) and parse_size(size)[1] == dim for size in shape)


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


def _sample(leaf: Leaf, sizes: Mapping[str, int], draw: _Draw) -> Any:
    if isinstance(leaf, Literal):
        return leaf.content
    if isinstance(leaf, Integer):
        return size_at(leaf.value, sizes)
    return array_content(draw(_shape(leaf, sizes), numpy_dtype(leaf.dtype)))


def _drawing(ids: int) -> _Draw:
    """Return what draws random values, always the same: integers below `ids`, numbers around 0, and truths."""
    random = np.random.default_rng(0)

    def draw(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        if dtype.kind in "iu":
            return random.integers(0, ids, shape).astype(dtype)
        return (random.random(shape) < 0.5 if dtype.kind == "b" else random.standard_normal(shape)).astype(dtype)

    return draw


def _differ(parts: Sequence[TensorBytes], whole: TensorBytes) -> bool:
    """Return whether parts, end to end, differ from a tensor by more than the size of a batch explains."""
    one, other = np.concatenate(list(map(as_float64, parts))), as_float64(whole)
    magnitudes = np.abs(np.concatenate([one, other]))
    largest = np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0)
    return not np.allclose(one, other, rtol=0.0, atol=_NOISE * largest, equal_nan=True)


def _differ_beside(one: TensorBytes, other: TensorBytes) -> bool:
    """Return whether the same rows differ in two batches of one size. Each column counts by itself, since numbers of
    one may be far smaller than another's; a graph that sorts rows by their values may round them differently."""
    if one.data == other.data:
        return False
    left, right = (as_float64(each).reshape(one.shape) for each in (one, other))
    magnitudes = np.maximum(*(np.where(np.isfinite(each), np.abs(each), 0.0) for each in (left, right)))
    noise = _NOISE_BESIDE * magnitudes.max(axis=0, initial=0.0) + _LAST_BITS * magnitudes.max(initial=0.0)
    return not np.allclose(left, right, rtol=0.0, atol=noise, equal_nan=True)


def split(outputs: Outputs, rows: Sequence[int]) -> list[Outputs]:
    """Split the outputs of a batch into those of its calls, by their numbers of rows. They share its memory."""
    parts = zip(accumulate(rows), rows, strict=True)
    return [[(name, _rows(content, end - count, count)) for name, content in outputs] for end, count in parts]


def _rows(content: TensorBytes, begin: int, count: int) -> TensorBytes:
    size = content.nbytes // max(1, content.shape[0])
    data = content.data[begin * size : (begin + count) * size]
    return TensorBytes(content.dtype, (count, *content.shape[1:]), data)


def _zeros(leaf: Tensor, sizes: Mapping[str, int], filled: Mapping[int | slice, int] | None = None) -> TensorBytes:
    """Return zeros of the given sizes; filled: other values by place."""
    values = np.zeros(_shape(leaf, sizes), numpy_dtype(leaf.dtype))
    for place, value in (filled or {}).items():
        values[place] = value
    return array_content(values)


def _shape(leaf: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size_at(size, sizes) for size in leaf.shape)


def _integer_content(name: str, value: int) -> TensorBytes:
    if not -(1 << 63) <= value < 1 << 63:
        raise BadRequest(f"{name}: would be {value}, which INT64 cannot hold")
    return TensorBytes("I64", (1,), memoryview(value.to_bytes(8, "little", signed=True)))
