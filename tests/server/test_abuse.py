"""Whatever comes in, the answer has the protocol's form, and the weights stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import requests
from hypothesis import example, given, settings

from tests.support.described import MODES, try_operation
from tests.support.served import INFER, Reply, X, serving_tiny
from weightswap_server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_tiny(tmp_path_factory.mktemp("served"), max_body=100_000, body_timeout=0.5) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: Server) -> Any:
    import schemathesis

    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.http_port}/openapi.json")


@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(1)
def test_whatever_the_description_allows_and_what_it_does_not(described: Any, mode: str, examples: int) -> None:
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) == 14  # all but the description itself
    for operation in operations:
        try_operation(operation, mode, examples)


sizes = st.integers(-1, 4) | st.sampled_from([1 << 31, 1 << 62, 1 << 63])
EMPTY = {"name": "x", "datatype": "FP32", "parameters": {}}
documents = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "x", "x", "y", ""]),
        "datatype": st.sampled_from(["FP32", "FP32", "FP64", "BF16", "BOOL", "INT64", "BYTES", "fp32"]),
        "shape": st.just([2, 3]) | st.lists(sizes, max_size=4),
        "parameters": st.just({"binary_data_size": 24})
        | st.dictionaries(st.just("binary_data_size"), sizes | st.none() | st.floats() | st.text(max_size=3)),
    },
    optional={"data": st.lists(st.floats(allow_nan=False, width=32) | st.integers() | st.none(), max_size=7)},
)


@given(
    inputs=st.lists(documents, min_size=1, max_size=2),
    tail=st.binary(max_size=48) | st.just(X.tobytes()),
    more=st.integers(-30, 30) | st.none(),
)
@example(inputs=[EMPTY | {"shape": [0, 1 << 62], "data": []}], tail=b"", more=0)
@example(inputs=[EMPTY | {"shape": [1] * 300, "data": [1.0]}], tail=b"", more=0)
@settings(max_examples=150, deadline=None)
def test_bytes_of_any_kind(server: Server, inputs: Any, tail: bytes, more: int | None) -> None:
    head = json.dumps({"inputs": inputs}).encode()
    headers = {} if more is None else {"Inference-Header-Content-Length": str(len(head) + more)}
    found = ask_again(server, head + tail, headers)
    if found.status == 200:
        assert found.json["parameters"]["generation"] == 0
    else:
        assert found.status == 400
        assert found.error


_session = requests.Session()


def ask_again(server: Server, body: bytes, headers: dict[str, str]) -> Reply:
    """Send a request on a connection that stays open: thousands of new ones would fill up in TIME_WAIT."""
    found = _session.post(f"http://127.0.0.1:{server.http_port}{INFER}", body, headers=headers, timeout=120)
    return Reply(found.status_code, found.headers, found.content)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    _session.close()
