"""Requests choose among variants: each answer is from the base and the variant that it names, batched or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim
from tritonclient.utils import InferenceServerException

from tests.support.administered import BEARER, administered, call, change, status
from tests.support.commands import run
from tests.support.exported import exported
from tests.support.keys import write_keys
from tests.support.served import Reply, as_json, ask, await_queued, occupied, serving
from tests.support.storm import storm
from tests.support.watched import eventually
from weightswap_exporter import export, export_decoder, pack
from weightswap_runtime import Model, Staged, Unsupported, load
from weightswap_server import Server
from weightswap_server.methods import ServedMethod
from weightswap_server.serving import ModelSource, variants_of
from weightswap_server.signed_weights import SignatureRefused, requires, sign

WIDTH = 4
INFER = "/v2/models/tuned/infer"
X = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)


class Tuned(nn.Module):
    """A layer with a low-rank one beside it, of whole numbers, so that no sum rounds."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix.weight = nn.Parameter(whole(WIDTH, WIDTH, base))
        self.low_a, self.low_b = nn.Parameter(torch.zeros(WIDTH, 2)), nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) + x @ self.low_a @ self.low_b


def whole(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(-5, 6, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


def low(name: str) -> dict[str, torch.Tensor]:
    return {"low_a": whole(WIDTH, 2, ord(name)), "low_b": whole(2, WIDTH, 100 + ord(name))}


def expected(base: int, name: str, x: np.ndarray[Any, Any] = X) -> np.ndarray[Any, Any]:
    """Compute the output by numpy. name: "" for the base alone."""
    found = x @ whole(WIDTH, WIDTH, base).numpy().T
    return found + x @ low(name)["low_a"].numpy() @ low(name)["low_b"].numpy() if name else found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact, the weights 0 and 1, and the variants a, b and c."""
    folder = tmp_path_factory.mktemp("tuned")
    batch = {"x": {0: Dim("batch", max=64)}}
    artifact, groups = folder / "tuned.artifact", {"low": "low_*"}
    export(Tuned(0), (torch.from_numpy(X),), out=artifact, dynamic_shapes=batch, variants=groups)
    for base in (0, 1):
        pack(Tuned(base), artifact, out=folder / f"{base}.safetensors")
    for name in "abc":
        save_file(low(name), folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def model(folder: Path) -> Model:
    """A model with the variants a and b."""
    model = load(folder / "tuned.artifact", folder / "0.safetensors")
    for name in "ab":
        model.add_variant("low", name, folder / f"{name}.safetensors")
    return model


@pytest.fixture
def server(model: Model) -> Iterator[Server]:
    with serving({"tuned": model}, grpc_port=0) as running:
        yield running


def body(variant: Any = None, x: np.ndarray[Any, Any] = X) -> dict[str, Any]:
    return {**as_json(x=x), "parameters": {} if variant is None else {"variant": variant}}


def outputs(found: Reply) -> np.ndarray[Any, Any]:
    assert found.status == 200, found.body
    return np.asarray(found.json["outputs"][0]["data"], np.float32).reshape(-1, WIDTH)


def test_a_request_chooses(server: Server, model: Model) -> None:
    for name in ("a", "", "b"):
        found = ask(server, INFER, body(f"low={name}" if name else None))
        np.testing.assert_array_equal(outputs(found), expected(0, name))
        said = {"variant": f"low={model.variants['low'][name].weights_id}"} if name else {}
        assert found.json["parameters"] == {"generation": 0, "weights_id": model.weights_id, **said}
    assert ask(server, "/v2/models/tuned").json["parameters"]["variants"] == {"low": ["a", "b"]}


@pytest.mark.parametrize("client", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_the_protocols_own_clients_choose(server: Server, model: Model, client: Any) -> None:
    port = server.http_port if client is tritonclient.http else server.grpc_port
    tensor = client.InferInput("x", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X)
    with client.InferenceServerClient(f"127.0.0.1:{port}") as connected:
        found = connected.infer("tuned", [tensor], parameters={"variant": "low=b"})
        np.testing.assert_array_equal(found.as_numpy("output"), expected(0, "b"))
        said = found.get_response()["parameters"] if port == server.http_port else found.get_response().parameters
        said = said["variant"] if port == server.http_port else said["variant"].string_param
        assert said == f"low={model.variants['low']['b'].weights_id}"
        np.testing.assert_array_equal(connected.infer("tuned", [tensor]).as_numpy("output"), expected(0, ""))
        with pytest.raises(InferenceServerException) as refused:
            connected.infer("tuned", [tensor], parameters={"variant": "low=z"})
        assert refused.value.status() in ("404", "StatusCode.NOT_FOUND")


@pytest.mark.parametrize(
    ("variant", "status", "says"),
    [
        ("low=z", 404, "low has no 'z' here"),
        ("high=a", 404, "'high' is not a group of variants"),
        ("a", 400, "expected GROUP=NAME"),
        ("low=", 400, "expected GROUP=NAME"),
        ("low=a,", 400, "expected GROUP=NAME"),
        ("low=a=b", 400, "expected GROUP=NAME"),
        ("low=a,low=b", 400, "low is chosen more than once"),
        (f"low={'a' * 201}", 400, "expected GROUP=NAME"),
        (3, 400, "expected a string, got 3"),
        (True, 400, "expected a string, got True"),
    ],
)
def test_what_cannot_be_chosen(server: Server, variant: Any, status: int, says: str) -> None:
    found = ask(server, INFER, body(variant))
    assert (found.status, says in found.error) == (status, True), found.error
    np.testing.assert_array_equal(outputs(ask(server, INFER, body("low=a"))), expected(0, "a"))


def test_a_model_without_variants(folder: Path) -> None:
    with serving({"tuned": exported(nn.Linear(WIDTH, WIDTH).eval(), (torch.from_numpy(X),), folder)}) as server:
        found = ask(server, INFER, {**as_json(input=X), "parameters": {"variant": "low=a"}})
        assert (found.status, "declares no variants" in found.error, str(folder) in found.error) == (404, True, False)
        assert "variants" not in ask(server, "/v2/models/tuned").json["parameters"]


def test_a_batch_has_one_choice(model: Model) -> None:
    """Waiting calls with the same choice are batched, and each gets its own answer."""
    wanted = ["a", "", "b", "a", "b", "", "a", "a"]
    with serving({"tuned": model}, max_batch=32) as server:
        with ThreadPoolExecutor(len(wanted)) as pool:
            with occupied(server):
                found = [pool.submit(ask, server, INFER, body(f"low={name}" if name else None)) for name in wanted]
                await_queued(server, len(wanted))
            for name, each in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(outputs(each.result(120)), expected(0, name))
        metrics = ask(server, "/metrics").body.decode()
        for size, answers in ((1, 0), (2, 4), (4, 8)):  # answers by how many went as one, at most
            labels = f'le="{size:.1f}",model="tuned",weights_id="{model.weights_id}"'
            assert f"weightswap_server_batch_calls_bucket{{{labels}}} {answers:.1f}\n" in metrics


def test_each_answer_is_from_the_weights_that_it_names(folder: Path) -> None:
    """Under load, batched, while the base is swapped, and variants are replaced, removed and added."""
    model = load(folder / "tuned.artifact", folder / "0.safetensors")
    bases, names = {str(model.weights_id): 0}, {}
    for name in "abc":
        names[f"low={model.add_variant('low', 'x', folder / f'{name}.safetensors').weights_id}"] = name
    with administered({"tuned": model}, allow=(str(folder),), serving={"max_batch": 16}) as server:
        bases[change(server, "swap", "tuned", source=str(folder / "1.safetensors")).json["receipt"]["weights_id"]] = 1
        asked = count()

        def client(number: int) -> tuple[int, str] | None:
            x = np.full((1 + number % 3, WIDTH), next(asked) % 50, np.float32)
            found = ask(server, INFER, body("low=x" if number % 2 else None, x))
            if found.status == 404:
                assert "low has no 'x' here" in found.error
                return None
            said = found.json["parameters"]
            key = bases[said["weights_id"]], names.get(said.get("variant"), "")
            assert bool(key[1]) == bool(number % 2)
            np.testing.assert_array_equal(outputs(found), expected(*key, x))
            return key

        with storm(client, 4) as seen:
            for turn in range(24):
                variant, base = (str(folder / f"{name}.safetensors") for name in ("abc"[turn % 3], turn % 2))
                added = change(server, "add_variant", "tuned", group="low", name="x", source=variant)
                assert added.status == 200, added.body
                assert change(server, "swap", "tuned", source=base).status == 200
                if turn % 5 == 4:
                    assert change(server, "remove_variant", "tuned", group="low", name="x").status == 200
    assert {*chain(*seen)} >= {(base, name) for base in (0, 1) for name in ("", *"abc")}


def test_a_canary_answers_with_the_same_choice(folder: Path, model: Model) -> None:
    """In its own answers, and in those that the shadow compares."""
    with administered({"tuned": model}, allow=(str(folder),)) as server:
        other = str(folder / "1.safetensors")
        assert change(server, "canary", "tuned", source=other, share=0.5, shadow=True).status == 200
        for _ in range(10):
            found = ask(server, INFER, body("low=a"))
            base = 0 if found.json["parameters"]["generation"] == 0 else 1
            np.testing.assert_array_equal(outputs(found), expected(base, "a"))
            assert found.json["parameters"]["variant"] == f"low={model.variants['low']['a'].weights_id}"
        assert change(server, "discard", "tuned").status == 200
        assert change(server, "canary", "tuned", source=other, shadow=True).status == 200
        for _ in range(5):
            assert ask(server, INFER, body("low=a")).status == 200
        assert eventually(lambda: status(server, "tuned")["canary"]["values"]["compared"] == 5)
        furthest = np.abs(expected(0, "a").astype(np.float64) - expected(1, "a")).max()
        assert status(server, "tuned")["canary"]["values"]["max_abs"] == pytest.approx(furthest)


def test_a_shadow_compares_no_variant_with_another_of_its_name(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_method, replaced = ServedMethod.call, Event()

    def late(method: ServedMethod, caller: Any, *rest: Any) -> Any:
        if isinstance(caller, Staged):
            assert replaced.wait(60)
        return call_method(method, caller, *rest)

    monkeypatch.setattr(ServedMethod, "call", late)
    with administered({"tuned": model}, allow=(str(folder),)) as server:
        assert change(server, "canary", "tuned", source=str(folder / "1.safetensors"), shadow=True).status == 200
        for _ in range(2):  # the second waits behind the first, which has chosen before
            assert ask(server, INFER, body("low=a")).status == 200
        model.add_variant("low", "a", folder / "c.safetensors")
        replaced.set()
        assert eventually(
            lambda: (found := status(server, "tuned")["canary"])["values"]["compared"] + found["skipped"] == 2
        )
        found = status(server, "tuned")["canary"]
        furthest = np.abs(expected(0, "a").astype(np.float64) - expected(1, "a")).max()
        assert (found["skipped"], found["values"]["compared"]) == (1, 1)
        assert found["values"]["max_abs"] == pytest.approx(furthest)


def test_operators_add_and_remove(folder: Path, tmp_path: Path) -> None:
    model, audit = load(folder / "tuned.artifact", folder / "0.safetensors"), tmp_path / "audit.jsonl"
    with administered({"tuned": model}, allow=(str(folder),), audit_log=str(audit)) as server:
        assert status(server, "tuned")["variants"] == {"low": {}}
        asked = {"group": "low", "name": "a", "source": str(folder / "a.safetensors"), "why": "the first customer"}
        found = change(server, "add_variant", "tuned", **asked)
        receipt = found.json["receipt"]
        assert (found.status, receipt["kind"], receipt["by"]) == (200, "added", "token")
        assert found.json["status"]["variants"] == {"low": {"a": receipt["weights_id"]}}
        np.testing.assert_array_equal(outputs(ask(server, INFER, body("low=a"))), expected(0, "a"))
        for wrong, code in (
            ({"source": "/etc/passwd"}, 403),
            ({"group": "high"}, 404),
            ({"name": "a,b"}, 400),
            ({"name": ""}, 400),
            ({"source": str(folder / "0.safetensors")}, 422),
            ({"expect": "0" * 64}, 422),
            ({"base": "0" * 64}, 400),
        ):
            found = change(server, "add_variant", "tuned", **{**asked, **wrong})
            assert found.status == code, (wrong, found.body)
            assert status(server, "tuned")["variants"] == {"low": {"a": receipt["weights_id"]}}
        assert change(server, "remove_variant", "tuned", group="low", name="a").json["receipt"]["kind"] == "removed"
        assert change(server, "remove_variant", "tuned", group="low", name="a").status == 404
        assert ask(server, INFER, body("low=a")).status == 404
        assert "AddVariantRequest" in call(server, "/openapi.json", headers=BEARER).json["components"]["schemas"]
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(each["call"], each["outcome"]) for each in lines[:2]] == [
        ("add_variant", way) for way in ("begun", "done")
    ]


def test_a_required_signature_is_required_of_variants(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    write_keys(tmp_path, "ours")
    model = load(folder / "tuned.artifact", admit=requires(str(tmp_path / "ours.pem")))
    path = tmp_path / "a.safetensors"
    save_file(low("a"), path)
    with pytest.raises(SignatureRefused):
        model.add_variant("low", "a", path)
    assert not model.variants["low"]
    unheld = load(folder / "tuned.artifact").add_variant("low", "a", path)
    Path(f"{path}.sig").write_bytes(sign(unheld.weights_id, str(tmp_path / "ours.key")))
    assert model.add_variant("low", "a", path).weights_id == unheld.weights_id


@pytest.mark.parametrize("transport", ["events", "whole", "grpc"])
@pytest.mark.slow
def test_generation_chooses(tmp_path: Path, transport: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
    export_decoder(llama, out=tmp_path / "llama", length=32, variants={"head": "lm_head.weight"})
    pack(llama, tmp_path / "llama", out=tmp_path / "w.safetensors")
    save_file({"lm_head.weight": torch.randn(64, 32)}, tmp_path / "head.safetensors")
    model = load(tmp_path / "llama", tmp_path / "w.safetensors")
    receipt = model.add_variant("head", "other", tmp_path / "head.safetensors")
    wanted = model.generate([1, 5, 9], max_new_tokens=6, variants={"head": "other"})
    assert wanted != model.generate([1, 5, 9], max_new_tokens=6)
    with serving({"llama": model}, grpc_port=0) as server:
        asked = {"input_ids": [1, 5, 9], "parameters": {"max_tokens": 6, "variant": "head=other"}}
        if transport == "whole":
            found = ask(server, "/v2/models/llama/generate", asked).json
            assert (found["output_ids"], found["parameters"]["variant"]) == (wanted, f"head={receipt.weights_id}")
        elif transport == "events":
            raw = ask(server, "/v2/models/llama/generate_stream", asked).body
            events = [json.loads(part.removeprefix(b"data: ")) for part in raw.split(b"\n\n")[:-1]]
            assert [event["output_ids"][0] for event in events] == wanted
            assert {event["parameters"]["variant"] for event in events} == {f"head={receipt.weights_id}"}
        else:
            assert streamed(server, asked["parameters"]) == (wanted, {f"head={receipt.weights_id}"})
        asked["parameters"] = {"variant": "head=none"}
        refused = ask(server, "/v2/models/llama/generate", asked)
        assert (refused.status, "head has no 'none' here" in refused.error) == (404, True)
        assert ask(server, "/v2/models/llama/generate", {**asked, "parameters": {"variant": "x"}}).status == 400


def streamed(server: Server, parameters: Any) -> tuple[list[int], set[str]]:
    """Return tokens over gRPC, with the variants in their responses."""
    told: list[Any] = []
    tensor = tritonclient.grpc.InferInput("input_ids", [3], "INT64").set_data_from_numpy(np.array([1, 5, 9]))
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: told.append(error or result))
        client.async_stream_infer("llama", [tensor], parameters=parameters)
        client.stop_stream()
    tokens = [int(piece.as_numpy("output_ids")[0]) for piece in told]
    return tokens, {piece.get_response().parameters["variant"].string_param for piece in told}


@pytest.mark.slow
def test_the_command_has_variants_from_the_start(folder: Path) -> None:
    options = ["--variant", f"low={folder / 'a.safetensors'}", "--variant", f"low/acme={folder / 'b.safetensors'}"]
    weights = ("-w", folder / "0.safetensors", "--port", 0)
    refused = run("serve", folder / "tuned.artifact", *weights, *options, "--max-variants", 1, status=2)
    assert "2 variants of low, but room for 1" in refused.stderr
    source = ModelSource(
        artifact=str(folder / "tuned.artifact"),
        weights=str(folder / "0.safetensors"),
        variants=variants_of(options[1::2]),
    )
    with serving({"tuned": source.open()}) as server:
        for name, file in (("a", "a"), ("acme", "b")):
            np.testing.assert_array_equal(outputs(ask(server, INFER, body(f"low={name}"))), expected(0, file))


@pytest.mark.parametrize(
    "wrong", [["low"], ["=a"], ["low="], ["low/=a"], ["a b=c"], ["lo,w=a"], ["low=x/a.safetensors", "low=y/a"]]
)
def test_options_that_name_no_variant(wrong: list[str]) -> None:
    with pytest.raises(Unsupported):
        variants_of(wrong)
