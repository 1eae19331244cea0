"""A fleet on a real cluster of several nodes: swaps, refusals, clients that never go back, and whoever is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from weightswap_runtime.errors import DigestMismatch, Held, NothingToRollBack, WeightFileError

from .clusters import INPUT, Files, cluster

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]
NUMBERS = 7


class Deployed(NamedTuple):
    fleet: Any
    files: Files
    cluster: Any


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Four replicas on three nodes."""
    from ray import serve

    from weightswap_fleet import connect, deployment

    files = Files(tmp_path_factory.mktemp("fleet"), NUMBERS)
    with cluster(3) as made:
        application = deployment(
            files.artifact,
            files.weights[0],
            name="numbered",
            num_replicas=4,
            ray_actor_options={"num_cpus": 1},
            interval=0.5,
        )
        serve.run(application, name="numbered")
        yield Deployed(connect("numbered"), files, made)


class Client(threading.Thread):
    """Calls all the time, and looks at each answer."""

    def __init__(self, deployed: Deployed) -> None:
        super().__init__(daemon=True)
        self._client, self._files = deployed.fleet.client(), deployed.files
        self.answers: list[tuple[float, int, int]] = []  # when it was asked for, its number, its revision
        self.wrong: list[str] = []
        self.failures: list[BaseException] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            asked = time.time()
            try:
                answer = self._client.infer({"x": INPUT})
            except Exception as error:
                self.failures.append(error)
                continue
            if not self._files.is_whole(answer.outputs["output"], answer.weights_id):
                self.wrong.append(f"{answer.outputs} of {answer.weights_id}")
            self.answers.append((asked, self._files.number(answer.weights_id), answer.revision))

    def end(self) -> None:
        self._stopped.set()
        self.join(60)
        assert not self.is_alive()


@contextmanager
def calling(deployed: Deployed, clients: int = 2) -> Iterator[list[Client]]:
    """A block in which clients call; afterwards no answer was wrong, and none went back."""
    found = [Client(deployed) for _ in range(clients)]
    for client in found:
        client.start()
    try:
        yield found
    finally:
        for client in found:
            client.end()
    for client in found:
        assert client.wrong == []
        revisions = [revision for _, _, revision in client.answers]
        assert revisions == sorted(revisions)
        assert client.answers


def test_a_swap_is_every_node_s(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    with calling(deployed) as clients:
        before = fleet.desired.revision
        receipt = fleet.swap(files.weights[1], by="ana", why="better")
        committed = time.time()
        time.sleep(1.0)
    assert (receipt.kind, receipt.revision, receipt.late) == ("swap", before + 1, {})
    assert files.number(receipt.weights_id) == 1
    assert len(receipt.nodes) == len(fleet.nodes) >= 2
    assert {each.weights_id for each in fleet.nodes.values()} == {receipt.weights_id}
    assert [each.by for each in [fleet.desired.weights]] == ["ana"]
    for client in clients:
        assert {number for asked, number, _ in client.answers if asked > committed} == {1}
        assert client.failures == []


def test_clients_never_go_back(deployed: Deployed) -> None:
    """The time travels of a plain client: reads during fifty swaps."""
    fleet, files, _ = deployed
    with calling(deployed, 3) as clients:
        for turn in range(50):
            fleet.swap(files.weights[1 + turn % 3])
    for client in clients:
        assert client.failures == []
        served = {revision: number for _, number, revision in client.answers}
        order = [served[revision] for revision in sorted(served)]
        assert len(order) > 5


def test_what_one_node_cannot_take_none_does(deployed: Deployed) -> None:
    from weightswap_fleet import FleetRefused

    fleet, files, _ = deployed
    before = fleet.desired
    damaged = files.folder / "damaged.safetensors"
    content = bytearray(files.weights[5].read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with calling(deployed) as clients, pytest.raises(FleetRefused) as refused:
        fleet.swap(damaged)
    assert len(refused.value.reasons) == len(fleet.nodes)
    assert all(isinstance(error, DigestMismatch) for error in refused.value.reasons.values())
    assert fleet.desired == before
    assert {each.preparing for each in fleet.nodes.values()} == {""}
    assert all(client.failures == [] for client in clients)
    with pytest.raises(WeightFileError, match=r"nothing\.safetensors"):
        fleet.swap(files.folder / "nothing.safetensors")


def test_a_rollback_reads_nothing(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    fleet.swap(files.weights[2])
    fleet.swap(files.weights[4])
    receipt = fleet.rollback(by="eve", why="worse")
    assert receipt.kind == "rollback"
    assert files.number(receipt.weights_id) == 2
    assert all(each.resident for each in receipt.nodes.values())
    assert fleet.desired.hold.by == "eve"
    assert fleet.desired.weights.why == "worse"
    with pytest.raises(NothingToRollBack):
        fleet.rollback("ffff")
    fleet.release()
    assert fleet.desired.hold is None


def test_over_http(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    receipt = fleet.swap(files.weights[3])
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": INPUT.tolist()}]}

    def post(least: str) -> Any:
        headers = {"content-type": "application/json", "weightswap-min-revision": least}
        url = "http://127.0.0.1:8000/v2/models/numbered/infer"
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30)

    with post(str(receipt.revision)) as answer:
        said = json.load(answer)
        assert said["parameters"]["weights_id"] == receipt.weights_id
        assert said["outputs"][0]["data"] == [8 * 64 * 9.0] * 4
        assert int(answer.headers["weightswap-revision"]) == receipt.revision
    for least, status in (("1000000", 503), ("soon", 400)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(least)
        assert refused.value.code == status
        assert json.load(refused.value)["error"]


def test_whoever_is_killed(deployed: Deployed) -> None:
    """Replicas, keepers and the controller die by kill -9 while weights change; all ends on what is desired."""
    import ray

    fleet, files, _ = deployed
    dice = random.Random(7)
    refusals: list[str] = []
    with calling(deployed) as clients:
        for turn in range(6):
            nodes = list(fleet.nodes.values())
            node = dice.choice(nodes)
            victims = {"keeper": node.keeper, "replica": dice.choice(node.replicas or (0,))}
            victim = ("keeper", "replica", "controller")[turn % 3]
            killing = threading.Timer(dice.random() * 0.3, _kill, (ray, victim, victims.get(victim, 0)))
            killing.start()
            try:
                fleet.swap(files.weights[1 + turn % 5])
            except Exception as error:
                refusals.append(type(error).__name__)
            killing.join()
            time.sleep(1.0)
        assert fleet.wait(120)
    assert set(refusals) <= {"FleetRefused", "FleetUndecided"}  # a keeper that was killed, or the controller
    assert sum(len(client.answers) for client in clients) > 100
    assert len({each.weights_id for each in fleet.nodes.values()}) == 1


def _kill(ray: Any, victim: str, pid: int) -> None:
    if victim == "controller":
        ray.kill(ray.get_actor("controller:numbered", "weightswap"), no_restart=False)
    elif pid:
        os.kill(pid, signal.SIGKILL)


def test_two_operators_at_once(deployed: Deployed) -> None:
    """One of them after the other, or one is told why not."""
    fleet, files, _ = deployed
    errors: list[BaseException] = []

    def swap(number: int) -> None:
        try:
            fleet.swap(files.weights[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=swap, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert fleet.wait(30)
    assert files.number(fleet.desired.weights.weights_id) in {1, 2}


def test_a_hold_stops_promotions_alone(deployed: Deployed, tmp_path: Path) -> None:
    from weightswap_runtime.desired.place import DesiredPlace

    fleet, files, _ = deployed
    fleet.hold(by="ana")
    with pytest.raises(Held):
        DesiredPlace(files.folder).promote(files.weights[6])
    assert fleet.swap(files.weights[4]).late == {}
    fleet.release()


def test_a_lost_node(deployed: Deployed) -> None:
    """The others go on, and change; Serve starts its replicas elsewhere, with the weights that are desired."""
    fleet, files, made = deployed
    with calling(deployed) as clients:
        node = next(each for each in made.list_all_nodes() if not each.is_head())
        lost = {each.node for each in fleet.nodes.values() if node.node_id.startswith(each.node)}
        made.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + 60
        while True:
            try:
                receipt = fleet.swap(files.weights[2])
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.5)
    assert set(receipt.late) <= lost  # as long as Ray has not noticed
    assert fleet.wait(60)
    assert {each.weights_id for each in fleet.nodes.values()} == {receipt.weights_id}
    assert sum(len(client.answers) for client in clients) > 10
