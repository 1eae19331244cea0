"""Replicas of two ranks on a real cluster of two nodes: the fleet's proofs hold, and a rank that dies is no loss."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.packages import needs
from tests.support.ranks import X, split_artifact, values, whole, write_set
from weightswap_fleet import FleetRefused
from weightswap_runtime.following.place import known_weights

from .clusters import cluster, soon, until

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

    def seed(self, weights_id: str) -> int:
        return self._seeds[weights_id]

    def damaged(self, seed: int) -> Path:
        path = self.folder / "damaged.safetensors"
        raw = bytearray(self.sets[seed].read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        return path


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


class Client(threading.Thread):
    """A client that calls all the time, and checks each answer."""

    def __init__(self, deployed: Deployed) -> None:
        super().__init__(daemon=True)
        self._client, self._files = deployed.fleet.client(), deployed.files
        self._stopped = threading.Event()
        self.answers: list[tuple[float, int, int]] = []  # when it was asked for, its seed, its revision
        self.wrong: list[str] = []
        self.failures: list[BaseException] = []

    def run(self) -> None:
        while not self._stopped.is_set():
            asked = time.time()
            try:
                answer = self._client.infer({"x": X.numpy()})
            except Exception as error:
                self.failures.append(error)
                continue
            seed = self._files.seed(answer.weights_id)
            expected = whole(values(seed), X).numpy()
            if not np.allclose(answer.outputs["y"], expected, atol=1e-4):
                self.wrong.append(f"{answer.outputs} of {seed}")
            if answer.outputs["marks"].tolist() != [float(seed)] * 2:
                self.wrong.append(f"{answer.outputs} of {seed}")
            self.answers.append((asked, seed, answer.revision))

    def has_seen(self, revision: int) -> bool:
        return bool(self.answers) and self.answers[-1][2] >= revision

    def end(self) -> None:
        self._stopped.set()
        self.join(60)
        self._client.close()
        assert not self.is_alive()


@contextmanager
def calling(deployed: Deployed, clients: int = 2) -> Iterator[list[Client]]:
    """Run clients while the block runs. Afterwards no answer may be a mixture, or older than one before."""
    found = [Client(deployed) for _ in range(clients)]
    for client in found:
        client.start()
    try:
        until(lambda: all(client.answers for client in found))
        yield found
    finally:
        for client in found:
            client.end()
    for client in found:
        assert client.wrong == []
        revisions = [revision for _, _, revision in client.answers]
        assert revisions == sorted(revisions)


def served(deployed: Deployed) -> set[int]:
    return {deployed.files.seed(each.weights_id) for each in deployed.fleet.nodes.values()}


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
            assert served(deployed) == {1 + turn % 3}
        fleet.swap(files.sets[1])
        fleet.swap(files.sets[2])
        back = fleet.rollback(by="eve", hold=False)
        committed = time.time()
        until(lambda: all(client.has_seen(back.revision) for client in clients))
    assert all(each.resident for each in back.nodes.values())
    assert served(deployed) == {1}
    for client in clients:
        assert client.failures == []
        assert {seed for asked, seed, _ in client.answers if asked > committed} <= {1}
        assert len({seed for _, seed, _ in client.answers}) > 1


def test_what_is_refused_no_replica_takes(deployed: Deployed) -> None:
    fleet, files = deployed
    before, seed = fleet.desired, served(deployed)
    with calling(deployed) as clients, pytest.raises(FleetRefused) as refused:
        fleet.swap(files.damaged(3))
    assert set(refused.value.reasons) == set(fleet.nodes)
    assert str(refused.value).count("digest") >= len(fleet.nodes)
    assert fleet.desired == before
    assert served(deployed) == seed
    assert [client.failures for client in clients] == [[], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_takes_its_replica_along_and_both_come_back(deployed: Deployed, rank: int) -> None:
    fleet, files = deployed
    soon(lambda: fleet.swap(files.sets[1]))
    before = fleet.nodes
    victim = min(before.values(), key=lambda each: each.node)
    with calling(deployed) as clients:
        os.kill(victim.ranks[rank], signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in victim.ranks), 60)
        receipt = soon(lambda: fleet.swap(files.sets[2]))  # with whoever is there
        until(lambda: len(fleet.nodes) == 2 and victim.node not in fleet.nodes)
        assert fleet.wait(60)
        assert served(deployed) == {2}
        again = soon(lambda: fleet.swap(files.sets[3]))
        assert len(again.nodes) == 2
        until(lambda: all(client.has_seen(again.revision) for client in clients))
    assert served(deployed) == {3}
    assert receipt.revision < again.revision


def test_a_trial_is_refused_by_name(deployed: Deployed) -> None:
    fleet, files = deployed
    with pytest.raises(FleetRefused, match="has its model on several ranks, on which weights cannot be on trial"):
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
    with urllib.request.urlopen(request, timeout=30) as answer:
        said = json.load(answer)
    assert said["parameters"]["weights_id"] == receipt.weights_id
    data = {output["name"]: output["data"] for output in said["outputs"]}
    assert data["marks"] == [2.0, 2.0]
    assert torch.allclose(torch.tensor(data["y"]), whole(values(2), X).flatten(), atol=1e-4)
    text = fleet.metrics()
    assert text.count("\nweightswap_fleet_revision{") == 2
