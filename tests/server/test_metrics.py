"""What Prometheus reads at /metrics: requests, errors, latency and queue by the weights that answered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from threading import Event
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families

from tests.support.served import INFER, X, as_json, ask, before_calls, occupied, serving
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import Model
from weightswap_runtime.tensors import array_content
from weightswap_server import Server
from weightswap_server.service.metrics import MOST_WEIGHTS


def samples(server: Server, name: str) -> dict[Any, float]:
    """Return the samples of a metric that are not 0, by labels, as Prometheus' own parser reads them."""
    text = ask(server, "/metrics").body.decode()
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.value
    }


def of(labels: Mapping[str, Any]) -> Any:
    return tuple(sorted({"model": "tiny", **labels}.items()))


def test_requests_are_counted_by_weights(model: Model, weight_file: WriteWeights) -> None:
    with (
        serving({"tiny": model}, grpc_port=0) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        first = model.weights_id
        for _ in range(3):
            ask(server, INFER, as_json(x=X))
        model.swap(weight_file(2))
        ask(server, INFER, as_json(x=X))
        client.infer("tiny", [triton.InferInput("x", [2, 3], "FP32").set_data_from_numpy(X)])
        ask(server, INFER, as_json(y=X))
        ask(server, "/v2/models/none/infer", as_json(x=X))
        assert samples(server, "weightswap_server_requests_total") == {
            of({"weights_id": first, "status": "200"}): 3,
            of({"weights_id": model.weights_id, "status": "200"}): 2,
            of({"weights_id": model.weights_id, "status": "400"}): 1,
            of({"model": "", "weights_id": "", "status": "404"}): 1,
        }
        counted = {of({"weights_id": first}): 3, of({"weights_id": model.weights_id}): 2}
        for name in ("request_seconds", "queue_seconds", "batch_calls"):
            assert samples(server, f"weightswap_server_{name}_count") == counted
        assert samples(server, "weightswap_generation") == {of({}): 1}
        with occupied(server):
            call = server.service.call("tiny", "", {"x": array_content(X)})
            server.service.served[0].thread.submit(call)
            assert samples(server, "weightswap_server_queued") == {of({}): 1}
        assert call.answer.result(120).generation == 1


def test_each_request_is_counted_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its answer cannot be JSON, or is late."""
    with serving({"tiny": model}, timeout=0.2) as server:
        huge = np.full((2, 3), np.finfo(np.float32).max, np.float32)
        assert ask(server, INFER, as_json(x=huge)).status == 400
        goes_on = Event()
        before_calls(monkeypatch, lambda *_: goes_on.wait(120))
        monkeypatch.setattr(server.service.served[0].thread, "_inline", False)
        assert ask(server, INFER, as_json(x=X)).status == 504
        goes_on.set()
        server.service.served[0].thread.do(lambda: None).result(120)
        assert samples(server, "weightswap_server_requests_total") == {
            of({"weights_id": model.weights_id, "status": status}): 1 for status in ("400", "504")
        }
        assert samples(server, "weightswap_server_request_seconds_count") == {of({"weights_id": model.weights_id}): 2}


def test_weights_that_are_long_gone_have_no_series(model: Model, weight_file: WriteWeights) -> None:
    with serving({"tiny": model}) as server:
        for seed in range(MOST_WEIGHTS + 3):
            model.swap(weight_file(seed))
            ask(server, INFER, as_json(x=X))
        assert len(samples(server, "weightswap_server_requests_total")) == MOST_WEIGHTS
        assert len(samples(server, "weightswap_server_request_seconds_count")) == MOST_WEIGHTS
        newest = of({"weights_id": model.weights_id, "status": "200"})
        assert newest in samples(server, "weightswap_server_requests_total")


@pytest.mark.slow
def test_the_server_knows_neither_tools_nor_exporter(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    serve = (
        "import sys; from weightswap_server import ModelSource, Server, Settings\n"
        "assert not {'torch', 'grpc', 'google.protobuf'} & set(sys.modules)\n"
        "model = ModelSource(artifact=sys.argv[1], weights=sys.argv[2]).open()\n"
        "with Server({'tiny': model}, Settings(http_port=0, grpc_port=0)).running(): pass\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules if name.startswith('weightswap')}))"
    )
    command = [sys.executable, "-c", serve, str(tiny.path), str(weight_file(1))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['weightswap_runtime', 'weightswap_server']"
