"""Servers whose weights come from a trainer's memory: `serve --receive`."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.server.worker_processes import Fleet, eventually, started
from tests.support.administered import TOKEN, administered, change
from tests.support.commands import run
from tests.support.served import INFER, X, as_json, ask, expected, serving
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, serves
from weightswap_runtime import (
    DesiredStore,
    NonFiniteWeights,
    Sender,
    Sending,
    StageCancelled,
    SwapReceipt,
    Unsupported,
    load,
)
from weightswap_server import ModelSource


def test_a_server_is_ready_once_weights_were_sent(tiny: TinyArtifact, tmp_path: Path) -> None:
    at = f"unix:{tmp_path / 'x.sock'}"
    model = ModelSource(artifact=str(tiny.path), receive=at).open()
    with serving({"tiny": model}, warm=False) as server, Sender(at, tiny.path) as sender:
        assert ask(server, "/v2/health/ready").status == 503
        receipt = sender.send(tiny.values(2), labels={"step": "7"})
        assert isinstance(receipt, SwapReceipt)
        eventually(lambda: ask(server, "/v2/health/ready").status == 200)
        answer = ask(server, INFER, as_json(x=X)).json
        assert answer["parameters"]["weights_id"] == receipt.weights_id
        assert serves(model, 2)


def test_a_server_that_starts_again_begins_with_what_was_served_last(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    at, kept, first = f"unix:{tmp_path / 'x.sock'}", str(tmp_path / "kept"), str(weight_file(1))
    source = ModelSource(artifact=str(tiny.path), weights=first, receive=at, keep=kept)
    with source.open() as model, Sender(at, tiny.path) as sender:
        assert serves(model, 1)
        sender.send(tiny.values(2))
    with source.open() as model:
        assert serves(model, 2)
    with administered({"tiny": ModelSource(artifact=str(tiny.path), keep=kept).open()}) as server:
        assert server.admin is not None
        with Sender(server.admin.where, tiny.path) as sender:
            sender.send(tiny.values(3))
    with ModelSource(artifact=str(tiny.path), keep=kept).open() as model:
        assert serves(model, 3)
    with pytest.raises(Unsupported, match="those of a directory or a desired store are in files already"):
        ModelSource(artifact=str(tiny.path), watch=str(tmp_path), keep=kept).open()


def test_a_rollback_does_not_wait_for_what_is_received(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    at, model = f"unix:{tmp_path / 'x.sock'}", load(tiny.path, weight_file(1), keep_previous="host")
    model.swap(weight_file(2))
    model.receive(at, rate_limit=SLOW)
    with administered({"tiny": model}) as server, Sender(at, tiny.path) as sender:
        sending = sender.send(tiny.values(3), wait=False)
        assert isinstance(sending, Sending)
        eventually(lambda: model.progress is not None and model.progress.phase == "copying")
        assert change(server, "rollback").status == 200
        assert serves(model, 1)
        with pytest.raises(StageCancelled):
            sending.wait(20)


@pytest.mark.parametrize("other", ["--watch", "--follow"])
def test_a_model_has_one_source(other: str, tiny: TinyArtifact, tmp_path: Path) -> None:
    sources = ("--receive", f"unix:{tmp_path / 'x'}", other, tmp_path)
    refused = run("serve", tiny.path, "--port", 0, *sources, status=2)
    assert "can neither follow a desired store nor watch a directory" in refused.stderr


def test_all_workers_serve_what_the_owner_receives(tmp_path: Path, weight_file: WriteWeights) -> None:
    tiny = TinyArtifact(tmp_path / "workers" / "tiny.artifact")
    at = f"unix:{tmp_path / 'x.sock'}"
    (tmp_path / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        operated = ["--admin-port", str(free.getsockname()[1]), "--admin-token-file", str(tmp_path / "token")]
    with (
        started(tmp_path / "workers", 2, "--weights", str(weight_file(1)), "--receive", at, *operated) as running,
        Sender(at, tiny.path) as sender,
        Sender(f"http://127.0.0.1:{operated[1]}", tiny.path, token=TOKEN) as remote,
    ):
        fleet = Fleet(**vars(running), desired_store=DesiredStore(tmp_path), files={}, expected={})
        fleet.await_ready()
        for seed, each in ((2, sender), (3, remote)):
            receipt = each.send(tiny.values(seed))
            assert isinstance(receipt, SwapReceipt)
            fleet.expected[receipt.weights_id] = expected(seed)
            for _ in range(8):
                assert fleet.infer()[0] == receipt.weights_id
        with pytest.raises(NonFiniteWeights):
            sender.send({**tiny.values(3), "bias": tiny.values(3)["bias"] * float("nan")})
        owner = fleet.children[0]
        os.kill(owner, signal.SIGKILL)  # the segment keeps what was sent
        assert fleet.infer()[0] == receipt.weights_id
        eventually(lambda: fleet.children[-1] != owner and Path(at.removeprefix("unix:")).exists())

        def sent() -> bool:
            try:
                again = sender.send(tiny.values(2))
            except Exception:
                return False
            assert isinstance(again, SwapReceipt)
            return json.dumps(again.labels) == "{}" and fleet.infer()[0] == again.weights_id

        eventually(sent)
