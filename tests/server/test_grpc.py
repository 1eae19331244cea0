"""The Open Inference Protocol over gRPC: its own client, in the process of the server; errors and limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from google.protobuf.message import DecodeError
from torch import nn
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

from tests.support.exported import exported
from tests.support.served import X, await_queued, await_ready, expected, occupied, serving, serving_tiny
from tests.support.tiny import TinyArtifact, WriteWeights
from tests.support.watched import eventually
from weightswap_runtime import Model, load
from weightswap_server import Server
from weightswap_server.grpc import MESSAGES, message_class, parsed

DTYPES = {
    **{f"FP{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"INT{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits: Any = {"max_body": 10_000, "max_queue": 1, "timeout": 0.5}
    with serving_tiny(tmp_path_factory.mktemp("served"), grpc_port=0, **limits) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as found:
        yield found


def given(x: np.ndarray[Any, Any] = X, name: str = "x", datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, list(x.shape), datatype).set_data_from_numpy(x)


def test_our_messages_are_the_protocols() -> None:
    """Field by field as those of the protocol's own client, generated from its .proto file."""
    for name in MESSAGES:
        ours, theirs = message_class(name).DESCRIPTOR, service_pb2
        for part in name.split("."):
            theirs = getattr(theirs, part)
        wanted = theirs.DESCRIPTOR
        assert [(f.name, f.number, f.type, f.is_repeated) for f in ours.fields] == [
            (f.name, f.number, f.type, f.is_repeated) for f in wanted.fields
        ]
        assert [f.message_type and f.message_type.full_name for f in ours.fields] == [
            f.message_type and f.message_type.full_name for f in wanted.fields
        ]


def test_the_protocols_own_client_infers(client: Any, server: Server) -> None:
    outputs = [triton.InferRequestedOutput("output")]
    found = client.infer("tiny", [given()], outputs=outputs, request_id="7", model_version="0")
    np.testing.assert_array_equal(found.as_numpy("output"), expected(1))
    said = found.get_response()
    assert (said.id, said.model_version, said.parameters["generation"].int64_param) == ("7", "0", 0)
    assert said.parameters["weights_id"].string_param == server.service.served[0].model.weights_id


def test_metadata_and_health(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.get_server_metadata().name == "weightswap"
    found = client.get_model_metadata("tiny", as_json=True)
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "3"]}]
    assert found["outputs"] == [{"name": "output", "datatype": "FP32", "shape": ["-1", "5"]}]
    assert found["versions"] == ["0"]


def test_ready_after_the_first_weights(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with (
        serving({"tiny": load(tiny.path)}, warm=False, grpc_port=0) as running,
        triton.InferenceServerClient(f"127.0.0.1:{running.grpc_port}") as client,
    ):
        assert client.is_server_live()
        assert not client.is_server_ready()
        with pytest.raises(triton.InferenceServerException, match=r"UNAVAILABLE.*no weights yet"):
            client.infer("tiny", [given()])
        running.service.served[0].model.swap(weight_file(2))
        await_ready(running)
        np.testing.assert_array_equal(client.infer("tiny", [given()]).as_numpy("output"), expected(2))


CLASSES = [triton.InferRequestedOutput("output", class_count=2)]
SHARED = [triton.InferRequestedOutput("output")]
SHARED[0].set_shared_memory("region", 8)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "says"),
    [
        ("none", [given()], None, "NOT_FOUND.*no model is named none; there are: tiny"),
        ("tiny", [], None, "INVALID_ARGUMENT.*x: missing"),
        ("tiny", [given(), given()], None, "INVALID_ARGUMENT.*x: given more than once"),
        ("tiny", [given(name="y")], None, "INVALID_ARGUMENT.*no such input"),
        ("tiny", [given(X.astype(np.float64), datatype="FP64")], None, "INVALID_ARGUMENT.*expected dtype F32, got F64"),
        ("tiny", [given(X.reshape(3, 2))], None, "INVALID_ARGUMENT.*dimension 1 expected 3, got 2"),
        ("tiny", [given(np.array([b"a"], object), datatype="BYTES")], None, "INVALID_ARGUMENT.*accepts strings"),
        ("tiny", [given(np.zeros((2000, 3), np.float32))], None, "RESOURCE_EXHAUSTED"),
        ("tiny", [given()], CLASSES, "INVALID_ARGUMENT.*classification.*not supported"),
        ("tiny", [given()], SHARED, "INVALID_ARGUMENT.*output: shared memory .* is not supported"),
        ("ä" * 4_000, [given()], None, "NOT_FOUND.*no model is named"),  # an error fits into a status
    ],
)
def test_a_broken_request_is_refused(client: Any, name: str, inputs: Any, outputs: Any, says: str) -> None:
    with pytest.raises(triton.InferenceServerException, match=says):
        client.infer(name, inputs, outputs=outputs, client_timeout=120)
    np.testing.assert_array_equal(client.infer("tiny", [given()]).as_numpy("output"), expected(1))


def raw(server: Server, **changes: Any) -> Any:
    """Return a request that no client would write."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 3], **changes.pop("tensor", {})}
    request = service_pb2.ModelInferRequest(model_name="tiny", inputs=[tensor], **changes)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )
        return call(request, timeout=120)


def test_inputs_as_numbers(server: Server) -> None:
    found = raw(server, tensor={"contents": {"fp32_contents": X.reshape(-1).tolist()}})
    np.testing.assert_array_equal(np.frombuffer(found.raw_output_contents[0], np.float32).reshape(2, 5), expected(1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "has 6 elements, but the data 0"),
        ({"raw_input_contents": [b"1234"]}, r"FP32\[2, 3\] is 24 bytes, got 4"),
        ({"raw_input_contents": [X.tobytes(), b""]}, "1 inputs, but 2 raw_input_contents"),
        ({"tensor": {"shape": [-2, -3]}, "raw_input_contents": [X.tobytes()]}, "got 24"),
        ({"tensor": {"shape": [-1], "contents": {"fp32_contents": [1]}}}, "negative"),
        ({"tensor": {"contents": {"fp64_contents": [1] * 6}}}, "FP32 belongs in fp32_contents, got fp64_contents"),
        ({"tensor": {"datatype": "BF16", "contents": {"fp32_contents": [1] * 6}}}, "BF16 cannot be sent in contents"),
        ({"tensor": {"contents": {"fp32_contents": [1] * 6}}, "raw_input_contents": [X.tobytes()]}, "both contents"),
        ({"tensor": {"shape": [1] * 65}, "raw_input_contents": [X.tobytes()]}, "has 65 dimensions"),
        ({"tensor": {"shape": [1] * 65, "contents": {"fp32_contents": [1]}}}, "has 65 dimensions"),
        ({"raw_input_contents": [X.tobytes()], "outputs": [{"name": "output"}] * 2}, "requested more than once"),
        ({"raw_input_contents": [X.tobytes()], "outputs": [{"name": "z"}]}, "no output is named z"),
        ({"raw_input_contents": [X.tobytes()], "model_version": "9"}, "generation 0 is served"),
    ],
    ids=str,
)
def test_what_no_client_would_send(server: Server, changes: Any, says: str) -> None:
    with pytest.raises(grpc.RpcError, match=says) as caught:
        raw(server, **changes)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default limits."""
    with serving_tiny(tmp_path_factory.mktemp("roomy"), grpc_port=0) as running:
        yield running


def field(number: int, content: bytes) -> bytes:
    """Return a field of a message, as it is on the wire."""
    length, size = b"", len(content)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\x2a\0" * 30_000, "more than [0-9]{4} fields"),  # inputs
        (b"\x32\0" * 30_000, "more than [0-9]{4} fields"),  # outputs
        (b"\x22\0" * 30_000, "more than [0-9]{4} fields"),  # parameters
        (b"\x3a\0" * 30_000, "more than [0-9]{4} fields"),  # raw_input_contents
        (field(5, b"\x22\0" * 30_000), "more than [0-9]{4} fields"),  # parameters of an input
        (field(5, field(5, b"\x18\0" * 30_000)), "more than [0-9]{4} fields"),  # numbers, one by one
        (field(5, field(5, field(3, bytes(3 << 20)))), "beside raw_input_contents"),
        (field(5, field(3, bytes(3 << 20))), "beside raw_input_contents"),  # a shape
        (field(3, b"a" * (3 << 20)), "beside raw_input_contents"),  # an id
    ],
)
def test_a_message_that_would_take_far_more_memory_than_its_bytes(roomy: Server, message: bytes, says: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{roomy.grpc_port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match=says) as caught:
            call(message, timeout=120)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        good = service_pb2.ModelInferRequest(
            model_name="tiny", inputs=[{"name": "x", "datatype": "FP32", "shape": [2, 3]}],
            raw_input_contents=[X.tobytes()], id="7" * 100_000,
        )  # fmt: skip
        answer = service_pb2.ModelInferResponse.FromString(call(good.SerializeToString(), timeout=120))
        np.testing.assert_array_equal(
            np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(2, 5), expected(1)
        )


PACKED = field(5, field(5, field(3, bytes(3 << 20))))


@pytest.mark.parametrize(
    "message",
    [
        PACKED + b"\x3a" + b"\x80" * 8 + b"\x40",  # raw_input_contents of 2**62 bytes, of which none follow
        PACKED + b"\x3a\x01",  # of one byte
        PACKED + b"\x3a",
        field(5, b"\x0a\x7f" + b"a" * 100) + field(3, b"a" * (3 << 20)),  # an input's name ends beyond the input
    ],
)
def test_a_field_that_ends_beyond_its_message(message: bytes) -> None:
    """It is refused before protobuf parses the others, while nothing else runs."""
    with pytest.raises(DecodeError, match=r"beyond|incomplete"):
        parsed("ModelInferRequest", message, 1000)


def test_as_many_tensors_as_a_model_has_fit_in_a_message(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, *x: torch.Tensor) -> torch.Tensor:
            return torch.stack(x).sum(0)

    names = [f"x.{index}" for index in range(400)]
    with (
        serving({"sum": exported(Sum(), tuple(torch.ones(1) for _ in names), tmp_path)}, grpc_port=0) as running,
        triton.InferenceServerClient(f"127.0.0.1:{running.grpc_port}") as client,
    ):
        one = np.ones(1, np.float32)
        answer = client.infer("sum", [given(one, name) for name in names], request_id="7" * (1 << 14))
    assert answer.as_numpy("output").tolist() == [400]


def test_a_method_that_there_is_not(client: Any) -> None:
    with pytest.raises(triton.InferenceServerException, match="UNIMPLEMENTED"):
        client.load_model("tiny")


def test_a_queue_that_is_full_and_an_answer_that_takes_too_long(server: Server, client: Any) -> None:
    with occupied(server):
        told: list[Any] = []
        client.async_infer("tiny", [given()], lambda result, error: told.append(error))
        await_queued(server, 1)
        with pytest.raises(triton.InferenceServerException, match=r"UNAVAILABLE.*waiting for this model"):
            client.infer("tiny", [given()])
        assert eventually(lambda: bool(told))
        assert "DEADLINE_EXCEEDED" in str(told[0])


class Flip(nn.Module):
    """A model with an input and an output of each dtype, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{name}_out": tensor[1:].clone() for name, tensor in tensors.items()} | {"w": self.weight + 0}


def sample(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return torch.tensor([info.max, info.min, 1], dtype=dtype)


@pytest.fixture(scope="module")
def all_dtypes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("dtypes")
    tensors = {name.lower(): sample(dtype) for name, dtype in DTYPES.items()}
    model = exported(Flip().eval(), (tensors,), folder)
    with serving({"flip": model}, grpc_port=0) as running:
        yield running


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("how", ["grpc", "binary", "json"])
def test_all_dtypes(all_dtypes: Server, how: str) -> None:
    kind: Any = triton if how == "grpc" else triton_http
    port = all_dtypes.grpc_port if how == "grpc" else all_dtypes.http_port
    with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
        inputs, outputs = [], []
        for name, dtype in DTYPES.items():
            half = name in ("FP16", "BF16")  # which this client does not write as JSON
            more = {"binary_data": how == "binary" or half} if how != "grpc" else {}
            tensor = kind.InferInput(f"tensors.{name.lower()}", [3], name)
            array = as_numpy(sample(dtype)).astype(triton_to_np_dtype(name))  # older clients take BF16 as float32
            inputs.append(tensor.set_data_from_numpy(array, **more))
            outputs.append(kind.InferRequestedOutput(f"{name.lower()}_out", **more))
        found = client.infer("flip", inputs, outputs=outputs)
        for name, dtype in DTYPES.items():
            np.testing.assert_array_equal(
                found.as_numpy(f"{name.lower()}_out").astype(as_numpy(sample(dtype)).dtype), as_numpy(sample(dtype)[1:])
            )


@pytest.mark.parametrize("method", ["ServerLive", "ModelStreamInfer"])
def test_calls_that_bring_no_request_are_broken_off_and_stop_nobody(model: Model, method: str) -> None:
    ended = Event()
    limits: Any = {"body_timeout": 0.5, "stream_timeout": 0.5}

    def never() -> Iterator[Any]:
        ended.wait(120)
        yield from ()

    with serving({"tiny": model}, grpc_port=0, **limits) as server:
        where = f"127.0.0.1:{server.grpc_port}"
        with grpc.insecure_channel(where) as channel, triton.InferenceServerClient(where) as client:
            silent = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")
            calls = [silent(never()) for _ in range(70)]
            assert client.is_server_live(client_timeout=120)
            for call in calls:
                assert call.code() is grpc.StatusCode.CANCELLED
            ended.set()
            assert client.infer("tiny", [given()], client_timeout=120).get_response().model_name == "tiny"


def test_who_sends_no_message_is_told(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.stream_unary("/inference.GRPCInferenceService/ServerLive")
        with pytest.raises(grpc.RpcError) as refused:
            call(iter(()), timeout=120)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
