"""The Open Inference Protocol: its documents, tensors as JSON or bytes, and the names of variants.

Bodies are hostile: while JSON is parsed no other thread runs, and a short document can become very many objects. So its
size and structure have limits, and numbers are converted only once their names, dtypes and shapes fit the model.
Docstrings of documents are their descriptions in /openapi.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import brief
from weightswap_runtime.tensors import DTYPES, TensorBytes, array_content, as_array, has_fractions, numpy_dtype

from .errors import BadRequest, BodyTooLarge

DATATYPES = {
    "BOOL": "BOOL",
    "UINT8": "U8",
    "UINT16": "U16",
    "UINT32": "U32",
    "UINT64": "U64",
    "INT8": "I8",
    "INT16": "I16",
    "INT32": "I32",
    "INT64": "I64",
    "FP16": "F16",
    "BF16": "BF16",
    "FP32": "F32",
    "FP64": "F64",
}
"""The safetensors dtype of each of the protocol's datatypes."""
DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}
_SHARED_MEMORY = "shared_memory_region"
BINARY_SIZE = "binary_data_size"
HEADER_LENGTH = "inference-header-content-length"
MOST_JSON, MOST_DOCUMENT = 4 << 20, 2 << 20  # bytes of the JSON of a call, and of any other document
EXTENSIONS = ("binary_tensor_data", "generate", "weightswap")
PARAMETER = "variant"
NAME = r"[^\s,=/][^\s,=]{0,199}"
"""Pattern of the names of variants and groups that requests can contain."""
_NAME = re.compile(NAME)
_MOST_DIMENSIONS = 64  # the limit of numpy and torch
_MOST_SHAPE = 1 << 16  # bytes of JSON
_SMALL_JSON = 1 << 16  # bytes whose structure can be anything
_MOST_OBJECTS, _MOST_QUOTES = 20_000, 100_000  # in larger JSON; for a thousand inputs with all their fields
_PIECE = 1 << 14  # numbers that are converted at once: other threads run in between
_UNSTRUCTURED = bytes(set(range(256)) - set(b"[],"))
_BESIDE_NUMBERS = b"[] \t\r\n"
_INTEGERS = {dtype: np.iinfo(numpy_dtype(dtype)) for dtype in DATATYPE_OF if dtype[0] in "IU"}
_LIMITS = {dtype: (int(limits.min), int(limits.max)) for dtype, limits in _INTEGERS.items()}

_NO_DATA = (b"", b"null")  # null is as absent

T = TypeVar("T")
Named = tuple[str, TensorBytes]
Role = Literal["server", "owner", "worker"]
Parameters = dict[str, bool | int | float | str | None]
_MOST = (1 << 63) - 1  # the largest signed integer of 64 bits
_SIZES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MOST}}
Array = Annotated[Raw, Meta(extra_json_schema={"type": "array"})]
Count = Annotated[int, Meta(ge=0, le=_MOST)]
_SHAPES = msgspec.json.Decoder(tuple[Count, ...])


class InputTensor(Struct):
    """An input. `data` is row-major, nested or flat; or absent, with `binary_data_size` in the parameters."""

    name: str
    datatype: str
    shape: Annotated[Raw, Meta(extra_json_schema=_SIZES)]
    parameters: Parameters | None = None
    data: Array = msgspec.field(default_factory=Raw)


class WantedOutput(Struct):
    """A requested output. `binary_data` in the parameters asks for bytes."""

    name: str
    parameters: Parameters | None = None


class InferRequest(Struct):
    """A call. Parameters: `binary_data_output` asks for all outputs as bytes, `variant` chooses, as in "lora=a"."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[WantedOutput] | None = None


class OutputTensor(Struct, omit_defaults=True):
    """An output. `data` is flat and row-major; or absent, with `binary_data_size` in the parameters."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: Array | msgspec.UnsetType = msgspec.UNSET


class Answered(Struct, omit_defaults=True):
    """The weights that have answered; a canary has no generation. variant: the chosen ones, as GROUP=WEIGHTS ID."""

    generation: int | None
    weights_id: str
    variant: str = ""


class InferResponse(Struct, omit_defaults=True):
    """The answer to a call. `model_version` is the generation of the weights that have answered."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    parameters: Answered
    id: str = ""


class TensorMetadata(Struct):
    """An input or output of a method. -1 in `shape` is a dynamic size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct):
    """A model. `versions` has the served generation, and is empty before the first weights."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any]


class ServerMetadata(Struct):
    """The server and its extensions of the protocol."""

    name: str
    version: str
    extensions: list[str]


class Welcome(Struct):
    """What a server is, and where to go on."""

    name: str
    version: str
    models: list[str]
    paths: dict[str, str]


class IndexEntry(Struct):
    """One model of the index."""

    name: str
    version: str
    state: str
    reason: str


class ErrorDocument(Struct):
    """The reason why a request was not answered."""

    error: str


class GenerateParameters(Struct, forbid_unknown_fields=True):
    """The parameters of `Model.generate`. variant: such as "lora=customer-a"."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_k: Annotated[int, Meta(ge=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    stop: Annotated[list[str | int], Meta(max_length=256)] = []
    seed: Count | None = None
    variant: str = ""


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """A prompt, as text or as token ids."""

    text_input: str | None = None
    input_ids: list[Count] | None = None
    id: str | None = None
    parameters: GenerateParameters | None = None


class GenerateResponse(Struct, omit_defaults=True):
    """A continuation or a piece of one: text or token ids, as the prompt was."""

    model_name: str
    model_version: str
    parameters: Answered
    text_output: str | None = None
    output_ids: list[int] | None = None
    id: str = ""


class Serving(Struct, frozen=True, kw_only=True):
    """The weights that new calls of a model use in one process; None before the first weights."""

    generation: int | None
    weights_id: str | None


class Process(Struct, frozen=True, kw_only=True):
    """One process; times in seconds since the epoch.

    role: a "server" answers and changes weights, an "owner" changes them for its "worker"s. heard: when it last
    reported that it is alive. answered: the requests it has answered. models: by name.
    """

    role: Role
    name: str
    pid: int
    since: float
    heard: float
    ready: bool
    answered: int = 0
    models: dict[str, Serving] = {}


def read_request(
    body: bytes, header_length: str | None, check: Callable[[Mapping[str, TensorBytes]], object]
) -> tuple[InferRequest, dict[str, TensorBytes]]:
    """Return a request's document and its inputs by name. Binary inputs are views of the body.

    check: called before tensors are converted from JSON, with empty ones; raises for inputs that the model does not
    take. Raises BadRequest and BodyTooLarge.
    """
    head, tail = _split(memoryview(body), header_length)
    if len(head) > MOST_JSON:
        raise BodyTooLarge(f"the JSON has {len(head)} bytes, at most {MOST_JSON} are read; send tensors as bytes")
    if len(head) > _SMALL_JSON:
        _check_structure(bytes(head))
    request = decoded(head, InferRequest)
    inputs, later = _inputs(request.inputs, tail)
    if later:
        check(inputs)
        inputs |= {name: convert() for name, convert in later.items()}
    return request, inputs


def _check_structure(head: bytes) -> None:
    """Raise BadRequest for JSON that would become very many objects. Numbers and lists in data do not."""
    if (objects := head.count(b"{")) > _MOST_OBJECTS or (quotes := head.count(b'"')) > _MOST_QUOTES:
        found = f"{objects} objects" if objects > _MOST_OBJECTS else f"{quotes} quotes"
        raise BadRequest(f"the request's JSON has {found}; a call has at most {_MOST_OBJECTS} and {_MOST_QUOTES}")


def decoded(document: bytes | memoryview, kind: type[T]) -> T:
    """Decode a JSON document of a request. Raises BadRequest."""
    try:
        return from_json(document, kind)
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


_Later = dict[str, Callable[[], TensorBytes]]


def _inputs(tensors: Sequence[InputTensor], tail: memoryview) -> tuple[dict[str, TensorBytes], _Later]:
    """Return the inputs, and the conversions of those that are empty yet; numbers alone may be sizes of others."""
    inputs: dict[str, TensorBytes] = {}
    later: _Later = {}
    for tensor in tensors:
        if tensor.name in inputs:
            raise BadRequest(f"{brief(tensor.name)}: given more than once")
        shape = _shape(tensor)
        parameters = tensor.parameters or {}
        check_sent(tensor.name, parameters)
        if (size := parameters.get(BINARY_SIZE)) is None:
            convert = partial(_from_json, tensor, shape)
            if _elements(tensor.name, shape) == 1:
                inputs[tensor.name] = convert()
            else:
                inputs[tensor.name] = TensorBytes(dtype_of(tensor.name, tensor.datatype), shape, memoryview(b""))
                later[tensor.name] = convert
            continue
        if type(size) is not int or not 0 <= size <= len(tail):
            raise BadRequest(
                f"{brief(tensor.name)}: {BINARY_SIZE}={size!r}, but {len(tail)} bytes are left in the body"
            )
        if bytes(tensor.data) not in _NO_DATA:
            raise BadRequest(f"{brief(tensor.name)}: has both data and {BINARY_SIZE}")
        inputs[tensor.name] = from_bytes(tensor.name, tensor.datatype, shape, tail[:size])
        tail = tail[size:]
    if tail:
        raise BadRequest(f"{len(tail)} bytes at the end of the body belong to no input")
    return inputs, later


def _shape(tensor: InputTensor) -> tuple[int, ...]:
    try:
        if len(tensor.shape) <= _MOST_SHAPE:
            return _SHAPES.decode(tensor.shape)
        problem = f"has {len(tensor.shape)} bytes; an array has at most {_MOST_DIMENSIONS} dimensions"
    except msgspec.MsgspecError as error:
        problem = str(error)
    raise BadRequest(f"{brief(tensor.name)}: shape: {problem}")


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
    if dtype == "BOOL" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise BadRequest(f"{brief(name)}: a BOOL is a byte of 0 or 1, but the data has others")
    return TensorBytes(dtype, tuple(shape), data)


def _from_json(tensor: InputTensor, shape: tuple[int, ...]) -> TensorBytes:
    dtype, data, name = dtype_of(tensor.name, tensor.datatype), bytes(tensor.data), brief(tensor.name)
    if data in _NO_DATA:
        raise BadRequest(f"{name}: has neither data nor {BINARY_SIZE}")
    if data.lstrip(b"[ \t\r\n").startswith(b"{"):
        raise BadRequest(f"{name}: data: expected numbers, got objects; bytes follow the JSON ({BINARY_SIZE})")
    elements, lists = _elements(name, shape), data.translate(None, _UNSTRUCTURED)
    if not _is_nested(lists, (elements,)) and not _is_nested(lists, shape):
        found = lists.count(b",") + 1 if lists != b"[]" else 0
        text = f"{name}: shape {brief(str(list(shape)))} has {brief(str(elements))} elements, but the data {found}"
        advice = ", nested otherwise; expected one list of numbers, or lists nested like the shape"
        raise BadRequest(text + advice if found == elements else text)
    kind: Any = bool if dtype == "BOOL" else float if has_fractions(dtype) else int
    try:
        return from_values(name, dtype, shape, elements, _values(data.translate(None, _BESIDE_NUMBERS), kind))
    except msgspec.MsgspecError as error:
        problem = str(error).partition(" - at ")[0]  # the place would be one in a piece
        raise BadRequest(f"{name}: data: {problem}; expected {tensor.datatype}") from error


def _is_nested(lists: bytes, shape: Sequence[int]) -> bool:
    """Return True if nested lists, of which only brackets and commas are left, have a shape."""
    if not shape:
        return False
    inner, length = b"", 0
    for size in reversed(shape):
        length = 2 + size * length + max(0, size - 1)
        if length > len(lists):
            return False
        inner = b"[" + b",".join([inner] * size) + b"]"
    return inner == lists


def _values(numbers: bytes, kind: Any) -> Iterator[list[Any]]:
    """Yield numbers that commas separate, in pieces."""
    begin = 0
    while begin < len(numbers):
        end = numbers.find(b",", begin + 4 * _PIECE)
        end = len(numbers) if end < 0 else end
        yield from_json(b"[%s]" % numbers[begin:end], list[kind])
        begin = end + 1


def from_values(
    name: str, dtype: str, shape: tuple[int, ...], count: int, pieces: Iterable[Sequence[Any]]
) -> TensorBytes:
    """Return an input of `count` bools, integers or floats in row-major order. Raises BadRequest if they do not fit."""
    if (elements := _elements(name, shape)) != count:
        raise BadRequest(f"{name}: shape {list(shape)} has {elements} elements, but the data {count}")
    array, place = np.empty(count, numpy_dtype(dtype)), 0
    for values in pieces:
        array[place : place + len(values)] = _converted(name, dtype, values)
        place += len(values)
    if place != count:  # a list without numbers looks like one with one
        raise BadRequest(f"{name}: shape {brief(str(list(shape)))} has {count} elements, but the data {place}")
    try:
        return array_content(array.reshape(shape))
    except ValueError as error:  # such as a huge size beside a size of 0
        raise BadRequest(f"{name}: shape {brief(str(list(shape)))}: {error}") from error


def _converted(name: str, dtype: str, values: Sequence[Any]) -> NDArray[Any]:
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
    return array


def pieces_of(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield a sequence in pieces, between which other threads run."""
    return (values[begin : begin + _PIECE] for begin in range(0, len(values), _PIECE))


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


def json_problem(name: str, content: TensorBytes) -> str:
    """Return why JSON cannot represent an output; empty if it can."""
    if not has_fractions(content.dtype) or np.isfinite(_wide(content)).all():
        return ""
    return (
        f"{brief(name)}: has NaN or infinities, which JSON cannot represent; ask for binary "
        '("parameters": {"binary_data": true})'
    )


def _wide(content: TensorBytes) -> NDArray[Any]:
    array = as_array(content).reshape(-1)
    return array.astype(np.float64) if has_fractions(content.dtype) and array.dtype.itemsize < 4 else array


def _numbers(name: str, content: TensorBytes) -> msgspec.Raw:
    if problem := json_problem(name, content):
        raise BadRequest(problem)
    array = _wide(content)
    pieces: Iterator[Any] = pieces_of(array)  # type: ignore[arg-type]
    return msgspec.Raw(b"[%s]" % b",".join(msgspec.json.encode(piece.tolist())[1:-1] for piece in pieces))


def check_wanted(name: str, parameters: Iterable[str]) -> None:
    """Raise BadRequest for an output that is not wanted in the response, or not as numbers."""
    if "classification" in parameters:
        raise BadRequest(
            f"{brief(name)}: classification (class_count) is not supported; ask for the output and sort it"
        )
    check_sent(name, parameters)


def check_sent(name: str, parameters: Iterable[str]) -> None:
    """Raise BadRequest for a tensor that is, or shall be, in memory that a client shares."""
    if _SHARED_MEMORY in parameters:
        raise BadRequest(f"{brief(name)}: shared memory ({_SHARED_MEMORY}) is not supported; send the data")


def read_variants(text: object) -> dict[str, str]:
    """Parse names by group; none from None or "". Raises BadRequest."""
    variants: dict[str, str] = {}
    if text is None or text == "":
        return variants
    if not isinstance(text, str):
        raise BadRequest(f"{PARAMETER}: expected a string, got {brief(repr(text))}")
    for part in text.split(","):
        group, equals, name = part.partition("=")
        if not (equals and _NAME.fullmatch(group) and _NAME.fullmatch(name)):
            raise BadRequest(f"{PARAMETER}: expected GROUP=NAME, separated by commas, got {brief(repr(part))}")
        if group in variants:
            raise BadRequest(f"{PARAMETER}: {brief(group)} is chosen more than once")
        variants[group] = name
    return variants


def write_variants(ids: Mapping[str, str]) -> str:
    """Return the text form of names or weights ids by group."""
    return ",".join(f"{group}={value}" for group, value in ids.items())
