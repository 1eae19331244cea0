"""Spans of OpenTelemetry: of requests, as children of their callers' spans, and of swaps."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as triton
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.support import warm
from tests.support.collector import collecting
from tests.support.damage import damaged
from tests.support.served import INFER, X, as_json, ask, await_queued, occupied, serving
from tests.support.tiny import WriteWeights
from weightswap_runtime import DigestMismatch, Model
from weightswap_server import ServedMethod
from weightswap_server.protocol import Answer
from weightswap_server.service.batching import Call
from weightswap_server.service.traces import Traces

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def of_caller(span: ReadableSpan) -> bool:
    assert span.context is not None
    return span.parent is not None and (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        TRACE,
        CALLER,
    )


def test_requests(spans: InMemorySpanExporter, model: Model) -> None:
    weights_id = model.weights_id
    with (
        serving({"tiny": model}, grpc_port=0, traces=True) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        ask(server, INFER, as_json(x=X), PARENT)
        ask(server, INFER, as_json(y=X), PARENT)
        client.infer("tiny", [triton.InferInput("x", [2, 3], "FP32").set_data_from_numpy(X)], headers=PARENT)
        ask(server, INFER, as_json(x=X))
        ask(server, "/v2/models/none/infer", as_json(x=X))
    answered, refused, by_grpc, alone, unknown = spans.get_finished_spans()
    assert [of_caller(span) for span in (answered, refused, by_grpc, alone)] == [True, True, True, False]
    assert {span.kind for span in spans.get_finished_spans()} == {SpanKind.SERVER}
    weights = {"weightswap.weights_id": weights_id, "weightswap.generation": 0}
    for span in (answered, by_grpc, alone):
        assert (span.name, span.attributes) == ("tiny", weights | {"weightswap.batch_calls": 1})
        (call,) = span.events
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= call.timestamp <= span.end_time
    assert (refused.name, refused.attributes) == ("tiny", {"error.type": "InputMismatch"})
    assert (unknown.name, unknown.attributes) == ("unknown model", {"error.type": "UnknownModel"})
    assert {span.status.status_code for span in (refused, unknown)} == {StatusCode.ERROR}
    assert "x: missing" in str(refused.status.description)


def test_a_canary_has_no_generation(spans: InMemorySpanExporter, model: Model) -> None:
    with model:
        call = Call(ServedMethod(model, "forward"), [], name="tiny")
        Traces().answered(call, Answer([], None, "abc"), call.arrived, 1)
    (span,) = spans.get_finished_spans()
    assert span.attributes == {"weightswap.weights_id": "abc", "weightswap.canary": True, "weightswap.batch_calls": 1}


def test_a_batch_has_a_span_for_each_request(spans: InMemorySpanExporter, model: Model) -> None:
    with serving({"tiny": model}, max_batch=4, traces=True) as server, ThreadPoolExecutor(2) as pool:
        with occupied(server):
            asked = [pool.submit(ask, server, INFER, as_json(x=X)) for _ in range(2)]
            await_queued(server, 2)
        assert [each.result(120).status for each in asked] == [200, 200]
    assert [(span.attributes or {})["weightswap.batch_calls"] for span in spans.get_finished_spans()] == [2, 2]


def test_swaps(spans: InMemorySpanExporter, model: Model, weight_file: WriteWeights) -> None:
    with serving({"tiny": model}, traces=True):
        receipt = model.swap(weight_file(2), by="ana")
        broken = damaged(weight_file(3))
        with pytest.raises(DigestMismatch):
            model.swap(broken)
    committed, refused = spans.get_finished_spans()
    said = dict(committed.attributes or {})
    assert said.pop("weightswap.source") == receipt.source
    assert said == {
        "weightswap.model": "tiny",
        "weightswap.outcome": "committed",
        "weightswap.by": "ana",
        "weightswap.weights_id": receipt.weights_id,
        "weightswap.generation": 1,
    }
    assert committed.start_time is not None
    assert committed.end_time is not None
    assert committed.start_time < committed.end_time
    assert (refused.attributes or {})["error.type"] == "DigestMismatch"
    assert refused.status.status_code is StatusCode.ERROR


def test_spans_go_where_the_variables_say() -> None:
    with collecting() as collected:
        code = (
            "from weightswap_server.service.traces import Traces, export_spans; from opentelemetry import trace\n"
            "export_spans(); export_spans()\n"
            "Traces().refused('tiny', ValueError('no'), 1.0, ''); trace.get_tracer_provider().shutdown()"
        )
        subprocess.run([warm.python(), "-c", code], env=os.environ | collected.environment, check=True)
    ((path, body),) = collected.posts
    assert path == "/v1/traces"
    assert b"tiny" in body
