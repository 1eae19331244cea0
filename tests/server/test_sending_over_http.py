"""Weights that come to a server's admin plane as they are sent, from a trainer's memory or a file."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from torch import nn
from typer.testing import Result

from tests.server.worker_processes import eventually
from tests.support.administered import TOKEN, administered, call, change, status
from tests.support.commands import run
from tests.support.served import Reply
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_exporter import export
from weightswap_runtime import (
    DesiredStore,
    GraphMismatch,
    Model,
    NonFiniteWeights,
    Sender,
    Sending,
    SwapReceipt,
    TransferFailed,
    Unsupported,
    WeightsMismatch,
    load,
    write_delta,
)
from weightswap_runtime.sources.arriving import Arriving
from weightswap_runtime.transfer.admin_client import AdminClient, AdminRefused
from weightswap_server import Server


@pytest.fixture
def residency() -> str:
    return "double"


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights, residency: Any) -> Iterator[Model]:
    with load(tiny.path, weight_file(0), residency=residency) as model:
        yield model


@pytest.fixture
def server(model: Model) -> Iterator[Server]:
    with administered({"tiny": model}, max_uploads=200_000) as server:
        yield server


@pytest.fixture
def sender(server: Server, tiny: TinyArtifact) -> Iterator[Sender]:
    with Sender(where(server), tiny.path, timeout=20.0) as sender:
        yield sender


def where(server: Server) -> str:
    assert server.admin is not None
    return server.admin.where


def put(server: Server, content: bytes, what: str = "swap", **options: Any) -> Reply:
    query = "?options=" + quote(json.dumps(options)) if options else ""
    return call(server, f"/admin/models/tiny/{what}{query}", content, method="PUT")


def raw(server: Server, head: str = "") -> socket.socket:
    """Begin to send weights, by the bytes of HTTP."""
    assert server.admin is not None
    connection = socket.create_connection(("127.0.0.1", server.admin.port), timeout=120)
    connection.sendall(
        f"PUT /admin/models/tiny/swap HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{head}\r\n\r\n".encode()
    )
    return connection


def answer_to(connection: socket.socket) -> Reply:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return Reply(response.status, {}, response.read())


@pytest.mark.parametrize("residency", ["double", "single"])
def test_what_is_sent_is_served(sender: Sender, model: Model, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    forms: list[Any] = [tiny.values(1), iter(tiny.values(2).items()), weight_file(3), tiny.values(4)]
    for seed, given in enumerate(forms, 1):
        receipt = sender.send(given, labels={"step": str(seed)} if seed != 3 else None)
        assert isinstance(receipt, SwapReceipt)
        assert receipt == model.history[-1]
        assert serves(model, seed)
        assert receipt.weights_id == load(tiny.path, weight_file(seed)).weights_id
        assert (receipt.by, receipt.source, receipt.reloadable) == ("token", "memory:token", False)
        assert receipt.labels == ({"step": str(seed)} if seed != 3 else {})


@pytest.mark.parametrize(
    ("bias", "error"),
    [(lambda bias: bias[:3], WeightsMismatch), (lambda bias: bias * float("nan"), NonFiniteWeights)],
    ids=["here", "there"],
)
def test_a_refusal_comes_back_with_its_reason(bias: Any, error: Any, model: Model, sender: Sender) -> None:
    values = TinyArtifact.values(1)
    with pytest.raises(error) as refused:
        sender.send({**values, "bias": bias(values["bias"])})
    assert "  - bias: " in str(refused.value)
    check_unchanged(model, sender)


def test_who_may_not_send_is_told_before_anything_is_read(
    server: Server, model: Model, tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arriving, "read_into", None)
    at, linear = where(server), nn.Linear(3, 3).eval()
    other = export(linear, (torch.zeros(1, 3),), out=tmp_path / "b.artifact")
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"token": "x" * 20}, TransferFailed),
        ({"model": "large"}, Unsupported),
        ({"artifact": other}, GraphMismatch),
        ({"to": "http://127.0.0.1:1"}, TransferFailed),
    ]
    for options, error in refused:
        given: dict[str, Any] = {"to": at, "artifact": tiny.path, **options}
        with Sender(**given) as sender, pytest.raises(error):
            sender.send(linear if "artifact" in options else tiny.values(1))
    assert call(server, "/admin/models/tiny/swap", b"x", {}, "PUT").status == 401
    monkeypatch.delenv("WEIGHTSWAP_ADMIN_TOKEN")
    with pytest.raises(Unsupported):
        Sender(at, tiny.path)
    for to in ("http://user:secret@127.0.0.1:1", "http://127.0.0.1:1/path"):
        with pytest.raises(Unsupported) as refused:
            Sender(to, tiny.path, token=TOKEN)
        assert "secret" not in str(refused.value)
    with pytest.raises(Unsupported):
        Sender("unix:x.sock", tiny.path, token=TOKEN)
    assert model.generation == 0


def test_options_are_those_of_a_staging(
    server: Server, model: Model, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    content = weight_file(1).read_bytes()
    assert put(server, content, expect="0" * 64).json["kind"] == "UnexpectedWeights"
    assert put(server, content, only=["bias"], why="a try").json["receipt"]["kind"] == "partial"
    assert call(server, "/admin/models/tiny/history").json["receipts"][-1]["why"] == "a try"
    assert put(server, content, "stage").json["status"]["staged"]["source"] == "memory:token"
    assert put(server, content).json["kind"] == "StagingBusy"
    assert change(server, "commit").json["receipt"]["source"] == "memory:token"
    assert serves(model, 1)
    for odd in ({"source": "x"}, {"only": "bias"}, {"verify": "no"}):
        assert put(server, content, **odd).status == 400
    with closing(raw(server, "Transfer-Encoding: chunked")) as connection:
        assert answer_to(connection).json["error"] == "weights in a body must have a Content-Length"
    with closing(raw(server, "Content-Length: 200001")) as connection:
        assert answer_to(connection).status == 413
    assert call(server, "/admin/models/large/swap", content, method="PUT").status == 404


def test_where_a_desired_store_is_followed_it_says_what_is_served(
    server: Server, model: Model, sender: Sender, weight_file: WriteWeights, tmp_path: Path
) -> None:
    desired_store = DesiredStore(tmp_path)
    desired_store.set(weight_file(2), revision=0, by="ci")
    follower = model.follow(tmp_path, 0.05)
    eventually(lambda: serves(model, 2))
    with pytest.raises(TransferFailed):
        sender.send(TinyArtifact.values(1))
    assert serves(model, 2)
    follower.stop()
    sender.send(TinyArtifact.values(1))
    assert serves(model, 1)


def test_senders_wait_for_each_other(server: Server, model: Model, sender: Sender, weight_file: WriteWeights) -> None:
    content = weight_file(2).read_bytes()
    with closing(raw(server, f"Content-Length: {len(content)}")) as connection:
        connection.sendall(content[:-4])
        eventually(lambda: status(server)["staged"] is not None)
        sending = sender.send(TinyArtifact.values(1), wait=False)
        assert isinstance(sending, Sending)
        connection.sendall(content[-4:])
        assert answer_to(connection).status == 200
    sending.wait(120)
    assert serves(model, 1)
    assert [receipt.generation for receipt in model.history] == [0, 1, 2]


def test_a_desired_store_that_is_followed_meanwhile_refuses_what_it_cannot_name(
    server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path
) -> None:
    assert put(server, weight_file(1).read_bytes(), "stage").status == 200
    DesiredStore(tmp_path).set(weight_file(0), revision=0, by="ci")
    model.follow(tmp_path, 60.0)
    refused = change(server, "commit")
    assert (refused.status, "nobody else could read these weights" in refused.json["error"]) == (409, True)
    assert serves(model, 0)


def check_unchanged(model: Model, sender: Sender) -> None:
    """Check that a refusal has changed nothing, and that the next weights are taken."""
    assert (model.generation, serves(model, 0)) == (0, True)
    sender.send(TinyArtifact.values(1))
    assert serves(model, 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("residency", ["double", "single"])
@pytest.mark.parametrize("share", [0, 5, 0.3, 0.6, 0.99, -1])
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_sender_that_ends_in_the_middle_changes_nothing(
    share: float, how: str, server: Server, model: Model, sender: Sender, weight_file: WriteWeights
) -> None:
    content = weight_file(1).read_bytes()
    sent = share if isinstance(share, int) else int(share * len(content))
    with closing(raw(server, f"Content-Length: {len(content)}")) as connection:
        connection.sendall(content[:sent])
        if how == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(
        lambda: any(
            "the upload was interrupted" in each["error"]
            for each in call(server, "/admin/models/tiny/history").json["refusals"]
        )
    )
    check_unchanged(model, sender)


def test_a_sender_that_stalls_is_given_up(
    server: Server, model: Model, sender: Sender, weight_file: WriteWeights
) -> None:
    content = weight_file(1).read_bytes()
    with closing(raw(server, f"Content-Length: {len(content)}")) as connection:
        connection.sendall(content[:-4])
        answer = answer_to(connection)
        assert answer.status == 408
        assert answer.json["error"] == "nothing arrived for 0.4 s, or all of it took too long"
    check_unchanged(model, sender)


@contextmanager
def half_sent(tiny: TinyArtifact, weight_file: WriteWeights) -> Iterator[tuple[Server, Model, socket.socket]]:
    """Yield a server that has swapped once, while weights for it have arrived but for their last bytes."""
    model = load(tiny.path, weight_file(1))
    model.swap(weight_file(2))
    with administered({"tiny": model}, body_timeout=60.0) as server:
        connection = raw(server, "Content-Length: 5000")
        connection.sendall(weight_file(3).read_bytes()[:-4])
        eventually(lambda: status(server)["staged"] is not None)
        yield server, model, connection
    with closing(connection):
        assert answer_to(connection).json["kind"] == "StageCancelled"


@pytest.mark.parametrize(("what", "seed"), [("discard", 2), ("rollback", 1)])
def test_an_operator_need_not_wait_for_what_arrives(
    what: str, seed: int, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    with half_sent(tiny, weight_file) as (server, model, _):
        assert change(server, what).status == 200
        assert serves(model, seed)


def test_a_server_that_stops_does_not_wait_for_what_arrives(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with half_sent(tiny, weight_file):
        pass


def test_what_is_refused_by_its_header_is_not_sent_to_its_end(model: Model) -> None:
    size, sent = 1 << 30, list[int]()
    header = b'{"bias":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(len(header).to_bytes(8, "little") + header)
        for number in range(size >> 20):
            sent.append(number)
            yield memoryview(bytes(1 << 20))

    with administered({"tiny": model}) as server, pytest.raises(AdminRefused, match="bias: expected F32"):
        AdminClient(where(server), TOKEN).send("tiny", "swap", pieces(), 8 + len(header) + size, {}, 60.0)
    assert len(sent) < size >> 20


def push(server: Server, *arguments: object, status: int = 0) -> Result:
    return run("push", where(server), *arguments, status=status)


def test_a_file_is_pushed_to_a_server_that_keeps_none(
    server: Server, model: Model, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    done = push(server, weight_file(1), "--why", "better")
    assert serves(model, 1)
    assert "generation  1: memory:token\n" in done.stdout
    assert push(server, weight_file(2), "--stage").stdout.startswith("staged      ")
    assert change(server, "discard").status == 200
    write_delta(weight_file(1), weight_file(2), tmp_path / "delta.safetensors")
    push(server, tmp_path / "delta.safetensors")
    assert serves(model, 2)
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(3), graph_id="1" * 64)
    assert "packed for another graph" in push(server, other, status=1).stderr
    push(server, other, "--allow-other-graph")
    assert serves(model, 3)
    weight_file(4).with_name("v4.goldens.safetensors").write_bytes(b"")
    assert "keeps no uploads, so that it could not try" in push(server, weight_file(4), status=2).stderr
    assert serves(model, 3)


def test_a_file_becomes_a_canary_of_a_server_that_keeps_none(
    server: Server, model: Model, weight_file: WriteWeights
) -> None:
    name = "/admin/models/tiny/canary"
    run("canary", where(server), weight_file(1), "--share", "0.5")
    staged = AdminClient(where(server), TOKEN).get("/admin/models/tiny")["canary"]["weights_id"]
    with pytest.raises(AdminRefused, match="is staged now; look again"):
        AdminClient(where(server), TOKEN).post(name, {"expect": model.weights_id})
    assert AdminClient(where(server), TOKEN).post(name, {"expect": staged})["canary"] == staged
    run("canary", where(server), "--promote")
    assert serves(model, 1)
