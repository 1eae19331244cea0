"""The protocol over gRPC: its methods, in threads of gRPC's; calls of a model are made by the model's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event, Timer
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError

from weightswap_runtime.messages import brief
from weightswap_runtime.tensors.content import TensorBytes, as_array
from weightswap_server.canary.canary import HEADER
from weightswap_server.errors import BadRequest
from weightswap_server.protocol.documents import DATATYPE_OF, GenerateParameters, GenerateRequest
from weightswap_server.protocol.tensors_on_the_wire import Answer, chosen, dtype_of, from_bytes, from_values, version_of
from weightswap_server.protocol.variant_text import PARAMETER, read_variants
from weightswap_server.service.generations import END, OpenGeneration
from weightswap_server.service.service import Service

from .patience import Patience
from .protobuf import SERVICE, message_class

_MOST_DETAIL = 800
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
    """Listens from its making on."""

    def __init__(self, service: Service, shared: bool) -> None:
        """shared: other processes listen at the port, too. Raises OSError where the port cannot be had."""
        settings, self._patience = service.settings, Patience()
        options = [
            ("grpc.max_receive_message_length", settings.max_body),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
        ]
        self._server = grpc.server(
            # a call has a thread from its beginning on: with fewer, some that wait for clients would stop all others
            ThreadPoolExecutor(settings.max_connections, thread_name_prefix="weightswap-grpc"),
            options=options,
            maximum_concurrent_rpcs=settings.max_connections,
        )
        self._server.add_generic_rpc_handlers((_Methods(service, self._patience).handler(),))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{settings.grpc_port}")
        except RuntimeError as error:
            self._patience.end()
            raise OSError(f"gRPC cannot listen on {host}:{settings.grpc_port}: {error}") from error
        self._server.start()

    def stop(self, grace: float) -> Event:
        """Take no more, and break off what goes on for longer; the event comes when nothing does."""
        ended: Event = self._server.stop(grace)
        return ended

    def close(self, grace: float) -> None:
        """As `stop`, and wait for it."""
        self.stop(grace).wait()
        self._patience.end()


def _metadata(context: grpc.ServicerContext, name: str) -> str:
    return str(dict(context.invocation_metadata()).get(name, ""))


class _Methods:
    def __init__(self, service: Service, patience: Patience) -> None:
        self._service, self._patience = service, patience

    def handler(self) -> Any:
        """What gRPC asks for the methods."""
        unary = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "ModelInfer": self._infer,
        }
        handlers = {name: self._answering(name, method) for name, method in unary.items()}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, _reading("ModelInferRequest"), _serialized
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answering(self, name: str, method: Callable[[Any, Any], Any]) -> Any:
        """A method whose errors are statuses."""

        def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            arrived, request = time.perf_counter(), None
            try:
                request = self._one(requests, context)
                return method(request, context)
            except grpc.RpcError:  # it was cancelled
                raise
            except CancelledError:
                context.abort(grpc.StatusCode.CANCELLED, "the client has given up")
            except Exception as error:
                told = self._service.refused(
                    getattr(request, "model_name", ""), error, arrived, _metadata(context, "traceparent")
                )
                context.abort(grpc.StatusCode[told.code], _detail(told.text))

        # to gRPC it is a stream, whose request can be waited for with a limit
        return grpc.stream_unary_rpc_method_handler(answer, _reading(f"{name}Request"), _serialized)

    def _one(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """The request of a call. Raises BadRequest, and RpcError where it does not come in time."""
        self._patience.expect(context, self._service.settings.body_timeout)
        try:
            request = next(requests, None)
        finally:
            self._patience.met(context)
        if request is None:
            raise BadRequest("expected one request message, got none")
        return _read(request)

    def _live(self, request: Any, context: Any) -> Any:
        return message_class("ServerLiveResponse")(live=True)

    def _ready(self, request: Any, context: Any) -> Any:
        return message_class("ServerReadyResponse")(ready=self._service.ready)

    def _model_ready(self, request: Any, context: Any) -> Any:
        return message_class("ModelReadyResponse")(ready=self._service.find(request.name, request.version).ready)

    def _server(self, request: Any, context: Any) -> Any:
        return message_class("ServerMetadataResponse")(**msgspec.to_builtins(self._service.server_metadata()))

    def _model(self, request: Any, context: Any) -> Any:
        said = msgspec.to_builtins(self._service.model_metadata(request.name, request.version))
        del said["parameters"]
        return message_class("ModelMetadataResponse")(**said)

    def _infer(self, request: Any, context: grpc.ServicerContext) -> Any:
        tensors = _tensors(request)
        traceparent, wish = _metadata(context, "traceparent"), _metadata(context, HEADER)
        name, version = request.model_name, request.model_version
        served, call = self._service.call(name, version, tensors, traceparent, wish, _variants(request))
        wanted = [output.name for output in request.outputs]
        call.method.check_outputs(wanted)
        served.thread.submit(call)
        context.add_callback(call.answer.cancel)
        answer = self._service.wait_here(call.answer)
        self._service.metrics.answered(name, answer.weights_id)
        return response(request, answer, wanted)

    def _stream(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """One answer to each request, or one for each token; an error is an answer, too."""
        made, patience = message_class("ModelStreamInferResponse"), self._service.settings.stream_timeout
        self._patience.expect(context, patience)
        try:
            for request in requests:
                for answer in self._answers(request, context):
                    yield made(**answer)
                    self._patience.expect(context, patience)
        finally:
            self._patience.met(context)

    def _answers(self, request: Any, context: grpc.ServicerContext) -> Iterator[dict[str, Any]]:
        try:
            if self._service.find_ready(_read(request).model_name, request.model_version).generates:
                for found in self._generated(request, _metadata(context, "traceparent")):
                    yield {"infer_response": found}
            else:
                yield {"infer_response": self._infer(request, context)}
        except CancelledError:
            return
        except Exception as error:
            yield {"error_message": self._service.refused(getattr(request, "model_name", ""), error).text}

    def _generated(self, request: Any, traceparent: str) -> Iterator[Any]:
        name, version = request.model_name, request.model_version
        generation = OpenGeneration(self._service, name, version, _prompt(request), traceparent)
        end = Timer(generation.left, generation.close)  # also where the client does not read
        end.daemon = True
        end.start()
        try:
            while (piece := generation.next_here()) is not END:
                token = TensorBytes("I64", (1,), memoryview(piece.to_bytes(8, "little")))
                yield response(request, Answer([("output_ids", token)], *msgspec.structs.astuple(generation.said)), [])
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                last = response(request, Answer([], *msgspec.structs.astuple(generation.said)), [])
                last.parameters["triton_final_response"].bool_param = True
                yield last
        finally:
            end.cancel()
            generation.close()


def _prompt(request: Any) -> GenerateRequest:
    """What is to be continued, from the input `input_ids` and the parameters. Raises BadRequest."""
    tensors = _tensors(request)
    if list(tensors) != ["input_ids"] or tensors["input_ids"].dtype != "I64":
        raise BadRequest("expected one input, input_ids, which is INT64")
    given = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
        for name, value in request.parameters.items()
        if not name.startswith("triton_")
    }
    try:
        parameters = msgspec.convert(given, GenerateParameters)
    except msgspec.ValidationError as error:
        raise BadRequest(f"parameters: {error}") from error
    return GenerateRequest(None, as_array(tensors["input_ids"]).reshape(-1).tolist(), request.id, parameters)


def _variants(request: Any) -> dict[str, str]:
    """What the parameters choose. Raises BadRequest."""
    if PARAMETER not in request.parameters:  # a look at it would put it there
        return {}
    value = request.parameters[PARAMETER]
    return read_variants(getattr(value, value.WhichOneof("parameter_choice") or "string_param"))


def _detail(text: str) -> str:
    """As much of it as fits into a status: clients take 8 KB, and a letter may be nine bytes on the wire."""
    return text if len(text) <= _MOST_DETAIL else brief(text, _MOST_DETAIL)


def _reading(name: str) -> Callable[[bytes], Any]:
    """How a message is read. Bytes that are none become a BadRequest; to gRPC they are a failure of the server's."""
    message = message_class(name)

    def read(raw: bytes) -> Any:
        try:
            return message.FromString(raw)
        except DecodeError as error:
            return BadRequest(f"expected a message {name}: {error}")

    return read


def _read(request: Any) -> Any:
    """A request that is a message. Raises BadRequest."""
    if isinstance(request, BadRequest):
        raise request
    return request


def _serialized(message: Any) -> bytes:
    found: bytes = message.SerializeToString()
    return found


def _tensors(request: Any) -> dict[str, TensorBytes]:
    """The inputs by name. Raises BadRequest."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(f"{len(request.inputs)} inputs, and {len(raw)} raw_input_contents")
    tensors: dict[str, TensorBytes] = {}
    for index, tensor in enumerate(request.inputs):
        if tensor.name in tensors:
            raise BadRequest(f"{tensor.name}: given twice")
        if raw:
            if tensor.HasField("contents"):
                raise BadRequest(f"{tensor.name}: has contents beside raw_input_contents")
            tensors[tensor.name] = from_bytes(tensor.name, tensor.datatype, tensor.shape, memoryview(raw[index]))
        else:
            tensors[tensor.name] = _from_contents(tensor)
    return tensors


def _from_contents(tensor: Any) -> TensorBytes:
    dtype, shape = dtype_of(tensor.name, tensor.datatype), tuple(tensor.shape)
    if dtype not in _CONTENTS:
        raise BadRequest(f"{tensor.name}: {tensor.datatype} has no contents; send raw_input_contents")
    if min(shape, default=0) < 0:
        raise BadRequest(f"{tensor.name}: shape {list(shape)} has a negative size")
    field = _CONTENTS[dtype]
    if others := [each.name for each, _ in tensor.contents.ListFields() if each.name != field]:
        raise BadRequest(f"{tensor.name}: {tensor.datatype} is in {field}, got {', '.join(others)}")
    return from_values(tensor.name, dtype, shape, getattr(tensor.contents, field))


def response(request: Any, answer: Answer, wanted: list[str]) -> Any:
    """The message of an answer; its tensors are raw."""
    made = message_class("ModelInferResponse")(
        model_name=request.model_name, model_version=version_of(answer), id=request.id
    )
    if answer.generation is not None:
        made.parameters["generation"].int64_param = answer.generation
    made.parameters["weights_id"].string_param = answer.weights_id
    if answer.variant:
        made.parameters[PARAMETER].string_param = answer.variant
    for name, content in chosen(answer.outputs, wanted):
        made.outputs.add(name=name, datatype=DATATYPE_OF[content.dtype], shape=content.shape)
        made.raw_output_contents.append(bytes(content.data))
    return made
