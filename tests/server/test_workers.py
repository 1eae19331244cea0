"""`weightswap serve --workers`: one copy of the weights, whoever is killed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from prometheus_client import generate_latest

from tests.server import load
from tests.server.worker_processes import Fleet, eventually, operated, serving
from tests.support.administered import TOKEN
from tests.support.commands import run
from tests.support.tiny import TinyArtifact
from weightswap_runtime import Unsupported, metrics
from weightswap_server import ModelSource, Settings
from weightswap_server.protocol import Process
from weightswap_server.serving import variants_of
from weightswap_server.workers.child_main import ChildTask, ManagerConnection, Message, Role, Totals
from weightswap_server.workers.manager import Child, Workers, environment

SECRETS = {"WEIGHTSWAP_ADMIN_TOKEN": TOKEN} | dict.fromkeys(
    (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
        *("HF_TOKEN", "FSSPEC_S3_SECRET", "WEIGHTSWAP_SIGNING_PASSWORD", "OPENAI_API_KEY"),
    ),
    "secret",
)
NO_SECRETS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "AWS_REGION": "eu-1", "HOME_KEY": "x"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server with secrets, an admin plane, and a desired store that it follows."""
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SECRETS, **NO_SECRETS}.items():
            patch.setenv(name, value)
        with serving(folder, 2, "--follow", str(folder / "desired_store"), *operated(folder)) as found:
            yield found


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_swaps_under_load(fleet: Fleet, tmp_path: Path, seconds: float) -> None:
    client, swaps = load.start(fleet, fleet.expected, tmp_path, seconds), 0
    while client.poll() is None:
        time.sleep(0.2)
        swaps += 1
        fleet.desired_store.set(fleet.files[swaps % 3 + 1], revision=fleet.desired_store.read().revision, by="test")
    print(f"{swaps} swaps, {load.check_all_right(client)}")


def test_a_commit_is_all_workers(fleet: Fleet) -> None:
    for seed in (2, 3, 1):
        wanted = fleet.desire(seed)
        assert {fleet.infer()[0] for _ in range(20)} == {wanted}


def test_workers_inherit_no_secrets(fleet: Fleet) -> None:
    owner, *workers = (_environment(child) for child in fleet.children)
    for worker in workers:
        assert worker.keys() & SECRETS.keys() == set()
        assert NO_SECRETS.items() <= worker.items()
    assert SECRETS.keys() <= owner.keys()
    assert fleet.operator.get("/admin/status")["pid"] > 0


@pytest.mark.parametrize("role", ["owner", "worker"])
def test_who_reads_from_afar_has_its_keys_and_no_token_of_operators(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner without an admin plane, and workers of an artifact behind a URL."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    sources = {"tiny": ModelSource(artifact="s3://bucket/tiny.artifact")}
    task = ChildTask(role=role, name=role, sources=sources, segments={}, settings=Settings())
    assert SECRETS.keys() - environment(task).keys() == {"WEIGHTSWAP_ADMIN_TOKEN"}


def _environment(pid: int) -> dict[str, str]:
    parts = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def test_metrics_are_those_of_all(fleet: Fleet) -> None:
    time.sleep(1.5)  # each tells what it has each second
    before = fleet.answered()
    for _ in range(30):
        fleet.infer()
    eventually(lambda: fleet.answered() == before + 30, 5)
    assert fleet.answered() == before + 30
    assert fleet.counted("weightswap_generation") == fleet.infer()[1]


def test_a_killed_worker_is_replaced_once_the_system_has_room(fleet: Fleet) -> None:
    (owner, killed, _), manager = fleet.children, fleet.process.pid

    def opened() -> int:
        return len(list(Path(f"/proc/{manager}/fd").iterdir()))

    time.sleep(1.5)
    before, descriptors = fleet.answered(), opened()
    limit = resource.prlimit(manager, resource.RLIMIT_NOFILE)
    resource.prlimit(manager, resource.RLIMIT_NOFILE, (3, limit[1]))  # it can open no more
    try:
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: (fleet.folder / "log").read_text().count("did not start") > 1)
    finally:
        resource.prlimit(manager, resource.RLIMIT_NOFILE, limit)
    eventually(lambda: len(fleet.children) == 3)
    assert owner in fleet.children
    wanted = fleet.desire(2)  # while the new one begins
    eventually(lambda: fleet.counted("weightswap_leases") == 0.0 and fleet.answered() >= before)
    for _ in range(50):
        eventually(lambda: fleet.infer()[0] == wanted)
    assert fleet.desire(3) != wanted
    eventually(lambda: opened() == descriptors)


def test_a_killed_owner_is_replaced(fleet: Fleet) -> None:
    owner, *workers = fleet.children
    _, generation = fleet.infer()
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: owner not in fleet.children)
    assert fleet.infer()[1] == generation  # meanwhile
    fleet.desire(1)
    assert fleet.infer()[1] == generation + 1
    assert set(workers) <= set(fleet.children)


@pytest.mark.slow
def test_operators_change_what_workers_serve(tmp_path: Path) -> None:
    with serving(tmp_path, 1, "-w", str(tmp_path / "1.safetensors"), *operated(tmp_path)) as fleet:

        def change(what: str, generation: int, **fields: Any) -> None:
            said = fleet.change(what, **fields)
            assert fleet.infer() == (said["receipt"]["weights_id"], generation)

        change("swap", 1, source=str(fleet.files[2]), why="for the better")
        change("rollback", 2)
        fleet.change("stage", source=str(fleet.files[3]))
        _check_processes(fleet, generation=2)
        change("commit", 3)
        _check_unloading(fleet)
        missing = str(tmp_path / "none.safetensors")
        fleet.refused_change("stage", source=missing)
        _check_taking(fleet)
        history = fleet.operator.get("/admin/models/tiny/history")  # of the owner's next but one
        whys = {each["generation"]: (each["by"], each["why"]) for each in history["receipts"]}
        assert whys[1] == ("token", "for the better")
        assert missing in [each["source"] for each in history["refusals"]]


def _check_taking(fleet: Fleet) -> None:
    """A new owner follows what operators have made the model follow, and no longer follows what they have ended."""
    fleet.change("follow", desired_store=fleet.desired_store.where, interval=0.05)
    fleet.replace(fleet.children[0])
    fleet.desire(2)
    eventually(lambda: fleet.status["following"] is not None)
    fleet.change("unfollow")
    fleet.replace(fleet.children[0])
    eventually(lambda: fleet.status["following"] is None)


def _check_processes(fleet: Fleet, generation: int) -> None:
    """The status and the command show the owner and each worker."""

    def told() -> list[Any]:
        return fleet.processes

    serving = {"generation": generation, "weights_id": fleet.infer()[0]}
    eventually(lambda: all(each["models"] == {"tiny": serving} and each["ready"] for each in told()), 5)
    eventually(lambda: told()[1]["answered"] > 1, 5)
    owner, worker = told()
    assert (owner["role"], owner["answered"], worker["name"]) == ("owner", 0, "worker 0")
    assert [owner["pid"], worker["pid"]] == fleet.children
    assert time.time() - 60 < worker["since"] < worker["heard"] < time.time()
    said = run("status", fleet.operator.where).stdout
    assert f"worker 0    generation {generation}, {serving['weights_id'][:12]}, process {worker['pid']} since" in said
    assert "SILENT" not in said


def _check_unloading(fleet: Fleet) -> None:
    """By Triton's extension: no worker answers afterwards, nor one that replaces it."""
    operator, repository, (owner, worker) = fleet.operator, "/v2/repository/models/tiny/", fleet.children
    operator.post(f"{repository}unload", {})
    for _ in range(3):
        assert "unloaded by an operator" in fleet.refused()
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: worker not in fleet.children and "unloaded by an operator" in fleet.refused())
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: owner not in fleet.children and not fleet.status["loaded"])
    operator.post(f"{repository}load", {})
    assert fleet.infer()[1] == 3


@pytest.mark.slow
def test_nobody_outlives_the_manager(tmp_path: Path) -> None:
    with serving(tmp_path, 2) as fleet:
        children = fleet.children
        fleet.process.kill()
        fleet.process.wait()
        eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_a_request_to_the_manager_does_not_outlive_it() -> None:
    """However many threads request metrics."""
    manager, child = socket.socketpair()
    task = ChildTask(role="worker", name="worker 0", sources={}, segments={}, settings=Settings())
    manager.sendall(msgspec.json.encode(task) + b"\n")
    connection = ManagerConnection(child.detach())
    connection.listen()
    asking = [Thread(target=connection.total, args=(b"",), daemon=True) for _ in range(3)]
    for thread in asking:
        thread.start()
    manager.close()
    for thread in asking:
        thread.join(120)
    assert not any(thread.is_alive() for thread in asking)
    assert connection.processes() == []


def test_a_process_is_heard_of_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was never heard of is not called silent."""
    now = time.time()

    async def hear_twice() -> Process:
        task = ChildTask(role="worker", name="worker 0", sources={}, segments={}, settings=Settings())
        child = Child(task, Totals(), list, 0.0)
        for moment in (now - 3600, now - 3599):
            monkeypatch.setattr(time, "time", lambda moment=moment: moment)
            reader = asyncio.StreamReader()
            reader.feed_data(msgspec.json.encode(Message("alive", msgspec.json.encode(child.status).decode())) + b"\n")
            reader.feed_eof()
            await child._receive(1, reader, Mock())
        return child.status

    status = asyncio.run(hear_twice())
    assert (status.since, status.heard) == (now - 3600, now - 3599)


@pytest.mark.parametrize(
    ("fields", "workers", "says"),
    [
        ({"options": {"engine": "onnx"}}, 2, "--workers with --engine onnx"),
        ({"options": {"device": "cuda"}}, 2, "--workers with --device cuda"),
        ({"options": {"residency": "single"}}, 2, "--workers with --residency single"),
        ({"variants": variants_of(["low=a"])}, 2, "--workers with --variant.*Leave --workers out, or start several"),
        ({"watch": "a", "follow": "b"}, 2, "cannot also watch a directory"),
        ({}, 0, "workers=0"),
    ],
)
def test_what_workers_cannot_share_is_refused(fields: dict[str, Any], workers: int, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        Workers({"m": ModelSource(artifact="a", **fields)}, Settings(), workers)


@pytest.mark.slow
def test_weights_that_cannot_be_served_end_it(
    tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or the command sets it, for all tests after this one
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nothing")
    refused = run("serve", tiny.path, "--weights", bad, "--port", 0, "--workers", 1, status=1)
    assert "bad.safetensors" in refused.stderr


OF_OWNERS = (
    *("generation", "committed_timestamp_seconds", "failed", "model_info", "staging", "staging_done_bytes"),
    *("staging_expected_bytes", "swaps", "failures", "skipped", "staged_bytes", "phase_seconds", "pause_seconds"),
    "hash_trees_bytes",
)
OF_WORKERS = ("leases", "calls", "call_seconds")


@pytest.mark.parametrize(("role", "names"), [("owner", OF_OWNERS), ("worker", OF_WORKERS)])
def test_each_metric_is_the_owners_or_the_workers(role: Role, names: tuple[str, ...]) -> None:
    """`totals` would drop workers' samples of a metric that it does not know: each is listed here."""
    totals, families = Totals(), SimpleNamespace(collect=vars(metrics._Families()).values)
    totals.update(1, role, generate_latest(families).decode())
    assert {family.name for family in totals.collect()} == {f"weightswap_{name}" for name in names}


def _metrics(value: float, kind: str = "counter") -> str:
    name = "weightswap_server_requests_total" if kind == "counter" else "weightswap_server_queued"
    return f'# HELP {name} x\n# TYPE {name} {kind}\n{name}{{model="m"}} {value}\n'


def test_totals_add_up_and_never_go_back() -> None:
    totals = Totals()
    totals.update(1, "worker", _metrics(3) + _metrics(2, "gauge"))
    totals.update(2, "worker", _metrics(4) + _metrics(1, "gauge"))
    totals.update(3, "owner", _metrics(100))  # what is not the owner's to count
    assert 'requests_total{model="m"} 7.0' in totals.text()
    assert 'queued{model="m"} 3.0' in totals.text()
    totals.end(1)
    assert 'requests_total{model="m"} 7.0' in totals.text()
    assert 'queued{model="m"} 1.0' in totals.text()
    totals.update(4, "worker", _metrics(1))
    totals.end(5)
    assert 'requests_total{model="m"} 8.0' in totals.text()
