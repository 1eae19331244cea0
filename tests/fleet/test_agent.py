"""A node's agent, and the deployment that it is of: what it lets in, when it begins again, and when it ends."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from weightswap_fleet.documents import DeploymentSpec
from weightswap_fleet.errors import FleetError, FleetRefused, FleetUndecided, StaleReplica, UnknownFleet
from weightswap_fleet.node.agent import NodeAgent
from weightswap_runtime import DigestMismatch
from weightswap_runtime.errors import NonFiniteWeights, NoWeights, StagingBusy, Unsupported
from weightswap_server.signed_weights import SignatureRefused, sign

from .nodes import Fleet


def test_nan_is_refused_unless_the_deployment_lets_it_in(fleet: Fleet, tmp_path: Path) -> None:
    """In changes, in the desired store, and in trials."""
    values = fleet.tiny.values(1)
    values["weight"][0, 0] = float("nan")
    path = fleet.tiny.write(tmp_path / "nan.safetensors", values)
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(path)
    assert {type(error) for error in refused.value.reasons.values()} == {NonFiniteWeights}
    fleet.desired_store.set(path, revision=1)
    agent = fleet.agents["n0"]
    agent.reconcile()
    assert "weight: 1 NaN" in agent.status().error
    assert set(fleet.served().values()) == {fleet.weights_id(0)}
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0, allow_nonfinite=("weight",)))
    fleet.desired_store.set(fleet.file(0), revision=2)
    fleet.desired_store.set(path, revision=3)
    agent.reconcile()
    assert agent.status().revision == 4


def test_the_latest_deployment_counts(fleet: Fleet, tmp_path: Path) -> None:
    """Earlier agents require its key, too; other desired stores have agents of their own."""
    agent = fleet.agents["n0"]
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    later = fleet.spec._replace(since=1.0, require_signature=(str(key),))
    with pytest.raises(Unsupported, match=r"key\.pem: not a public key"):
        agent.attach(os.getpid(), later)
    assert agent.spec == fleet.spec
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    agent.attach(os.getpid(), later)
    with pytest.raises(SignatureRefused, match="not signed"):
        agent.prepare(fleet.request(1))
    assert (agent.status().preparing, agent.model.weights_id) == ("", fleet.weights_id(0))
    agent.attach(os.getpid(), fleet.spec)
    assert agent.spec == later
    assert fleet.spec._replace(desired_store="elsewhere").key != fleet.spec.key == later.key


def test_any_of_several_keys_will_do(fleet: Fleet, tmp_path: Path) -> None:
    """As for a server: while keys are rotated."""
    publics = []
    for name in ("old", "new"):
        private = ec.generate_private_key(ec.SECP256R1())
        key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"{name}.private.pem").write_bytes(key)
        public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        publics.append(tmp_path / f"{name}.pem")
        publics[-1].write_bytes(public)
    spec = _spec(fleet, require_signature=publics)
    assert spec.require_signature == tuple(map(str, publics))
    agent = fleet.agents["n0"]
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=spec.require_signature))
    with pytest.raises(SignatureRefused, match="not signed"):
        agent.prepare(fleet.request(1))
    for number, name in ((2, "old"), (3, "new")):
        signature = sign(fleet.weights_id(number), str(tmp_path / f"{name}.private.pem"))
        path = fleet.file(number)
        path.with_name(f"{path.name}.sig").write_bytes(signature)
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
    key = tmp_path / "key.pem"
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))
    fleet.desired_store.set(fleet.file(1), revision=1)
    for _ in range(2):
        agent.reconcile()
        assert "not signed" in agent.status().error
    agent.wakeup.clear()
    agent.attach(os.getpid(), fleet.spec._replace(since=2.0))
    assert agent.wakeup.is_set()
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().error) == (fleet.weights_id(1), "")


def test_what_was_refused_is_tried_again_when_it_is_signed_or_the_key_is_replaced(fleet: Fleet, tmp_path: Path) -> None:
    agent, key, keys = fleet.agents["n0"], tmp_path / "key.pem", {}
    for name in ("old", "new"):
        private = ec.generate_private_key(ec.SECP256R1())
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"{name}.private.pem").write_bytes(pem)
        keys[name] = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key.write_bytes(keys["old"])
    agent.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))

    def sign_with(name: str, number: int) -> None:
        signature = sign(fleet.weights_id(number), str(tmp_path / f"{name}.private.pem"))
        fleet.file(number).with_name(f"{fleet.file(number).name}.sig").write_bytes(signature)

    fleet.desired_store.set(fleet.file(1), revision=1)
    agent.reconcile()
    assert "not signed" in agent.status().error
    sign_with("new", 1)
    agent.reconcile()
    assert "is not a signature" in agent.status().error
    sign_with("old", 1)
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().error) == (fleet.weights_id(1), "")
    sign_with("new", 2)
    fleet.desired_store.set(fleet.file(2), revision=2)
    agent.reconcile()
    assert "is not a signature" in agent.status().error
    key.write_bytes(keys["new"])
    agent.reconcile()
    assert (agent.model.weights_id, agent.status().error) == (fleet.weights_id(2), "")


def test_an_agent_that_begins_again_nothing_until_it_knows_the_deployment(fleet: Fleet, tmp_path: Path) -> None:
    """Ray restarts it with its first arguments; its replicas are of a later deployment, which requires a key."""
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    later = fleet.spec._replace(since=1.0, require_signature=(str(key),))
    fleet.agents["n0"].attach(os.getpid(), later)
    fleet.desired_store.set(fleet.file(1), revision=1)
    fleet.start("n0", deployed=False)
    agent = fleet.agents["n0"]
    agent.reconcile()
    with pytest.raises(StagingBusy, match="was restarted, and no replica has sent it the deployment"):
        agent.prepare(fleet.request(2))
    assert agent.model.weights_id == fleet.weights_id(0)
    agent.report(os.getpid(), "", later)
    assert agent.spec == later
    agent.reconcile()
    assert "not signed" in agent.status().error
    assert agent.model.weights_id == fleet.weights_id(0)


def test_an_agent_that_begins_again_alone_waits_for_the_deployment_too(fleet: Fleet, tmp_path: Path) -> None:
    """No replica has its memory any more, and the desired store wants weights that the latest deployment refuses."""
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with closing(NodeAgent(fleet.spec, "n9", again=True)) as agent:
        assert agent.model.weights_id is None
        with pytest.raises(NoWeights, match="not signed"):
            agent.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))
        assert agent.model.weights_id is None
    with closing(NodeAgent(fleet.spec, "n8", again=True)) as agent:
        agent.attach(os.getpid(), fleet.spec)
        assert agent.model.weights_id == fleet.weights_id(0)


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
        assert ended.wait(20)


def test_without_weights_nobody_gets_a_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, 1, monkeypatch)
    with pytest.raises(NoWeights, match="no weights are desired yet"):
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
