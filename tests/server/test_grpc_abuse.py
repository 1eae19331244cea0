"""Whatever a ModelInferRequest holds, the answer is right, or a status that says what is wrong with the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tritonclient.grpc import service_pb2

from tests.support.served import X, expected, serving_tiny

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
Request = service_pb2.ModelInferRequest


class Client(NamedTuple):
    """A client that sends any message, or malformed bytes."""

    call: Any
    stream: Any

    def ask(self, request: bytes) -> tuple[str, Any]:
        """Return the name of the status, and the answer or the error text."""
        try:
            return "OK", self.call(request, timeout=120)
        except grpc.RpcError as error:
            return error.code().name, error.details()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        serving_tiny(tmp_path_factory.mktemp("served"), grpc_port=0, max_body=10_000) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        answer = service_pb2.ModelInferResponse.FromString
        service, streamed = "/inference.GRPCInferenceService", service_pb2.ModelStreamInferResponse.FromString
        found = Client(
            channel.unary_unary(f"{service}/ModelInfer", bytes, answer),
            channel.stream_stream(f"{service}/ModelStreamInfer", bytes, streamed),
        )
        yield found


def good_request() -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 3]}
    raw: bytes = Request(model_name="tiny", inputs=[tensor], raw_input_contents=[X.tobytes()]).SerializeToString()
    return raw


def answers_right(client: Client) -> None:
    status, answer = client.ask(good_request())
    assert status == "OK", answer
    assert answer.raw_output_contents[0] == expected(1).tobytes()


def check(client: Client, request: bytes) -> None:
    status, said = client.ask(request)
    if status == "OK":
        assert said.parameters["generation"].int64_param == 0
    else:
        assert status in REFUSALS, said
        assert said
    answers_right(client)


sizes = st.integers(-2, 4) | st.sampled_from([-(1 << 63), 1 << 31, 1 << 62, (1 << 63) - 1])
contents = st.fixed_dictionaries(
    {},
    optional={
        "fp32_contents": st.just(X.reshape(-1).tolist()) | st.lists(st.floats(width=32), max_size=7),
        "fp64_contents": st.lists(st.floats(), max_size=7),
        "int_contents": st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=7),
        "int64_contents": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=7),
        "uint_contents": st.lists(st.integers(0, (1 << 32) - 1), max_size=7),
        "uint64_contents": st.lists(st.integers(0, (1 << 64) - 1), max_size=7),
        "bool_contents": st.lists(st.booleans(), max_size=7),
        "bytes_contents": st.lists(st.binary(max_size=5), max_size=3),
    },
)
datatypes = st.just("FP32") | st.sampled_from(
    ["FP64", "FP16", "BF16", "BOOL", "INT8", "INT64", "UINT64", "BYTES", "fp32", "ä", ""]
)
parameters = st.dictionaries(
    st.sampled_from(["variant", "binary_data_size", "sequence_id", ""]),
    st.fixed_dictionaries({"int64_param": sizes})
    | st.fixed_dictionaries({"string_param": st.text(max_size=5)})
    | st.fixed_dictionaries({"bool_param": st.booleans()})
    | st.just({}),
    max_size=2,
)
tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "x", "x", "y", ""]),
        "datatype": datatypes,
        "shape": st.just([2, 3]) | st.lists(sizes, max_size=4) | st.just([1] * 300),
    },
    optional={"contents": contents, "parameters": parameters},
)
ONE = {"contents": {"fp32_contents": [1.0]}}
messages = st.fixed_dictionaries(
    {
        "model_name": st.sampled_from(["tiny", "tiny", "tiny", "none", ""]),
        "inputs": st.lists(tensors, max_size=3),
        "raw_input_contents": st.just([X.tobytes()]) | st.lists(st.binary(max_size=48), max_size=3),
    },
    optional={
        "model_version": st.sampled_from(["0", "1", "-1", "ä", "1" * 5000]),
        "outputs": st.lists(st.sampled_from([{"name": "output"}, {"name": "y"}, {}]), max_size=2),
        "parameters": parameters,
    },
)


@given(message=messages)
@example(message={"model_name": "tiny"})
@example(message={"model_name": "tiny", "inputs": [{"name": "x", "datatype": "FP32", "shape": [0, 1 << 62]}]})
@example(message={"model_name": "tiny", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1] * 300} | ONE]})
@example(message={"model_name": "tiny", "inputs": [{}], "raw_input_contents": [b""]})
@settings(max_examples=150, deadline=None)
def test_messages_of_any_kind(client: Client, message: Any) -> None:
    check(client, Request(**message).SerializeToString())


@given(raw=st.binary(max_size=60))
@example(raw=b"\xff" * 20)
@example(raw=b"\x0a\x01\xff")  # a name that is no UTF-8
@settings(max_examples=50, deadline=None)
def test_bytes_of_any_kind(client: Client, raw: bytes) -> None:
    check(client, raw)


def test_bytes_in_a_stream_are_told(client: Client) -> None:
    answers = client.stream(iter([b"\xff" * 20, good_request()]), timeout=20)
    told, answered = answers
    assert "expected a message ModelInferRequest" in told.error_message
    assert answered.infer_response.model_name == "tiny"


def test_a_message_that_is_too_long(client: Client) -> None:
    check(client, Request(model_name="tiny", raw_input_contents=[bytes(20_000)]).SerializeToString())
