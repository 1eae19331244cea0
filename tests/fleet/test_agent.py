"""A node's agent, and the deployment that it is of: what it lets in, when it begins again, and when it ends."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support.keys import write_keys
from weightswap_fleet import FleetError, FleetRefused, FleetUndecided, StaleReplica, UnknownFleet
from weightswap_fleet.documents import DeploymentSpec
from weightswap_runtime import (
    ArtifactError,
    DigestMismatch,
    NonFiniteWeights,
    NoWeights,
    StageCancelled,
    StagingBusy,
    Unsupported,
)
from weightswap_server.signed_weights import SignatureRefused, sign

from .nodes import Fleet, FleetTrial, NodeAgent, kinds


def test_nan_is_refused_unless_the_deployment_lets_it_in(fleet: Fleet, agent: NodeAgent, tmp_path: Path) -> None:
    """In changes, in the desired store, and in trials."""
    values = fleet.tiny.values(1)
    values["weight"][0, 0] = float("nan")
    path = fleet.tiny.write(tmp_path / "nan.safetensors", values)
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(path)
    assert set(kinds(refused).values()) == {NonFiniteWeights}
    fleet.desired_store.set(path, revision=1)
    agent.reconcile()
    assert "weight: 1 NaN" in agent.status().error
    assert fleet.all_serve(0)
    fleet.attach(since=1.0, allow_nonfinite=("weight",))
    fleet.desired_store.set(fleet.file(0), revision=2)
    fleet.desired_store.set(path, revision=3)
    agent.reconcile()
    assert agent.status().revision == 4


def requiring(fleet: Fleet, *keys: Path) -> DeploymentSpec:
    """Return a later deployment, which requires a signature by one of the keys."""
    return fleet.spec._replace(since=1.0, require_signature=tuple(map(str, keys)))


def sign_by(key: Path, fleet: Fleet, number: int) -> None:
    path = fleet.file(number)
    path.with_name(f"{path.name}.sig").write_bytes(sign(fleet.weights_id(number), str(key)))


def test_the_latest_deployment_counts(fleet: Fleet, agent: NodeAgent, tmp_path: Path) -> None:
    """Earlier agents require its key, too; other desired stores have agents of their own."""
    later = requiring(fleet, tmp_path / "old.pem")
    with pytest.raises(Unsupported, match=r"old\.pem: not a public key"):
        agent.attach(os.getpid(), later)
    assert agent.spec == fleet.spec
    write_keys(tmp_path, "old")
    agent.attach(os.getpid(), later)
    with pytest.raises(SignatureRefused):
        agent.prepare(fleet.request(1))
    assert (agent.status().preparing, agent.model.weights_id) == ("", fleet.weights_id(0))
    agent.attach(os.getpid(), fleet.spec)
    assert agent.spec == later
    assert fleet.spec._replace(desired_store="elsewhere").key != fleet.spec.key == later.key


def test_what_an_earlier_deployment_has_verified_a_stricter_one_does_not_serve(fleet: Fleet, tmp_path: Path) -> None:
    """A promotion reads nothing again, so weights on trial would be served without the signature that is required."""
    write_keys(tmp_path, "ours")
    FleetTrial(fleet.trial(1, share=0.5), fleet).begin(5.0)
    for node in fleet.agents:
        fleet.attach(node, since=1.0, interval=0.5)  # refuses what the one before refuses
    assert fleet.trying() == {fleet.weights_id(1)}
    for node in fleet.agents:
        fleet.attach(node, since=2.0, require_signature=(str(tmp_path / "ours.pem"),))
    assert fleet.trying() == {""}
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(1)
    assert set(kinds(refused).values()) == {SignatureRefused}
    assert fleet.all_serve(0)


def test_what_is_on_trial_when_a_key_is_replaced_is_not_promoted(fleet: Fleet, tmp_path: Path) -> None:
    write_keys(tmp_path, "old", "new")
    key = tmp_path / "key.pem"
    key.write_bytes((tmp_path / "old.pem").read_bytes())
    for node in fleet.agents:
        fleet.attach(node, since=1.0, require_signature=(str(key),))
    sign_by(tmp_path / "old.key", fleet, 1)
    FleetTrial(fleet.trial(1, share=0.5), fleet).begin(5.0)
    key.write_bytes((tmp_path / "new.pem").read_bytes())
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(1)
    assert set(kinds(refused).values()) == {SignatureRefused}
    assert fleet.all_serve(0)
    assert fleet.desired_store.read().revision == 1
    sign_by(tmp_path / "new.key", fleet, 1)
    fleet.swap(1)
    assert fleet.all_serve(1)


def test_any_of_several_keys_will_do(fleet: Fleet, agent: NodeAgent, tmp_path: Path) -> None:
    """As for a server: while keys are rotated."""
    write_keys(tmp_path, "old", "new")
    publics = [tmp_path / "old.pem", tmp_path / "new.pem"]
    spec = _spec(fleet, require_signature=publics)
    assert spec.require_signature == tuple(map(str, publics))
    agent.attach(os.getpid(), requiring(fleet, *publics))
    with pytest.raises(SignatureRefused):
        agent.prepare(fleet.request(1))
    for number, name in ((2, "old"), (3, "new")):
        sign_by(tmp_path / f"{name}.key", fleet, number)
        agent.prepare(fleet.request(number))
        agent.discard(f"change {number}")


def _spec(fleet: Fleet, **options: Any) -> DeploymentSpec:
    """Return the spec of a deployment with these options."""
    deploying = pytest.importorskip("weightswap_fleet.deploying")
    application = deploying.deployment(fleet.tiny.path, follow=fleet.where, **options)
    spec: DeploymentSpec = application._bound_deployment._replica_config.init_args[0]
    return spec


def test_what_was_refused_is_tried_again_by_a_deployment_that_lets_it_in(fleet: Fleet, tmp_path: Path) -> None:
    agent = fleet.agents["n0"]
    write_keys(tmp_path, "old")
    agent.attach(os.getpid(), requiring(fleet, tmp_path / "old.pem"))
    fleet.desired_store.set(fleet.file(1), revision=1)
    for _ in range(2):
        agent.reconcile()
        assert "not signed" in agent.status().error
    agent.wakeup.clear()
    fleet.attach(since=2.0)
    assert agent.wakeup.is_set()
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().error) == (fleet.weights_id(1), "")


def test_what_was_refused_is_tried_again_when_it_is_signed_or_the_key_is_replaced(fleet: Fleet, tmp_path: Path) -> None:
    agent = fleet.agents["n0"]
    key = tmp_path / "key.pem"
    write_keys(tmp_path, "old", "new")
    key.write_bytes((tmp_path / "old.pem").read_bytes())
    agent.attach(os.getpid(), requiring(fleet, key))

    def reconciled() -> str:
        agent.reconcile()
        return agent.status().error

    fleet.desired_store.set(fleet.file(1), revision=1)
    assert "not signed" in reconciled()
    sign_by(tmp_path / "new.key", fleet, 1)
    assert "is not a signature" in reconciled()
    sign_by(tmp_path / "old.key", fleet, 1)
    assert (reconciled(), agent.model.weights_id) == ("", fleet.weights_id(1))
    sign_by(tmp_path / "new.key", fleet, 2)
    fleet.desired_store.set(fleet.file(2), revision=2)
    assert "is not a signature" in reconciled()
    key.write_bytes((tmp_path / "new.pem").read_bytes())
    assert (reconciled(), agent.model.weights_id) == ("", fleet.weights_id(2))


@pytest.mark.parametrize("kind", ["change", "rollback", "trial"])
def test_what_was_given_up_waits_no_longer_for_what_is_staged(fleet: Fleet, agent: NodeAgent, kind: str) -> None:
    """Waiting calls would use up the agent's concurrency, and then keep a rollback out."""
    request = fleet.trial(1, share=0.5) if kind == "trial" else fleet.request(1, is_rollback=kind == "rollback")
    with ThreadPoolExecutor(1) as pool, agent._changes.turn():
        waiting = pool.submit(agent.prepare_trial if kind == "trial" else agent.prepare, request)
        time.sleep(0.1)
        assert not waiting.done()
        agent.discard(request.id)
        assert isinstance(waiting.exception(120), StageCancelled)


def test_an_agent_that_begins_again_nothing_until_it_knows_the_deployment(fleet: Fleet, tmp_path: Path) -> None:
    """Ray restarts it with its first arguments; its replicas are of a later deployment, which requires a key."""
    write_keys(tmp_path, "old")
    later = requiring(fleet, tmp_path / "old.pem")
    fleet.agents["n0"].attach(os.getpid(), later)
    fleet.desired_store.set(fleet.file(1), revision=1)
    fleet.start("n0", deployed=False)
    agent = fleet.agents["n0"]
    agent.reconcile()
    with pytest.raises(StagingBusy):
        agent.prepare(fleet.request(2))
    assert agent.model.weights_id == fleet.weights_id(0)
    agent.report(os.getpid(), "", later)
    assert agent.spec == later
    agent.reconcile()
    assert "not signed" in agent.status().error
    assert agent.model.weights_id == fleet.weights_id(0)


def test_no_agent_goes_back_to_an_older_document(fleet: Fleet) -> None:
    """Not one that begins again, and not one that was told of a commit before it has read the newer document."""
    document = fleet.where / "desired.json"
    older = document.read_bytes()
    fleet.swap(1)
    document.write_bytes(older)
    del fleet.agents["n0"]
    fleet.start("n0")
    fleet.reconcile()
    for agent in fleet.agents.values():
        assert (agent.status().revision, agent.model.weights_id) == (2, fleet.weights_id(1))
        assert "is at revision 1, but was at 2" in agent.status().error
    for number, revision in ((0, 1), (2, 2)):
        fleet.desired_store.set(fleet.file(number), revision=revision)
    fleet.reconcile()
    assert fleet.all_serve(2)
    assert {agent.status().error for agent in fleet.agents.values()} == {""}


def test_an_agent_that_begins_again_alone_waits_for_the_deployment_too(fleet: Fleet, tmp_path: Path) -> None:
    """No replica has its memory any more, and the desired store wants weights that the latest deployment refuses."""
    write_keys(tmp_path, "old")
    with closing(NodeAgent(fleet.spec, "n9", again=True)) as agent:
        assert agent.model.weights_id is None
        with pytest.raises(NoWeights):
            agent.attach(os.getpid(), requiring(fleet, tmp_path / "old.pem"))
        assert agent.model.weights_id is None
    with closing(NodeAgent(fleet.spec, "n8", again=True)) as agent:
        agent.attach(os.getpid(), fleet.spec)
        assert agent.model.weights_id == fleet.weights_id(0)


def test_a_node_serves_no_other_artifact_that_has_come_to_the_path(fleet: Fleet) -> None:
    """One that starts later, or again, would answer otherwise than the others, with the same weights."""
    fleet.tiny.become_another()
    for node in ("n0", "n9"):
        with pytest.raises(ArtifactError, match=r"has the graph \w{12} now, but fleet was deployed with \w{12}"):
            NodeAgent(fleet.spec, node)
    assert fleet.all_serve(0)


@pytest.mark.parametrize("told", [False, True])
def test_an_agent_that_nobody_has_told_ends_soon(told: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses all changes until then. One with a deployment waits for replicas to come back."""
    actors = pytest.importorskip("weightswap_fleet.coordinator.actors")
    ended = threading.Event()
    monkeypatch.setattr(actors, "_POLL", 0.01)
    monkeypatch.setattr(actors.ray, "get_runtime_context", MagicMock())
    monkeypatch.setattr(actors.ray, "kill", lambda _: ended.set())
    with closing(NodeAgent(fleet.spec, "n9", again=True)) as agent:
        if told:
            agent.report(1, "", fleet.spec)
        threading.Thread(target=actors._end_when_idle, args=(agent,), daemon=True).start()
        if told:
            assert not ended.wait(0.2)
            monkeypatch.setattr(actors, "_IDLE", 0.0)
        assert ended.wait(120)


def test_without_weights_nobody_gets_a_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, 1, monkeypatch)
    with pytest.raises(NoWeights):
        fleet.agents["n0"].attach(1, fleet.spec)
    fleet.close()


@pytest.mark.parametrize(
    "error",
    [
        FleetError("a"),
        FleetRefused("v1", {"n0": DigestMismatch("w", ["a differs"], "Copy it again"), "n1": TimeoutError("late")}),
        FleetUndecided("b"),
        StaleReplica("c"),
        UnknownFleet("d"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_whole(error: FleetError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert str(getattr(again, "reasons", "")) == str(getattr(error, "reasons", ""))
