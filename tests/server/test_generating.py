"""Tokens as they come: each stream from one set of weights, with a context that goes with it."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton

from tests.support.served import ask, connect, occupied, serving
from tests.support.watched import eventually
from weightswap_exporter import export_decoder, pack
from weightswap_runtime import Context, Model, load
from weightswap_runtime.live import gate
from weightswap_runtime.model.served import holds_calls
from weightswap_server import Server

PROMPT = [1, 5, 9]
STREAM = "/v2/models/llama/generate_stream"
GENERATE = "/v2/models/llama/generate"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An artifact, and two sets of weights that generate different tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)
    artifact, paths = folder / "llama.artifact", []
    for seed in (1, 2):
        torch.manual_seed(seed)
        eager = LlamaForCausalLM(config).eval()
        if seed == 1:
            export_decoder(eager, out=artifact, length=48)
        paths.append(pack(eager, artifact, out=folder / f"v{seed}.safetensors").path)
    return artifact, paths[0], paths[1]


@pytest.fixture(scope="module")
def model(files: tuple[Path, Path, Path]) -> Model:
    return load(files[0], files[1])


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Server]:
    with serving({"llama": model}, max_streams=2, stream_timeout=5, body_timeout=1, grpc_port=0) as running:
        yield running
        assert model.generation == 0


def asked(**parameters: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "parameters": parameters}


def events(body: bytes) -> list[Any]:
    assert body.endswith(b"\n\n")
    return [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n")[:-1]]


def tokens_of(found: list[Any]) -> list[int]:
    return [token for event in found for token in event["output_ids"]]


def until_closed(server: Server) -> None:
    for gauge in ('weightswap_leases{model="llama"}', "weightswap_server_streams"):
        assert eventually(lambda line=f"\n{gauge} 0.0\n": line in ask(server, "/metrics").body.decode())  # type: ignore[misc]


def test_tokens_come_one_by_one(server: Server, model: Model) -> None:
    wanted = model.generate(PROMPT, max_new_tokens=6)
    found = ask(server, STREAM, asked(max_tokens=6))
    assert found.headers["content-type"].startswith("text/event-stream")
    assert [event["output_ids"] for event in events(found.body)] == [[token] for token in wanted]
    assert all(event["parameters"] == {"generation": 0, "weights_id": model.weights_id} for event in events(found.body))
    whole = ask(server, GENERATE, {**asked(max_tokens=6), "id": "7"})
    assert (whole.json["output_ids"], whole.json["id"], whole.json["model_version"]) == (wanted, "7", "0")
    plain = {"input_ids": PROMPT, "text_input": None, "id": None, "parameters": None}  # optional members may be null
    assert ask(server, GENERATE, plain).json.items() >= {"output_ids": model.generate(PROMPT)}.items()
    until_closed(server)


def test_sampling_is_that_of_the_model(server: Server, model: Model) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5}
    wanted = model.generate(PROMPT, max_new_tokens=6, **how)
    assert ask(server, GENERATE, asked(max_tokens=6, **how)).json["output_ids"] == wanted


def test_a_swap_does_not_change_a_stream(files: tuple[Path, Path, Path]) -> None:
    model = load(files[0], files[1])
    before = model.generate(PROMPT, max_new_tokens=40)
    with (
        serving({"llama": model}) as server,
        closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=120)) as connection,
    ):
        connection.request("POST", STREAM, json.dumps(asked(max_tokens=40)))
        reply = connection.getresponse()
        first = reply.read1(40)
        model.swap(files[2])
        found = events(first + reply.read())
        assert tokens_of(found) == before
        assert {event["parameters"]["generation"] for event in found} == {0}
        after = ask(server, GENERATE, asked(max_tokens=40)).json
        assert (after["output_ids"], after["parameters"]["generation"]) == (
            model.generate(PROMPT, max_new_tokens=40),
            1,
        )
        assert after["output_ids"] != before
        until_closed(server)


@pytest.mark.parametrize("over_grpc", [False, True])
def test_streams_begin_after_a_commit_that_waits_for_others(
    files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, over_grpc: bool
) -> None:
    """In single residency. All are in one thread, which may call while it has a pin, so that none would ever wait."""
    model, run, begun, held = load(files[0], files[1], residency="single"), Context.run, Event(), Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert held.wait(120)
        time.sleep(0.01)
        return run(*args)

    monkeypatch.setattr(Context, "run", slow)
    monkeypatch.setattr(gate, "PATIENCE", 600)  # else a commit lets calls in beside a long stream
    with serving({"llama": model}, grpc_port=0) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, STREAM, asked(max_tokens=40))
        assert begun.wait(120)
        swapped = pool.submit(model.swap, files[2])
        assert eventually(lambda: holds_calls(model))
        held.set()
        if over_grpc:
            found = streamed(server, np.array(PROMPT), max_tokens=3)
            generations = {piece.get_response().parameters["generation"].int64_param for piece in found}
        else:
            generations = {e["parameters"]["generation"] for e in events(ask(server, STREAM, asked(max_tokens=3)).body)}
        assert generations == {1}
        assert {event["parameters"]["generation"] for event in events(first.result(120).body)} == {0}
        assert swapped.result(120).generation == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "either text_input or input_ids"),
        ({"text_input": "a", "input_ids": [1]}, "either text_input or input_ids"),
        ({"text_input": "a"}, "needs a tokenizer.json"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [64]}, "the vocabulary has 64"),
        ({"input_ids": [-1]}, ">= 0"),
        ({"input_ids": [1] * 49}, "the cache holds 48"),
        (asked(max_tokens=0), ">= 1"),
        (asked(temperature=-1), ">= 0"),
        (asked(top_p=2), "<= 1"),
        (asked(stop=["a"]), "strings need a text prompt"),
        (asked(most=3), "unknown field `most`"),
        (asked(seed=-1), ">= 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("path", [STREAM, GENERATE])
def test_what_cannot_be_generated(server: Server, path: str, body: Any, says: str) -> None:
    found = ask(server, path, body)
    assert (found.status, says in found.error) == (400, True)
    until_closed(server)


def test_what_does_not_generate(server: Server) -> None:
    found = ask(server, "/v2/models/llama/infer", {"inputs": []})
    assert (found.status, "/generate" in found.error) == (400, True)
    assert ask(server, "/v2/models/none/generate", asked()).status == 404


def test_contexts_have_a_limit(server: Server) -> None:
    with occupied(server):
        opened = [http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=120) for _ in range(2)]
        for connection in opened:
            connection.request("POST", STREAM, json.dumps(asked(max_tokens=3)))
        assert eventually(lambda: server.service.streams == 2)
        refused = ask(server, STREAM, asked())
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    for connection in opened:
        assert len(events(connection.getresponse().read())) == 3
        connection.close()
    until_closed(server)


def test_contexts_have_an_age(files: tuple[Path, Path, Path]) -> None:
    with serving({"llama": load(files[0], files[1])}, stream_timeout=0.2, grpc_port=0) as server:
        with occupied(server):
            found = ask(server, GENERATE, asked())
            assert (found.status, "0.2 s" in found.error) == (504, True)
            with pytest.raises(triton.InferenceServerException, match=r"0\.2 s"):
                streamed(server, np.array(PROMPT))
        until_closed(server)


@pytest.mark.parametrize("good", [0, 3])
def test_a_stream_that_breaks_says_so(server: Server, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """Before its first token by its status, afterwards by a last event."""
    run, calls = Context.run, count()

    def broken(*args: Any) -> Any:
        if next(calls) == good:
            raise RuntimeError("out of order")
        return run(*args)

    monkeypatch.setattr(Context, "run", broken)
    found = ask(server, STREAM, asked())
    says = "the model failed with RuntimeError; see the server's log"
    if good:
        assert [list(event) for event in events(found.body)[-2:]] == [list(events(found.body)[0]), ["error"]]
        assert (len(events(found.body)), events(found.body)[-1]["error"]) == (good + 1, says)
    else:
        assert (found.status, found.error) == (500, says)
    until_closed(server)


def streamed(
    server: Server, ids: np.ndarray[Any, Any], shape: Sequence[int] | None = None, version: str = "", **parameters: Any
) -> list[Any]:
    """Return the responses that the protocol's own client gets over a stream, up to the empty one."""
    told: queue.Queue[Any] = queue.Queue()
    tensor = triton.InferInput("input_ids", list(ids.shape), "INT64").set_data_from_numpy(ids)
    tensor.set_shape(ids.shape if shape is None else shape)
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: told.put(error or result))
        client.async_stream_infer("llama", [tensor], version, enable_empty_final_response=True, parameters=parameters)
        found = []
        while True:
            piece = told.get(timeout=120)
            if isinstance(piece, Exception):
                raise piece
            if piece.get_response().parameters["triton_final_response"].bool_param:
                return found
            found.append(piece)


def test_tokens_come_one_by_one_over_grpc(server: Server, model: Model) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    wanted = model.generate(PROMPT, max_new_tokens=6, **how)
    found = streamed(server, np.array(PROMPT), max_tokens=6, **how)
    assert [piece.as_numpy("output_ids").tolist() for piece in found] == [[token] for token in wanted]
    assert {piece.get_response().parameters["weights_id"].string_param for piece in found} == {model.weights_id}
    until_closed(server)


def test_a_stream_that_names_a_version_is_answered_by_it_alone(files: tuple[Path, Path, Path]) -> None:
    """Also if another one is committed while the stream waits for the model's thread."""
    model = load(files[0], files[1])
    with serving({"llama": model}, grpc_port=0) as server:
        with ThreadPoolExecutor() as pool, occupied(server):
            found = pool.submit(streamed, server, np.array(PROMPT), version="0", max_tokens=3)
            assert eventually(lambda: server.service.streams == 1)
            model.swap(files[2])
        with pytest.raises(triton.InferenceServerException, match="version 0"):
            found.result(120)
        assert len(streamed(server, np.array(PROMPT), version="1", max_tokens=3)) == 3
        until_closed(server)


@pytest.mark.parametrize(
    ("ids", "parameters", "says"),
    [
        ([], {}, "no tokens"),
        ([], {"shape": [0, 1 << 62]}, "expected one prompt"),
        ([[1, 2], [3, 4]], {}, "expected one prompt"),
        ([[[1, 2]]], {}, "expected one prompt"),
        ([64], {}, "the vocabulary has 64"),
        ([1], {"most": 1}, "unknown"),
        ([1], {"top_k": 0}, ">= 1"),
    ],
)
def test_what_cannot_be_generated_over_grpc(server: Server, ids: list[Any], parameters: Any, says: str) -> None:
    with pytest.raises(triton.InferenceServerException, match=says):
        streamed(server, np.array(ids, np.int64), **parameters)
    until_closed(server)


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize("begun", [0, 3])
def test_a_client_that_leaves(
    files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, path: str, begun: int
) -> None:
    run, calls, has_left = Context.run, [], Event()

    def counted(*args: Any) -> Any:
        calls.append(args[0])
        assert len(calls) < begun or has_left.wait(120)
        return run(*args)

    body = json.dumps(asked()).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    with serving({"llama": load(files[0], files[1])}, stream_timeout=10_000) as server:
        monkeypatch.setattr(Context, "run", counted)
        with nullcontext() if begun else occupied(server):
            with connect(server) as raw:
                raw.sendall(request)
                assert eventually(lambda: server.service.streams == 1 and len(calls) == begun)
            assert eventually(lambda: server.service.streams == 0)
        has_left.set()
        until_closed(server)
    assert len(calls) == begun
