"""The messages of the Open Inference Protocol's gRPC service, made in a descriptor pool of their own.

Clients add definitions of the same names to protobuf's default pool, where duplicates collide; with a pool of our own,
a client or another server may live in the same process. No generated code or protobuf compiler is needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from weightswap_server.errors import BodyTooLarge

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_TENSOR = "name:string datatype:string shape:int64*"
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready:bool",
    "ModelReadyRequest": "name:string version:string",
    "ModelReadyResponse": "ready:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name:string version:string extensions:string*",
    "ModelMetadataRequest": "name:string version:string",
    "ModelMetadataResponse": "name:string versions:string* platform:string "
    "inputs:ModelMetadataResponse.TensorMetadata* outputs:ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": _TENSOR,
    "InferParameter": "bool_param:bool int64_param:int64 string_param:string double_param:double uint64_param:uint64",
    "InferTensorContents": "bool_contents:bool* int_contents:int32* int64_contents:int64* uint_contents:uint32* "
    "uint64_contents:uint64* fp32_contents:float* fp64_contents:double* bytes_contents:bytes*",
    "ModelInferRequest": "model_name:string model_version:string id:string parameters:map "
    "inputs:ModelInferRequest.InferInputTensor* outputs:ModelInferRequest.InferRequestedOutputTensor* "
    "raw_input_contents:bytes*",
    "ModelInferRequest.InferInputTensor": f"{_TENSOR} parameters:map contents:InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "name:string parameters:map",
    "ModelInferResponse": "model_name:string model_version:string id:string parameters:map "
    "outputs:ModelInferResponse.InferOutputTensor* raw_output_contents:bytes*",
    "ModelInferResponse.InferOutputTensor": f"{_TENSOR} parameters:map contents:InferTensorContents",
    "ModelStreamInferResponse": "error_message:string infer_response:ModelInferResponse",
}
"""The fields of each message, numbered from 1: `name:type`, `*` if repeated; `map`: strings to InferParameter."""
_ONE_OF = {"InferParameter": "parameter_choice"}
_Field = descriptor_pb2.FieldDescriptorProto

_RAW = "raw_input_contents"
_SMALL = 1 << 12  # bytes of a message that may be of any kind
_MOST_BESIDE_RAW = 2 << 20  # no other thread runs while a message is parsed
_SIZES = {1: 8, 5: 4}  # bytes of the fixed wire types


@cache
def message_class(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def parsed(name: str, raw: bytes, most_fields: int) -> Any:
    """Parse a message. Raises DecodeError, and BodyTooLarge for one that would take far more time or memory than its
    bytes. most_fields: of a large message, with those of the messages in it."""
    kind = message_class(name)
    if len(raw) > _SMALL:
        _check_size(raw, kind.DESCRIPTOR, most_fields)
    return kind.FromString(raw)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")
    descriptors: dict[str, Any] = {}
    for name, fields in MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        message = descriptors[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=inner)
        descriptors[name] = message
        for number, field in enumerate(fields.split(), start=1):
            _add_field(message, name, number, *field.split(":"))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_field(message: Any, owner: str, number: int, name: str, kind: str) -> None:
    repeated = kind.endswith("*") or kind == "map"
    label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind == "map":
        entry = message.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        _add_field(entry, "", 1, "key", "string")
        _add_field(entry, "", 2, "value", "InferParameter")
        kind = f"{owner}.ParametersEntry"
    kind = kind.rstrip("*")
    if kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")
    if owner in _ONE_OF:
        if not message.oneof_decl:
            message.oneof_decl.add(name=_ONE_OF[owner])
        field.oneof_index = 0


def _check_size(raw: bytes, descriptor: Any, most_fields: int) -> None:
    """Count the fields of a message and of those in it, without parsing them. A field of two bytes on the wire becomes
    an object many times as large. Raises BodyTooLarge, and DecodeError for a field that ends beyond its message."""
    fields, documents, unread = 0, len(raw), [(0, len(raw), descriptor)]
    while unread:
        place, end, kind = unread.pop()
        while place < end:
            fields += 1
            number, begin, place = _field(raw, place)
            if place > end:  # its length would be taken from the count of the others
                raise DecodeError("a field ends beyond its message")
            field = kind.fields_by_number.get(number)
            if field is not None and field.message_type is not None:
                unread.append((begin, place, field.message_type))
            elif field is not None and field.name == _RAW:
                documents -= place - begin
            if fields > most_fields:
                raise BodyTooLarge(f"the message has more than {most_fields} fields; send tensors in {_RAW}")
    if documents > _MOST_BESIDE_RAW:
        raise BodyTooLarge(f"the message has {documents} bytes beside {_RAW}, at most {_MOST_BESIDE_RAW} are read")


def _field(raw: bytes, place: int) -> tuple[int, int, int]:
    """Return the number of the field at a place, and where its content begins and ends. Raises DecodeError."""
    try:
        tag, begin = _varint(raw, place)
        if tag & 7 == 2:
            size, begin = _varint(raw, begin)
            return tag >> 3, begin, begin + size
        end = _varint(raw, begin)[1] if tag & 7 == 0 else begin + _SIZES.get(tag & 7, 0)
    except IndexError as error:
        raise DecodeError("the last field is incomplete") from error
    return 0, begin, end


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while raw[place] > 127 and shift < 63:
        value |= (raw[place] & 127) << shift
        place, shift = place + 1, shift + 7
    return value | raw[place] << shift, place + 1
