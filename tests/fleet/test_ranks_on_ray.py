"""Replicas of two ranks on a real cluster of two nodes: the fleet's proofs hold, and a rank that dies is no loss."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.damage import damaged
from tests.support.packages import needs
from tests.support.ranks import X, split_artifact, values, whole, write_set
from weightswap_fleet import FleetError, FleetRefused
from weightswap_runtime.following.desired_store import known_weights
from weightswap_tools.commands import fleet as fleet_commands

from .clusters import Client, checked, cluster, served, soon, until

pytestmark = [
    needs("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]
SEEDS = range(4)


class Files:
    """An artifact for two ranks, and weights by their seeds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifact = split_artifact(folder / "split.artifact")
        self.sets = [write_set(folder / f"{seed}.safetensors", seed) for seed in SEEDS]
        self._seeds = {known_weights(path).weights_id: seed for seed, path in enumerate(self.sets)}

    def number(self, weights_id: str) -> int:
        return self._seeds[weights_id]

    def is_right(self, outputs: Any, weights_id: str) -> bool:
        seed = self.number(weights_id)
        is_near = np.allclose(outputs["y"], whole(values(seed), X).numpy(), atol=1e-4)
        return is_near and outputs["marks"].tolist() == [float(seed)] * 2

    def damaged(self, seed: int) -> Path:
        return damaged(self.sets[seed], self.folder / "damaged.safetensors")


class Deployed(NamedTuple):
    fleet: Any
    files: Files


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Two replicas of two ranks on two nodes."""
    from ray import serve

    from weightswap_fleet import connect, deployment

    files = Files(tmp_path_factory.mktemp("ranks"))
    with cluster(2):
        application = deployment(
            files.artifact,
            files.sets[0],
            name="split",
            num_replicas=2,
            ray_actor_options={"num_cpus": 1},
            interval=0.5,
            ranks=2,
        )
        serve.run(application, name="split")
        yield Deployed(connect("split"), files)


@contextmanager
def calling(deployed: Deployed) -> Iterator[list[Client]]:
    """Run clients while the block runs. Afterwards no answer may be a mixture, or older than one before."""
    with checked([Client(deployed.fleet, deployed.files, X.numpy()) for _ in range(2)]) as clients:
        until(lambda: all(client.answers for client in clients))
        yield clients


def numbers(deployed: Deployed) -> set[int]:
    return set(map(deployed.files.number, served(deployed.fleet)))


def test_swaps_and_rollbacks_are_every_replica_s(deployed: Deployed) -> None:
    fleet, files = deployed
    nodes = fleet.nodes
    assert len(nodes) == 2
    assert {len(node.ranks) for node in nodes.values()} == {2}
    assert len({name.partition(".")[0] for name in nodes}) == 2  # Ray's nodes
    with calling(deployed) as clients:
        for turn in range(20):
            receipt = fleet.swap(files.sets[1 + turn % 3], by="ana")
            assert receipt.late == {}
            assert set(receipt.nodes) == set(nodes)
            assert numbers(deployed) == {1 + turn % 3}
        fleet.swap(files.sets[1])
        fleet.swap(files.sets[2])
        back = fleet.rollback(by="eve", hold=False)
        committed = time.time()
        until(lambda: all(client.has_seen(back.revision) for client in clients))
    assert all(each.resident for each in back.nodes.values())
    assert numbers(deployed) == {1}
    for client in clients:
        assert client.failures == []
        assert {seed for asked, seed, _ in client.answers if asked > committed} <= {1}
        assert len({seed for _, seed, _ in client.answers}) > 1


def test_what_is_refused_no_replica_takes(deployed: Deployed) -> None:
    fleet, files = deployed
    before, seed = fleet.desired, numbers(deployed)
    with calling(deployed) as clients, pytest.raises(FleetRefused) as refused:
        fleet.swap(files.damaged(3))
    assert set(refused.value.reasons) == set(fleet.nodes)
    assert str(refused.value).count("digest") >= len(fleet.nodes)
    assert fleet.desired == before
    assert numbers(deployed) == seed
    assert [client.failures for client in clients] == [[], []]


@pytest.mark.parametrize(("rank", "blow"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_is_gone_takes_its_replica_along_and_all_come_back(
    deployed: Deployed, rank: int, blow: signal.Signals
) -> None:
    """Under traffic: answers are right, or errors."""
    fleet, files = deployed
    soon(lambda: fleet.swap(files.sets[1]))
    victim = min(fleet.nodes.values(), key=lambda each: each.node)
    with calling(deployed) as clients:
        os.kill(victim.ranks[rank], blow)
        until(lambda: not any(map(runs, victim.ranks)))
        soon(lambda: fleet.swap(files.sets[2]))  # with whoever is there
        until(lambda: len(fleet.nodes) == 2 and victim.node not in fleet.nodes)
        assert soon(lambda: fleet.wait(120))
        assert numbers(deployed) == {2}
        again = soon(lambda: fleet.swap(files.sets[3]))
        assert len(again.nodes) == 2
        until(lambda: all(client.has_seen(again.revision) for client in clients))
    assert numbers(deployed) == {3}


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deaths=st.lists(st.tuples(st.sampled_from([0, 1]), st.floats(0.0, 0.1)), min_size=1, max_size=2))
@example(deaths=[(1, 0.02), (0, 0.04)])
def test_ranks_that_are_killed_anywhere_in_a_change(deployed: Deployed, deaths: list[tuple[int, float]]) -> None:
    """One after another. What the desired store says is what all serve in the end."""
    fleet, files = deployed
    with calling(deployed):
        for turn, (rank, after) in enumerate(deaths):
            nodes = until(lambda: soon(lambda: list(fleet.nodes.values())))
            victim = nodes[turn % len(nodes)].ranks[rank]
            killing = threading.Timer(after, os.kill, (victim, signal.SIGKILL))
            killing.start()
            with suppress(FleetError):
                fleet.swap(files.sets[1 + turn % 3])
            killing.join()
            until(lambda pid=victim: not runs(pid) and len(soon(lambda: fleet.nodes)) == 2)  # type: ignore[misc]
            assert soon(lambda: fleet.wait(120))
            assert numbers(deployed) == {files.number(fleet.desired.weights_id)}


def runs(pid: int) -> bool:
    """Return whether a process has not ended, whoever still has to learn of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_trial_is_refused_by_name(deployed: Deployed) -> None:
    fleet, files = deployed
    with pytest.raises(FleetRefused):
        fleet.canary(files.sets[0], share=0.5)
    assert fleet.trial is None


def test_over_http_and_metrics(deployed: Deployed) -> None:
    fleet, files = deployed
    receipt = soon(lambda: fleet.swap(files.sets[2]))
    inputs = [{"name": "x", "datatype": "FP32", "shape": list(X.shape), "data": X.flatten().tolist()}]
    headers = {"content-type": "application/json", "weightswap-min-revision": str(receipt.revision)}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v2/models/split/infer", json.dumps({"inputs": inputs}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    assert said["parameters"]["weights_id"] == receipt.weights_id
    data = {output["name"]: output["data"] for output in said["outputs"]}
    assert data["marks"] == [2.0, 2.0]
    assert torch.allclose(torch.tensor(data["y"]), whole(values(2), X).flatten(), atol=1e-4)
    # of the nodes that answer within five seconds, which on a busy machine need not be all
    until(lambda: fleet.metrics().count("\nweightswap_fleet_revision{") == 2)


def test_on_the_command_line(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that comes later replaces all replicas, and the weights stay."""
    files, before = deployed.files, deployed.fleet.nodes
    monkeypatch.setattr(fleet_commands, "cluster", lambda address: nullcontext())
    soon(lambda: deployed.fleet.swap(files.sets[1]))
    deploy = ("deploy", files.artifact, "--weights", files.sets[0], "--name", "split", "--replicas", 2)
    assert "is exported for 2 ranks; give ranks=2" in run(*deploy, status=2)
    run(*deploy, "--ranks", 2)
    until(lambda: len(deployed.fleet.nodes) == 2 and not before.keys() & deployed.fleet.nodes.keys())
    assert "serve it    2 of 2 replicas\n" in run("status", "--name", "split")
    assert numbers(deployed) == {1}
    document = json.loads(run("status", "--name", "split", "--json"))
    assert [len(node["ranks"]) for node in document["nodes"]] == [2, 2]


def run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(fleet_commands.fleet_command, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done.output
