"""Which models there are, and how signatures become tensors by name: methods, trees, integers, literals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from torch import nn
from torch.export import Dim

from tests.support.served import ask, serving
from tests.support.tiny import TinyArtifact
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import Model, Unsupported, load
from weightswap_server import ServedMethod, Server, Settings


class Coder(nn.Module):
    """A model with inputs in a dict and a list, a dynamic integer, a literal, and outputs in a dict with an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 2)

    def forward(self, given: dict[str, Any], times: int, flag: bool = True) -> dict[str, Any]:
        x, (y, z) = given["x"], given["pair"]
        return {"sum": self.mix(x + y * z) * times, "more": times + 1, "flag": flag, "nothing": None}

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.mix(code).abs()


X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(scope="module")
def eager() -> Coder:
    torch.manual_seed(0)
    return Coder().eval()


@pytest.fixture(scope="module")
def server(eager: Coder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    sample = ({"x": X, "pair": [X, X + 1]}, 3)
    shapes = {"given": {"x": None, "pair": [None, None]}, "times": Dim.DYNAMIC}
    methods = {"forward": MethodSpec("forward", sample, dynamic_shapes=shapes), "decode": MethodSpec("decode", (X,))}
    artifact = export(eager, methods=methods, out=folder / "coder.artifact")
    model = load(artifact, pack(eager, artifact, out=folder / "v.safetensors").path)
    tiny = TinyArtifact(folder / "tiny.artifact")
    other = load(tiny.path, tiny.write(folder / "v1.safetensors", tiny.values(1)))
    with serving({"coder": model, "tiny": other}) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.http_port}") as found:
        yield found


def given(name: str, value: np.ndarray[Any, Any], datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, list(value.shape), datatype).set_data_from_numpy(value)


def test_each_method_is_a_model(server: Server, client: Any, eager: Coder) -> None:
    assert [entry["name"] for entry in client.get_model_repository_index()] == ["coder", "coder.decode", "tiny"]
    found = client.infer("coder.decode", [given("code", X.numpy())]).as_numpy("output")
    np.testing.assert_array_equal(found, eager.decode(X).detach())
    found = client.infer("tiny", [given("x", X.numpy())]).as_numpy("output")
    np.testing.assert_array_equal(found, TinyArtifact.eager(1, X))


def test_trees_and_integers(client: Any, eager: Coder) -> None:
    inputs = client.get_model_metadata("coder")["inputs"]
    assert [(each["name"], each["datatype"], each["shape"]) for each in inputs] == [
        ("given.x", "FP32", [2, 3]),
        ("given.pair.0", "FP32", [2, 3]),
        ("given.pair.1", "FP32", [2, 3]),
        ("times", "INT64", [1]),
    ]
    tensors = [given("times", np.array([5]), "INT64"), given("given.x", X.numpy())]
    tensors += [given(f"given.pair.{place}", (X + place).numpy()) for place in (0, 1)]
    answer = client.infer("coder", tensors)
    np.testing.assert_array_equal(answer.as_numpy("sum"), eager({"x": X, "pair": [X, X + 1]}, 5)["sum"].detach())
    assert answer.as_numpy("more").tolist() == [6]
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["sum", "more"]
    with pytest.raises(triton.InferenceServerException, match=r"times: expected INT64\[1\], got FP32\[2, 3\]"):
        client.infer("coder", [given("times", X.numpy()), *tensors[1:]])


def test_a_method_that_the_protocol_has_no_types_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        def turn(self, x: torch.Tensor) -> torch.Tensor:
            return torch.complex(x, x * self.scale)

    eager = Waves().eval()
    methods = {name: MethodSpec(name, (X,)) for name in ("forward", "turn")}
    artifact = export(eager, methods=methods, out=tmp_path / "waves.artifact")
    weights = pack(eager, artifact, out=tmp_path / "v.safetensors").path
    with serving({"waves": load(artifact, weights)}) as running:
        assert "waves: not served: turn: output is C64" in caplog.text
        assert ask(running, "/v2/models/waves.turn").status == 404
        assert ask(running, "/v2/models/waves").status == 200
    alone = export(eager, methods={"turn": methods["turn"]}, out=tmp_path / "turn.artifact")
    with pytest.raises(Unsupported, match="no datatype"):
        Server({"waves": load(alone)}, Settings(http_port=0))


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_model_has_a_name_that_paths_can_have(server: Server, name: str) -> None:
    with pytest.raises(Unsupported, match="give it a name without /"):
        Server({name: server.service.served[0].model}, Settings(http_port=0))


@pytest.mark.parametrize("order", [1, -1])
def test_no_two_models_have_one_name(server: Server, order: int) -> None:
    coder, other = (served.model for served in server.service.served)
    models = dict([("coder", coder), ("coder.decode", other)][::order])
    with pytest.raises(Unsupported, match=r"would both be served as coder\.decode"):
        Server(models, Settings(http_port=0))


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": math.nan},
        {"grace": math.inf},
        {"max_delay": True},
        {"body_timeout": "5"},
        {"stream_timeout": 0},
        {"max_batch": 2.5},
        {"max_queue": math.nan},
        {"max_streams": 0},
        {"http_port": 65536},
        {"grpc_port": 65536},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=rf"^{next(iter(settings))}=.*: expected "):
        Settings(**settings).check()


def test_a_warm_up_that_fails_is_logged(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServedMethod, "sample", Mock(side_effect=ValueError("no sample")))
    with serving({"tiny": model}) as running:
        assert "the warm-up failed; the model is served anyway: no sample" in caplog.text
        assert ask(running, "/v2/health/ready").status == 200
