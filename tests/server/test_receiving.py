"""Servers whose weights come from a trainer's memory: `serve --receive`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.server.worker_processes import eventually, started
from tests.support.administered import administered, change
from tests.support.commands import run
from tests.support.served import INFER, X, as_json, ask, serving
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, serves
from weightswap_runtime import (
    Sender,
    Sending,
    StageCancelled,
    SwapReceipt,
    Unsupported,
    load,
)
from weightswap_runtime.transfer.keeping import kept_files
from weightswap_server import ModelSource

WAITING_DISK = """
import os, time

fsync = os.fsync

def waiting(descriptor):
    while os.path.exists(os.environ["WAITS_WHILE"]):
        time.sleep(0.05)
    fsync(descriptor)

os.fsync = waiting
"""


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
    with pytest.raises(Unsupported):
        ModelSource(artifact=str(tiny.path), watch=str(tmp_path), keep=kept).open()


def test_an_owner_that_stops_may_take_the_grace_to_keep_what_was_sent_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, kept, full = TinyArtifact(tmp_path / "tiny.artifact"), tmp_path / "kept", tmp_path / "full"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(WAITING_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "slow"), prepend=os.pathsep)
    monkeypatch.setenv("WAITS_WHILE", str(full))
    at = f"unix:{tmp_path / 'x.sock'}"
    with started(tmp_path, 1, "--receive", at, "--keep", str(kept)) as running, Sender(at, tiny.path) as sender:
        full.touch()
        receipt = sender.send(tiny.values(2))
        assert isinstance(receipt, SwapReceipt)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(8)  # longer than a process that hangs gets beyond the grace
        full.unlink()
        assert running.process.wait(60) == 0
    assert [path.stem[-12:] for path in kept_files(kept)] == [receipt.weights_id[:12]]


def test_a_kept_file_that_is_damaged_keeps_no_server_from_starting(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    source = ModelSource(artifact=str(tiny.path), weights=str(weight_file(1)), keep=str(kept))
    for seed in (2, 3):
        with source.open() as model:
            model.swap(tiny.values(seed))
    newest = max(kept.iterdir())
    damage(newest)
    with source.open() as model:
        assert serves(model, 2)
    assert newest.name in caplog.text
    assert len(list(kept.iterdir())) == 3  # what is served is the newest now
    for path in kept.iterdir():
        damage(path)
    with source.open() as model:
        assert serves(model, 1)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] = (content[-1] + 1) % 256
    path.write_bytes(content)


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
            sending.wait(120)


@pytest.mark.parametrize("other", ["--watch", "--follow"])
def test_a_model_has_one_source(other: str, tiny: TinyArtifact, tmp_path: Path) -> None:
    sources = ("--receive", f"unix:{tmp_path / 'x'}", other, tmp_path)
    refused = run("serve", tiny.path, "--port", 0, *sources, status=2)
    assert "can neither follow a desired store nor watch a directory" in refused.stderr
