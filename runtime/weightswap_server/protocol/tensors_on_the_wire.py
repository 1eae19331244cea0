"""Tensors in requests and responses: in the JSON, or as bytes behind it. Requests are checked before a call runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from weightswap_runtime.messages import brief
from weightswap_runtime.tensors.content import TensorBytes, array_content, as_array, numpy_dtype
from weightswap_runtime.tensors.dtypes import DTYPES, has_fractions
from weightswap_server.errors import BadRequest

from .documents import BINARY_SIZE, DATATYPE_OF, DATATYPES, InferRequest, InputTensor, OutputTensor

T = TypeVar("T")
Named = tuple[str, TensorBytes]
_MOST_DIMENSIONS = 64  # the limit of numpy and torch
_SPARE_COMMAS = 1000  # such as between empty lists; small excess gets a better message later
_INTEGERS = {dtype: np.iinfo(numpy_dtype(dtype)) for dtype in DATATYPE_OF if dtype[0] in "IU"}
_LIMITS = {dtype: (int(limits.min), int(limits.max)) for dtype, limits in _INTEGERS.items()}


def read_request(body: bytes, header_length: str | None) -> tuple[InferRequest, dict[str, TensorBytes]]:
    """Return a request's document and its inputs by name. Binary inputs are views of the body. Raises BadRequest."""
    head, tail = _split(memoryview(body), header_length)
    request = decoded(head, InferRequest)
    return request, _inputs(request.inputs, tail)


def decoded(document: bytes | memoryview, kind: type[T]) -> T:
    """Decode a JSON document of a request. Raises BadRequest."""
    try:
        return msgspec.json.decode(document, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the request's JSON: {error}") from error


def _split(body: memoryview, header_length: str | None) -> tuple[memoryview, memoryview]:
    if header_length is None:
        return body, body[len(body) :]
    digits = header_length.lstrip("0")[:20] or "0"
    if not (header_length.isascii() and header_length.isdigit()) or int(digits) > len(body):
        raise BadRequest(
            f"Inference-Header-Content-Length: expected a number up to {len(body)}, the size of the body, got "
            f"{brief(header_length)}"
        )
    return body[: int(digits)], body[int(digits) :]


def _inputs(tensors: Sequence[InputTensor], tail: memoryview) -> dict[str, TensorBytes]:
    inputs: dict[str, TensorBytes] = {}
    for tensor in tensors:
        if tensor.name in inputs:
            raise BadRequest(f"{brief(tensor.name)}: given more than once")
        if BINARY_SIZE not in tensor.parameters:
            inputs[tensor.name] = _from_json(tensor)
            continue
        size = tensor.parameters[BINARY_SIZE]
        if type(size) is not int or not 0 <= size <= len(tail):
            raise BadRequest(
                f"{brief(tensor.name)}: {BINARY_SIZE}={size!r}, but {len(tail)} bytes are left in the body"
            )
        if tensor.data:
            raise BadRequest(f"{brief(tensor.name)}: has both data and {BINARY_SIZE}")
        inputs[tensor.name] = from_bytes(tensor.name, tensor.datatype, tensor.shape, tail[:size])
        tail = tail[size:]
    if tail:
        raise BadRequest(f"{len(tail)} bytes at the end of the body belong to no input")
    return inputs


def dtype_of(name: str, datatype: str) -> str:
    """Return the safetensors dtype of a datatype. Raises BadRequest."""
    if datatype not in DATATYPES:
        text = "no model here accepts strings; send their tokens" if datatype == "BYTES" else "unknown"
        raise BadRequest(f"{brief(name)}: datatype {brief(datatype)}: {text}. Known datatypes: {', '.join(DATATYPES)}")
    return DATATYPES[datatype]


def _elements(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a shape. Raises BadRequest for more dimensions than an array can have."""
    if len(shape) > _MOST_DIMENSIONS:  # the product of 100,000 sizes would take minutes
        raise BadRequest(f"{brief(name)}: has {len(shape)} dimensions; an array has at most {_MOST_DIMENSIONS}")
    return math.prod(shape)


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> TensorBytes:
    """Return an input as a view of its bytes. Raises BadRequest if they do not fit its shape and datatype."""
    dtype = dtype_of(name, datatype)
    expected = DTYPES[dtype].bits // 8 * _elements(name, shape)
    if min(shape, default=0) < 0 or expected != len(data):
        raise BadRequest(f"{brief(name)}: {datatype}{list(shape)} is {expected} bytes, got {len(data)}")
    if dtype == "BOOL" and bytes(data).translate(None, b"\0\1"):
        raise BadRequest(f"{brief(name)}: a BOOL is a byte of 0 or 1, but the data has others")
    return TensorBytes(dtype, tuple(shape), data)


def _from_json(tensor: InputTensor) -> TensorBytes:
    dtype, shape, name = dtype_of(tensor.name, tensor.datatype), tuple(tensor.shape), brief(tensor.name)
    if not tensor.data:
        raise BadRequest(f"{name}: has neither data nor {BINARY_SIZE}")
    elements = _elements(name, shape)
    if (commas := bytes(tensor.data).count(b",")) > elements + _SPARE_COMMAS:  # refuse before parsing
        raise BadRequest(f"{name}: shape {list(shape)} has {elements} elements, but the data about {commas}")
    kind: Any = bool if dtype == "BOOL" else float if has_fractions(dtype) else int
    try:
        values = _flat(tensor.data, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"{name}: data: {error}; expected {tensor.datatype}") from error
    return from_values(name, dtype, shape, values)


def _flat(data: msgspec.Raw, kind: Any) -> list[Any]:
    try:
        flat: list[Any] = msgspec.json.decode(data, type=list[kind])
        return flat
    except msgspec.ValidationError:
        values = msgspec.json.decode(data, type=list[Any])
        if not values or not isinstance(values[0], list):
            raise
    while values and all(isinstance(value, list) for value in values):
        values = [item for value in values for item in value]
    converted: list[Any] = msgspec.convert(values, list[kind])
    return converted


def from_values(name: str, dtype: str, shape: tuple[int, ...], values: Sequence[Any]) -> TensorBytes:
    """Return an input of bools, integers or floats in row-major order. Raises BadRequest if they do not fit."""
    if (elements := _elements(name, shape)) != len(values):
        raise BadRequest(f"{name}: shape {list(shape)} has {elements} elements, but the data {len(values)}")
    if has_fractions(dtype):
        with np.errstate(over="ignore"):
            array = np.asarray(values, np.float64).astype(numpy_dtype(dtype))
        fits = bool(np.isfinite(array.astype(np.float64)).all())
    else:
        limits = _LIMITS.get(dtype, (False, True))
        fits = not values or (min(values) >= limits[0] and max(values) <= limits[1])
        array = np.asarray(values if fits else [], numpy_dtype(dtype))
    if not fits:
        raise BadRequest(f"{name}: data has a number that {DATATYPE_OF[dtype]} cannot hold")
    try:
        return array_content(array.reshape(shape))
    except ValueError as error:  # such as a huge size beside a size of 0
        raise BadRequest(f"{name}: shape {brief(str(list(shape)))}: {error}") from error


class Answer(NamedTuple):
    """The outputs of one call, and the weights that gave them. generation, variant: as in `Answered`."""

    outputs: Sequence[Named]
    generation: int | None
    weights_id: str
    variant: str = ""


def version_of(answer: Answer) -> str:
    """Return the `model_version` of an answer."""
    return "canary" if answer.generation is None else str(answer.generation)


def select(outputs: Sequence[Named], names: Sequence[str]) -> Sequence[Named]:
    """Return the outputs of these names, in this order; all of them if there are no names."""
    by_name = dict(outputs)
    return [(name, by_name[name]) for name in names] if names else outputs


def write_outputs(outputs: Sequence[Named], binary: Mapping[str, bool]) -> tuple[list[OutputTensor], list[memoryview]]:
    """Return the outputs' documents, and the bytes of those that are requested as bytes. Raises BadRequest."""
    documents, tail = [], []
    for name, content in outputs:
        document = OutputTensor(name, DATATYPE_OF[content.dtype], list(content.shape))
        if binary[name]:
            document.parameters = {BINARY_SIZE: content.nbytes}
            tail.append(content.data)
        else:
            document.data = _numbers(name, content)
        documents.append(document)
    return documents, tail


def _numbers(name: str, content: TensorBytes) -> list[Any]:
    array = as_array(content).reshape(-1)
    if has_fractions(content.dtype):
        array = array.astype(np.float64) if array.dtype.itemsize < 4 else array
        if not np.isfinite(array).all():
            raise BadRequest(
                f"{brief(name)}: has NaN or infinities, which JSON cannot represent; ask for binary "
                '("parameters": {"binary_data": true})'
            )
    numbers: list[Any] = array.tolist()
    return numbers
