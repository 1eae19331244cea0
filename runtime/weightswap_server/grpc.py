"""The Open Inference Protocol over gRPC: its methods, which decode messages for the service and encode its answers.

A thread answers each call. All methods are registered as streams of requests, so that a client that sends none, or does
not read, can be given a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import cache
from threading import Event, Thread, Timer
from typing import Any

import grpc
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from weightswap_runtime.decoding import converted
from weightswap_runtime.errors import brief
from weightswap_runtime.tensors import TensorBytes, as_array
from weightswap_server.canary import HEADER
from weightswap_server.errors import BadRequest, BodyTooLarge, RequestError
from weightswap_server.protocol import (
    DATATYPE_OF,
    PARAMETER,
    Answer,
    GenerateParameters,
    GenerateRequest,
    check_sent,
    check_wanted,
    dtype_of,
    from_bytes,
    from_values,
    pieces_of,
    version_of,
)
from weightswap_server.service.generations import END, OpenGeneration
from weightswap_server.service.service import Service

_INTERVAL = 0.25  # seconds between two checks of timeouts
_MOST_DETAIL = 800  # characters of a status' text: clients take 8 KB, and one may be nine bytes on the wire
_FIELDS, _FIELDS_OF_TENSOR = 1000, 16  # of a message; a tensor has 5 or 6, and 4 more for each parameter
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("I8", "I16", "I32"), "int_contents"),
    **dict.fromkeys(("U8", "U16", "U32"), "uint_contents"),
    "I64": "int64_contents",
    "U64": "uint64_contents",
    "F32": "fp32_contents",
    "F64": "fp64_contents",
}


class GrpcServer:
    """The gRPC server. It listens as soon as it is made."""

    def __init__(self, service: Service, shared: bool) -> None:
        """shared: other processes listen at the port, too. Raises OSError if the port is not available."""
        settings, self._timeouts = service.settings, _ClientTimeouts()
        options = [
            ("grpc.max_receive_message_length", settings.max_body),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
        ]
        # each call occupies a thread from its start: with fewer, calls that wait for clients would block others
        self._threads = ThreadPoolExecutor(settings.max_connections, thread_name_prefix="weightswap-grpc")
        self._server = grpc.server(
            self._threads,
            options=options,
            maximum_concurrent_rpcs=settings.max_connections,
        )
        self._server.add_generic_rpc_handlers((_Methods(service, self._timeouts).handler(),))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{settings.grpc_port}")
        except RuntimeError as error:
            self._timeouts.close()
            raise OSError(f"gRPC cannot listen on {host}:{settings.grpc_port}: {error}") from error
        self._server.start()

    def stop(self, grace: float) -> Event:
        """Refuse new calls, and cancel those still running after the grace. The event is set once none is left."""
        ended: Event = self._server.stop(grace)
        return ended

    def close(self, grace: float) -> None:
        """Stop, and wait until no call is left."""
        self.stop(grace).wait()
        self._timeouts.close()
        self._threads.shutdown(wait=False)


class _Methods:
    def __init__(self, service: Service, timeouts: _ClientTimeouts) -> None:
        self._service, self._timeouts = service, timeouts
        methods = [method for served in service.served for method in served.methods.values()]
        most = max((len(method.inputs) + len(method.outputs) for method in methods), default=0)
        self._most_fields = _FIELDS + _FIELDS_OF_TENSOR * most

    def handler(self) -> Any:
        """Return the generic handler of all methods."""
        unary = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "ModelInfer": self._infer,
        }
        handlers = {name: self._with_errors(name, method) for name, method in unary.items()}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, self._parser("ModelInferRequest"), _serialized
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _with_errors(self, name: str, method: Callable[[Any, Any], Any]) -> Any:
        """Return a gRPC handler of a method, which sends errors as statuses."""

        def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            arrived, request = time.perf_counter(), None
            try:
                request = self._receive(requests, context)
                return method(request, context)
            except grpc.RpcError:  # the call was cancelled
                raise
            except CancelledError:
                context.abort(grpc.StatusCode.CANCELLED, "the client cancelled the call")
            except Exception as error:
                failure = self._service.refused(
                    getattr(request, "model_name", ""), error, arrived, _metadata(context, "traceparent")
                )
                context.abort(grpc.StatusCode[failure.code], _detail(failure.text))

        # registered as a stream, whose one request can be awaited with a timeout
        return grpc.stream_unary_rpc_method_handler(answer, self._parser(f"{name}Request"), _serialized)

    def _parser(self, name: str) -> Callable[[bytes], Any]:
        """Return a parser of a message. It returns a RequestError instead of raising it: gRPC would blame the server.

        One thread of gRPC's parses the messages of all calls.
        """

        def parse(raw: bytes) -> Any:
            try:
                return parsed(name, raw, self._most_fields)
            except DecodeError as error:
                return BadRequest(f"expected a message {name}: {error}")
            except BodyTooLarge as error:
                return error

        return parse

    def _receive(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """Receive the request of a call. Raises BadRequest, and RpcError if it does not arrive in time."""
        self._timeouts.start(context, self._service.settings.body_timeout)
        try:
            request = next(requests, None)
        finally:
            self._timeouts.stop(context)
        if request is None:
            raise BadRequest("expected one request message, got none")
        return _checked(request)

    def _live(self, request: Any, context: Any) -> Any:
        return message_class("ServerLiveResponse")(live=True)

    def _ready(self, request: Any, context: Any) -> Any:
        return message_class("ServerReadyResponse")(ready=self._service.ready)

    def _model_ready(self, request: Any, context: Any) -> Any:
        return message_class("ModelReadyResponse")(ready=self._service.find(request.name, request.version).ready)

    def _server(self, request: Any, context: Any) -> Any:
        return message_class("ServerMetadataResponse")(**msgspec.to_builtins(self._service.server_metadata()))

    def _model(self, request: Any, context: Any) -> Any:
        metadata = msgspec.to_builtins(self._service.model_metadata(request.name, request.version))
        del metadata["parameters"]
        return message_class("ModelMetadataResponse")(**metadata)

    def _infer(self, request: Any, context: grpc.ServicerContext) -> Any:
        for output in request.outputs:
            check_wanted(output.name, output.parameters)
        call = self._service.call(
            request.model_name,
            request.model_version,
            _tensors(request),
            outputs=[output.name for output in request.outputs],
            variants=_variants(request),
            routing=_metadata(context, HEADER),
            traceparent=_metadata(context, "traceparent"),
        )
        context.add_callback(call.answer.cancel)  # drops the call if it has not begun
        answer = self._service.answer_blocking(call, context.is_active)
        message = _response(request, answer)
        self._service.answered(call, answer)
        return message

    def _stream(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield one response to each request, or one for each token; errors are responses, too."""
        message, timeout = message_class("ModelStreamInferResponse"), self._service.settings.stream_timeout
        self._timeouts.start(context, timeout)
        try:
            for request in requests:
                for answer in self._answers(request, context):
                    yield message(**answer)
                    self._timeouts.start(context, timeout)
        finally:
            self._timeouts.stop(context)

    def _answers(self, request: Any, context: grpc.ServicerContext) -> Iterator[dict[str, Any]]:
        try:
            served = self._service.find_ready(_checked(request).model_name, request.model_version)
            if (generation := served.model.artifact.manifest.generation) is not None:
                for piece in self._generated(request, generation.length, context):
                    yield {"infer_response": piece}
            else:
                yield {"infer_response": self._infer(request, context)}
        except CancelledError:
            return
        except Exception as error:
            yield {"error_message": self._service.refused(getattr(request, "model_name", ""), error).text}

    def _generated(self, request: Any, most: int, context: grpc.ServicerContext) -> Iterator[Any]:
        name, version, traceparent = request.model_name, request.model_version, _metadata(context, "traceparent")
        generation = OpenGeneration(self._service, name, version, _prompt(request, most), traceparent)
        timer = Timer(generation.seconds_left, generation.close)  # even if the client does not read
        timer.daemon = True
        timer.start()
        try:
            while (piece := generation.next_here(context.is_active)) is not END:
                token = "output_ids", TensorBytes("I64", (1,), memoryview(piece.to_bytes(8, "little")))
                yield _response(request, Answer([token], *msgspec.structs.astuple(generation.answered)))
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                last = _response(request, Answer([], *msgspec.structs.astuple(generation.answered)))
                last.parameters["triton_final_response"].bool_param = True
                yield last
        finally:
            timer.cancel()
            generation.close()


def _metadata(context: grpc.ServicerContext, name: str) -> str:
    return str(dict(context.invocation_metadata()).get(name, ""))


def _prompt(request: Any, most: int) -> GenerateRequest:
    """Return the prompt of at most so many tokens in the input `input_ids`, with the parameters. Raises BadRequest."""
    tensors = _tensors(request)
    if list(tensors) != ["input_ids"] or (ids := tensors["input_ids"]).dtype != "I64":
        raise BadRequest("expected exactly one input, input_ids, of datatype INT64")
    if not ids.shape or ids.shape[:-1] not in ((), (1,)):
        raise BadRequest(f"input_ids: expected one prompt, of shape [n] or [1, n], got {list(ids.shape)}")
    if (count := ids.nbytes // 8) > most:
        raise BadRequest(f"the prompt has {count} tokens, but the cache holds {most}")
    values = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
        for name, value in request.parameters.items()
        if not name.startswith("triton_")
    }
    try:
        parameters = converted(values, GenerateParameters)
    except msgspec.ValidationError as error:
        raise BadRequest(f"parameters: {error}") from error
    return GenerateRequest(None, as_array(ids).reshape(-1).tolist(), request.id, parameters)


def _variants(request: Any) -> Any:
    """Return the parameter that chooses variants, or None."""
    if PARAMETER not in request.parameters:  # indexing a protobuf map inserts the key
        return None
    value = request.parameters[PARAMETER]
    return getattr(value, value.WhichOneof("parameter_choice") or "string_param")


def _detail(text: str) -> str:
    return text if len(text) <= _MOST_DETAIL else brief(text, _MOST_DETAIL)


def _checked(request: Any) -> Any:
    """Return a parsed request. Raises BadRequest if it was malformed, and BodyTooLarge."""
    if isinstance(request, RequestError):
        raise request
    return request


def _serialized(message: Any) -> bytes:
    raw: bytes = message.SerializeToString()
    return raw


def _tensors(request: Any) -> dict[str, TensorBytes]:
    """Return the inputs by name. Raises BadRequest."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(f"{len(request.inputs)} inputs, but {len(raw)} raw_input_contents")
    tensors: dict[str, TensorBytes] = {}
    for index, tensor in enumerate(request.inputs):
        if tensor.name in tensors:
            raise BadRequest(f"{tensor.name}: given more than once")
        check_sent(tensor.name, tensor.parameters)
        if raw:
            if tensor.HasField("contents"):
                raise BadRequest(f"{tensor.name}: has both contents and raw_input_contents")
            tensors[tensor.name] = from_bytes(tensor.name, tensor.datatype, tensor.shape, memoryview(raw[index]))
        else:
            tensors[tensor.name] = _from_contents(tensor)
    return tensors


def _from_contents(tensor: Any) -> TensorBytes:
    dtype, shape = dtype_of(tensor.name, tensor.datatype), tuple(tensor.shape)
    if dtype not in _CONTENTS:
        raise BadRequest(f"{tensor.name}: {tensor.datatype} cannot be sent in contents; use raw_input_contents")
    if min(shape, default=0) < 0:
        raise BadRequest(f"{tensor.name}: shape {list(shape)} has a negative size")
    field = _CONTENTS[dtype]
    if others := [other.name for other, _ in tensor.contents.ListFields() if other.name != field]:
        raise BadRequest(f"{tensor.name}: {tensor.datatype} belongs in {field}, got {', '.join(others)}")
    values = getattr(tensor.contents, field)
    return from_values(tensor.name, dtype, shape, len(values), pieces_of(values))


def _response(request: Any, answer: Answer) -> Any:
    """Return the message of an answer, with raw tensors."""
    message = message_class("ModelInferResponse")(
        model_name=request.model_name, model_version=version_of(answer), id=request.id
    )
    if answer.generation is not None:
        message.parameters["generation"].int64_param = answer.generation
    message.parameters["weights_id"].string_param = answer.weights_id
    if answer.variant:
        message.parameters[PARAMETER].string_param = answer.variant
    for name, content in answer.outputs:
        message.outputs.add(name=name, datatype=DATATYPE_OF[content.dtype], shape=content.shape)
        message.raw_output_contents.append(bytes(content.data))
    return message


class _ClientTimeouts:
    """Timeouts that cancel calls whose clients do not send, or read, in time. One thread checks all of them: a timer
    for each call would cost more than the call."""

    def __init__(self) -> None:
        self._deadlines: dict[grpc.ServicerContext, float] = {}
        self._closed = Event()
        Thread(target=self._check, name="weightswap-grpc-timeouts", daemon=True).start()

    def start(self, context: grpc.ServicerContext, seconds: float) -> None:
        """Cancel the call after so many seconds, unless `stop` or `start` is called before."""
        self._deadlines[context] = time.monotonic() + seconds

    def stop(self, context: grpc.ServicerContext) -> None:
        self._deadlines.pop(context, None)

    def close(self) -> None:
        self._closed.set()

    def _check(self) -> None:
        while not self._closed.wait(_INTERVAL):
            now = time.monotonic()
            for context, deadline in self._deadlines.copy().items():
                if now > deadline:
                    self.stop(context)
                    context.cancel()


# Messages. They are made in a descriptor pool of their own: clients add definitions of the same names to protobuf's
# default pool, where duplicates collide, and a client or another server may live in the same process. No generated code
# or protobuf compiler is needed.

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
