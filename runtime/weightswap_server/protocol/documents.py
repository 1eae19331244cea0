"""The Open Inference Protocol, version 2: its datatypes and its JSON documents."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

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
BINARY_SIZE = "binary_data_size"
HEADER_LENGTH = "inference-header-content-length"
MOST_JSON = 4 << 20
"""The most bytes of the JSON of a call: no other thread runs while it is parsed."""
MOST_DOCUMENT = 2 << 20
"""The most bytes of any other document."""
EXTENSIONS = ("binary_tensor_data", "generate", "weightswap")

Parameters = dict[str, bool | int | float | str | None]
_MOST = (1 << 63) - 1
_SIZES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MOST}}
Array = Annotated[Raw, Meta(extra_json_schema={"type": "array"})]
Count = Annotated[int, Meta(ge=0, le=_MOST)]


class InputTensor(Struct):
    """An input. `data` is row-major, nested or flat; or absent, with `binary_data_size` in the parameters."""

    name: str
    datatype: str
    shape: Annotated[Raw, Meta(extra_json_schema=_SIZES)]
    parameters: Parameters = {}
    data: Array = msgspec.field(default_factory=Raw)


class WantedOutput(Struct):
    """A requested output. `binary_data` in the parameters asks for bytes."""

    name: str
    parameters: Parameters = {}


class InferRequest(Struct):
    """A call. Parameters: `binary_data_output` asks for all outputs as bytes, `variant` chooses, as in "lora=a"."""

    inputs: list[InputTensor]
    id: str = ""
    parameters: Parameters = {}
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
    id: str = ""
    parameters: GenerateParameters = msgspec.field(default_factory=GenerateParameters)


class GenerateResponse(Struct, omit_defaults=True):
    """A continuation or a piece of one: text or token ids, as the prompt was."""

    model_name: str
    model_version: str
    parameters: Answered
    text_output: str | None = None
    output_ids: list[int] | None = None
    id: str = ""
