"""A fleet on a real cluster of several nodes: swaps, refusals, clients that never go back, and whoever is killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.support.damage import damaged
from tests.support.packages import needs
from tests.support.servers import WebServer
from weightswap_exporter import publish
from weightswap_fleet import Deadlines, FleetRefused, FleetUndecided
from weightswap_runtime import DesiredError, DesiredStore, DigestMismatch, NothingToRollBack, WeightFileError
from weightswap_runtime.following.desired_store import known_weights
from weightswap_runtime.following.document_storage import LOCK

from .clusters import INPUT, Deployed, Numbered, calling, frozen, served, soon, until
from .deaths import VICTIMS, coordinator, pid_of, survive

pytestmark = [
    needs("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]


@pytest.fixture(autouse=True)
def _all_are_there(deployed: Deployed) -> None:
    """Wait for agents that a test before has killed: until their replicas come back they take no change."""
    assert deployed[0].wait(120)


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
    assert served(fleet) == {receipt.weights_id}
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
    fleet, files, _ = deployed
    before = fleet.desired
    with calling(deployed) as clients, pytest.raises(FleetRefused) as refused:
        fleet.swap(damaged(files.weights[5], files.folder / "damaged.safetensors"))
    assert len(refused.value.reasons) == len(fleet.nodes)
    assert all(isinstance(error, DigestMismatch) for error in refused.value.reasons.values())
    assert fleet.desired == before
    assert {each.preparing for each in fleet.nodes.values()} == {""}
    assert all(client.failures == [] for client in clients)
    with pytest.raises(WeightFileError):
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


def post(headers: dict[str, str]) -> Any:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": INPUT.tolist()}]}
    url = "http://127.0.0.1:8000/v2/models/numbered/infer"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    return urllib.request.urlopen(request, timeout=120)


def test_over_http(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    receipt = fleet.swap(files.weights[3])
    with post({"weightswap-min-revision": str(receipt.revision)}) as answer:
        said = json.load(answer)
        assert said["parameters"]["weights_id"] == receipt.weights_id
        assert said["outputs"][0]["data"] == [8 * 64 * 9.0] * 4
        assert int(answer.headers["weightswap-revision"]) == receipt.revision
    for least, status in (("1000000", 503), ("soon", 400)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post({"weightswap-min-revision": least})
        assert refused.value.code == status
        assert json.load(refused.value)["error"]


def test_metrics_are_the_fleet_s_whoever_is_asked(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    weights_id = fleet.swap(files.weights[1]).weights_id

    def answered(text: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "weightswap_server_requests_total" and sample.labels["weights_id"] == weights_id
        )

    before, last = answered(fleet.metrics()), -1.0
    while before != last:  # replicas report a second later what they answered, in tests before this one, too
        time.sleep(3.0)
        before, last = answered(fleet.metrics()), before
    with calling(deployed) as clients:
        time.sleep(2.0)
    wanted = before + sum(number == 1 for client in clients for _, number, _ in client.answers)
    until(lambda: answered(fleet.metrics()) >= wanted)
    shown = []
    for _ in range(10):  # a replica after another
        with urllib.request.urlopen("http://127.0.0.1:8000/metrics", timeout=120) as answer:
            shown.append(answered(answer.read().decode()))
    assert set(shown) == {answered(fleet.metrics())} == {wanted}


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deaths=st.lists(st.tuples(st.sampled_from(VICTIMS), st.floats(0.0, 0.3)), min_size=2, max_size=4))
@example(deaths=[("agent", 0.01), ("replica", 0.02), ("coordinator", 0.03), ("frozen agent", 0.01)])
@example(deaths=[("coordinator's process", 0.01)])
def test_whoever_is_killed_or_does_not_answer(deployed: Deployed, deaths: list[tuple[str, float]]) -> None:
    """By kill -9 or for a second, anywhere in a change."""
    survive(deployed, deaths)


@pytest.mark.parametrize("phase", ["prepare", "decide", "commit"])
@pytest.mark.parametrize("victim", ["coordinator", "replica"])
def test_who_is_killed_in_each_phase(deployed: Deployed, victim: str, phase: str) -> None:
    """By kill -9. What was decided is what all serve; of a coordinator clients notice nothing, and the next is there.

    What it does next is kept from happening: its nodes wait for a web server; it waits for the desired store's lock;
    its nodes do not run while the lock is let go.
    """
    fleet, files, _ = deployed
    soon(lambda: fleet.swap(files.weights[1]))
    before, nodes = fleet.desired, list(fleet.nodes.values())
    pid = pid_of(coordinator())
    with calling(deployed) as clients, WebServer() as web, ThreadPoolExecutor(1) as pool, ExitStack() as held:
        url = web.put("2.safetensors", files.weights[2].read_bytes())
        known_weights(url)
        asked, go = 2 * len(web.requests), threading.Event()  # by this process, and by the coordinator
        web.fault = lambda handler, _: phase == "prepare" and len(web.requests) > asked and not go.wait(120)
        lock = held.enter_context(locked(files.folder))
        change = pool.submit(fleet.swap, url)
        until(lambda: all(each.preparing for each in fleet.nodes.values()))
        if phase != "prepare":
            until(lambda: has_open(pid, files.folder / LOCK))
        if phase == "commit":
            for node in nodes:
                held.enter_context(frozen(node.agent))
            fcntl.flock(lock, fcntl.LOCK_UN)
            until(lambda: DesiredStore(files.folder).read().revision > before.revision)
        os.kill(pid if victim == "coordinator" else max(each.replicas for each in nodes)[0], signal.SIGKILL)
        if victim == "coordinator":
            assert isinstance(change.exception(120), FleetUndecided)
        held.close()
        go.set()
        if victim == "replica":
            change.result(120)
        is_decided = victim == "replica" or phase == "commit"
        assert (fleet.desired != before) == is_decided
        assert fleet.wait(120)
        assert set(map(files.number, served(fleet))) == {2 if is_decided else 1}
        receipt = soon(lambda: fleet.swap(files.weights[3]))
        assert receipt.late == {}
        until(lambda: all(client.has_seen(receipt.revision) for client in clients))
    if victim == "coordinator":
        assert [client.failures for client in clients] == [[], []]
        assert pid_of(coordinator()) != pid


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has opened a file."""
    with suppress(FileNotFoundError):  # one that is being closed
        return any(each.readlink() == path for each in Path(f"/proc/{pid}/fd").iterdir())
    return False


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A block in which nobody else writes what is desired."""
    lock = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def test_a_node_that_does_not_answer_refuses_and_its_replicas_answer_on(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    fleet.swap(files.weights[1])
    before = fleet.desired
    node = min(fleet.nodes.values(), key=lambda each: each.node)
    with calling(deployed) as clients, frozen(node.agent):
        with pytest.raises(FleetRefused) as refused:
            fleet.swap(files.weights[2], deadlines=Deadlines(prepare=5.0))
        assert {name: type(error) for name, error in refused.value.reasons.items()} == {node.node: TimeoutError}
        assert fleet.desired == before
        assert "TimeoutError" in fleet.nodes[node.node].error
        assert not fleet.wait(0.0)
    assert [client.failures for client in clients] == [[], []]
    assert soon(lambda: fleet.swap(files.weights[2])).late == {}
    assert fleet.wait(120)


def test_a_node_that_has_missed_a_commit_is_asked_nothing_until_it_has_caught_up(deployed: Deployed) -> None:
    """Also by those who ask for no revision."""
    fleet, files, _ = deployed
    soon(lambda: fleet.swap(files.weights[1]))
    deadlines = Deadlines(prepare=60.0, commit=0.5)
    with locked(files.folder) as lock, ThreadPoolExecutor(1) as pool:
        change = pool.submit(fleet.swap, files.weights[2], deadlines=deadlines)
        until(lambda: all(each.preparing for each in fleet.nodes.values()))
        until(lambda: has_open(pid_of(coordinator()), files.folder / LOCK))
        nodes = [each for each in fleet.nodes.values() if each.replicas]
        assert len(nodes) > 1
        with frozen(nodes[0].agent):
            fcntl.flock(lock, fcntl.LOCK_UN)
            receipt = change.result(120)
            assert set(receipt.late) == {nodes[0].node}
            until(lambda: asked_for_nothing(20) == {receipt.weights_id})
            assert asked_for_nothing(40) == {receipt.weights_id}
            assert all(Path(f"/proc/{pid}").exists() for pid in nodes[0].replicas)
    assert fleet.wait(120)
    until(lambda: not fleet.nodes[nodes[0].node].error)


def asked_for_nothing(times: int) -> set[str]:
    """Whose answers plain requests get, that ask for no revision."""
    found = set()
    for _ in range(times):
        with post({}) as answer:
            found.add(json.load(answer)["parameters"]["weights_id"])
    return found


def test_waiting_until_agents_have_begun_again(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    receipt = soon(lambda: fleet.swap(files.weights[1]))
    for node in fleet.nodes.values():
        os.kill(node.agent, signal.SIGKILL)
    assert fleet.wait(180)
    assert served(fleet) == {receipt.weights_id}


def test_replicas_that_do_not_answer_delay_no_commit(deployed: Deployed) -> None:
    """Which is their node's word; as if all their slots were full."""
    fleet, files, _ = deployed
    soon(lambda: fleet.swap(files.weights[1]))
    replicas = [pid for node in fleet.nodes.values() for pid in node.replicas]
    with ExitStack() as held:
        for pid in replicas:
            held.enter_context(frozen(pid))
        receipt = fleet.swap(files.weights[2])
        assert (receipt.late, set(receipt.nodes)) == ({}, set(fleet.nodes))
    with fleet.client() as client:
        answer = client.infer({"x": INPUT})
    assert (answer.weights_id, answer.revision) == (receipt.weights_id, receipt.revision)


def test_a_url_is_read_by_one_node(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    content = files.weights[7].read_bytes()
    with WebServer() as web:
        receipt = fleet.swap(web.put("7.safetensors", content))
        assert len(receipt.nodes) >= 2
        assert set(map(files.number, served(fleet))) == {7}
        assert len(content) <= web.sent < 3 * len(content)  # by the coordinator, and by a node
        desired_store = DesiredStore(files.folder)
        desired_store.set(files.weights[1], revision=desired_store.read().revision)
        assert fleet.wait(120)


def test_a_desired_store_that_is_away_is_waited_for(deployed: Deployed) -> None:
    """All serve on; nothing is changed, and what an operator does elsewhere is done when it is there again."""
    fleet, files, _ = deployed
    soon(lambda: fleet.swap(files.weights[3]))
    away = files.folder.with_name("away")
    with calling(deployed) as clients:
        files.folder.rename(away)
        try:
            with pytest.raises(DesiredError):
                fleet.rollback()
            until(lambda: not any(each.reachable for each in fleet.nodes.values()))
            assert {(each.reachable, files.number(each.weights_id)) for each in fleet.nodes.values()} == {(False, 3)}
            assert all(each.error for each in fleet.nodes.values())
        finally:
            away.rename(files.folder)
        desired_store = DesiredStore(files.folder)
        desired_store.set(files.weights[4], revision=desired_store.read().revision)
        assert fleet.wait(120)
    assert [client.failures for client in clients] == [[], []]
    assert set(map(files.number, served(fleet))) == {4}


def test_a_trainer_publishes(deployed: Deployed) -> None:
    fleet, files, _ = deployed
    model = Numbered()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(6)
    out = files.folder / "run"
    packed = publish(model, out, files.artifact, step=1, promote=fleet, by="run 7").wait(120)
    assert (packed.receipt.kind, packed.receipt.late, packed.refusal) == ("publish", {}, "")
    assert (fleet.desired.revision, fleet.desired.weights.by) == (packed.promoted, "run 7")
    assert set(map(files.number, served(fleet))) == {6}
    fleet.rollback(by="eve", why="worse")
    with torch.no_grad():
        model.first.weight.fill_(7)
    packed = publish(model, out, files.artifact, step=2, promote=fleet).wait(120)
    assert packed.refusal.startswith("NotPromoted: ")
    assert files.number(fleet.desired.weights.weights_id) != 6
    fleet.release()


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
    assert fleet.wait(120)
    assert files.number(fleet.desired.weights.weights_id) in {1, 2}


def test_a_deployment_that_calls_a_fleet_of_batches(deployed: Deployed, tmp_path: Path) -> None:
    """By its handle, with several calls at once, which may go as one."""
    from ray import serve

    from weightswap_fleet import connect, deployment

    _, files, _ = deployed

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Twice:
        def __init__(self, fleet: Any) -> None:
            self._fleet = fleet

        async def __call__(self, inputs: Any) -> list[Any]:
            return [await each for each in [self._fleet.infer.remote({"x": inputs}) for _ in range(2)]]

    options = {"follow": tmp_path, "name": "inner", "batch": 8, "ray_actor_options": {"num_cpus": 0}}
    handle = serve.run(
        Twice.bind(deployment(files.artifact, files.weights[1], **options)), name="outer", route_prefix=None
    )
    inner = connect("inner")
    for number in (1, 2):
        receipt = inner.swap(files.weights[number])
        answers = [handle.remote(INPUT) for _ in range(8)]
        for first, second in [each.result() for each in answers]:
            assert first.weights_id == second.weights_id == receipt.weights_id
            assert files.is_whole(first.outputs["output"], first.weights_id)
    inner.remove()


def test_more_requests_than_may_wait_are_refused_at_once(deployed: Deployed, tmp_path: Path) -> None:
    from ray import serve
    from ray.serve.exceptions import BackPressureError

    from weightswap_fleet import connect, deployment

    _, files, made = deployed
    application = deployment(
        files.artifact,
        files.weights[1],
        follow=tmp_path,
        name="busy",
        max_ongoing_requests=1,
        max_queued_requests=2,
        ray_actor_options={"num_cpus": 0},
    )
    serve.run(application, name="busy", route_prefix="/busy")
    busy = Deployed(connect("busy"), files, made)
    (replica,) = (pid for node in busy.fleet.nodes.values() for pid in node.replicas)
    with busy.fleet.client() as client, ThreadPoolExecutor(8) as pool:
        client.infer({"x": INPUT})
        with frozen(replica):
            sent = [pool.submit(client.infer, {"x": INPUT}) for _ in range(8)]
            until(lambda: sum(each.done() for each in sent) >= 4)
            assert {type(each.exception()) for each in sent if each.done()} == {BackPressureError}
        answers = [each.result(120) for each in sent if not isinstance(each.exception(120), BackPressureError)]
    assert 1 <= len(answers) <= 4
    assert all(files.is_whole(each.outputs["output"], each.weights_id) for each in answers)
    busy.fleet.remove()


def test_replicas_that_join_under_load_serve_what_is_desired(deployed: Deployed, tmp_path: Path) -> None:
    from ray import serve

    from weightswap_fleet import connect, deployment

    _, files, made = deployed
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 0.5, "upscale_delay_s": 0.5}
    application = deployment(
        files.artifact,
        files.weights[0],
        follow=tmp_path,
        name="scaled",
        autoscaling_config={**scaling, "metrics_interval_s": 0.2, "look_back_period_s": 1.0},
        ray_actor_options={"num_cpus": 0},
        interval=0.5,
    )
    serve.run(application, name="scaled", route_prefix="/scaled")
    scaled = Deployed(connect("scaled"), files, made)
    with calling(scaled, 6) as clients:
        scaled.fleet.swap(files.weights[1])
        until(lambda: sum(len(each.replicas) for each in scaled.fleet.nodes.values()) == 2, timeout=90)
        scaled.fleet.swap(files.weights[2])
    assert sum(len(each.replicas) for each in scaled.fleet.nodes.values()) == 2
    assert set(map(files.number, served(scaled.fleet))) == {2}
    assert [client.failures for client in clients] == [[]] * 6
    scaled.fleet.remove()
