"""A node's keeper, and the deployment that it is of: what it lets in, when it begins again, and when it ends."""

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

from weightswap_fleet.documents import Spec
from weightswap_fleet.errors import FleetError, FleetRefused, FleetUndecided, StaleReplica, UnknownFleet
from weightswap_fleet.node.keeper import NodeKeeper
from weightswap_runtime import DigestMismatch
from weightswap_runtime.errors import NonFiniteWeights, NoWeights, StagingBusy, Unsupported
from weightswap_server.signed_weights import SignatureRefused, sign

from .nodes import Fleet


def test_nan_is_refused_unless_the_deployment_lets_it_in(fleet: Fleet, tmp_path: Path) -> None:
    """In orders, in the place, and in trials."""
    values = fleet.tiny.values(1)
    values["weight"][0, 0] = float("nan")
    path = fleet.tiny.write(tmp_path / "nan.safetensors", values)
    with pytest.raises(FleetRefused) as refused:
        fleet.swap(path)
    assert {type(error) for error in refused.value.reasons.values()} == {NonFiniteWeights}
    fleet.place.set(path, revision=1)
    keeper = fleet.keepers["n0"]
    keeper.reconcile()
    assert "weight: 1 NaN" in keeper.status().error
    assert set(fleet.served().values()) == {fleet.weights_id(0)}
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, allow_nonfinite=("weight",)))
    fleet.place.set(fleet.file(0), revision=2)
    fleet.place.set(path, revision=3)
    keeper.reconcile()
    assert keeper.status().revision == 4


def test_the_latest_deployment_counts(fleet: Fleet, tmp_path: Path) -> None:
    """Earlier keepers require its key, too; other places have keepers of their own."""
    keeper = fleet.keepers["n0"]
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    later = fleet.spec._replace(since=1.0, require_signature=(str(key),))
    with pytest.raises(Unsupported, match=r"key\.pem: not a public key"):
        keeper.attach(os.getpid(), later)
    assert keeper.spec == fleet.spec
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    keeper.attach(os.getpid(), later)
    with pytest.raises(SignatureRefused, match="not signed"):
        keeper.prepare(fleet.order(1))
    assert (keeper.status().preparing, keeper.model.weights_id) == ("", fleet.weights_id(0))
    keeper.attach(os.getpid(), fleet.spec)
    assert keeper.spec == later
    assert fleet.spec._replace(place="elsewhere").key != fleet.spec.key == later.key


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
    keeper = fleet.keepers["n0"]
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=spec.require_signature))
    with pytest.raises(SignatureRefused, match="not signed"):
        keeper.prepare(fleet.order(1))
    for number, name in ((2, "old"), (3, "new")):
        signature = sign(fleet.weights_id(number), str(tmp_path / f"{name}.private.pem"))
        path = fleet.file(number)
        path.with_name(f"{path.name}.sig").write_bytes(signature)
        keeper.prepare(fleet.order(number))
        keeper.discard(f"order {number}")


def _spec(fleet: Fleet, **options: Any) -> Spec:
    """Return the spec of a deployment with these options."""
    deploying = pytest.importorskip("weightswap_fleet.deploying")
    application = deploying.deployment(fleet.tiny.path, follow=fleet.where, **options)
    spec: Spec = application._bound_deployment._replica_config.init_args[0]
    return spec


def test_what_was_refused_is_tried_again_by_a_deployment_that_lets_it_in(fleet: Fleet, tmp_path: Path) -> None:
    keeper = fleet.keepers["n0"]
    key = tmp_path / "key.pem"
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))
    fleet.place.set(fleet.file(1), revision=1)
    for _ in range(2):
        keeper.reconcile()
        assert "not signed" in keeper.status().error
    keeper.wakeup.clear()
    keeper.attach(os.getpid(), fleet.spec._replace(since=2.0))
    assert keeper.wakeup.is_set()
    keeper.reconcile()
    assert (keeper.model.weights_id, keeper.status().error) == (fleet.weights_id(1), "")


def test_what_was_refused_is_tried_again_when_it_is_signed_or_the_key_is_replaced(fleet: Fleet, tmp_path: Path) -> None:
    keeper, key, keys = fleet.keepers["n0"], tmp_path / "key.pem", {}
    for name in ("old", "new"):
        private = ec.generate_private_key(ec.SECP256R1())
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"{name}.private.pem").write_bytes(pem)
        keys[name] = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key.write_bytes(keys["old"])
    keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))

    def sign_with(name: str, number: int) -> None:
        signature = sign(fleet.weights_id(number), str(tmp_path / f"{name}.private.pem"))
        fleet.file(number).with_name(f"{fleet.file(number).name}.sig").write_bytes(signature)

    fleet.place.set(fleet.file(1), revision=1)
    keeper.reconcile()
    assert "not signed" in keeper.status().error
    sign_with("new", 1)
    keeper.reconcile()
    assert "is not a signature" in keeper.status().error
    sign_with("old", 1)
    keeper.reconcile()
    assert (keeper.model.weights_id, keeper.status().error) == (fleet.weights_id(1), "")
    sign_with("new", 2)
    fleet.place.set(fleet.file(2), revision=2)
    keeper.reconcile()
    assert "is not a signature" in keeper.status().error
    key.write_bytes(keys["new"])
    keeper.reconcile()
    assert (keeper.model.weights_id, keeper.status().error) == (fleet.weights_id(2), "")


def test_a_keeper_that_begins_again_nothing_until_it_knows_the_deployment(fleet: Fleet, tmp_path: Path) -> None:
    """Ray restarts it with its first arguments; its replicas are of a later deployment, which requires a key."""
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    later = fleet.spec._replace(since=1.0, require_signature=(str(key),))
    fleet.keepers["n0"].attach(os.getpid(), later)
    fleet.place.set(fleet.file(1), revision=1)
    fleet.start("n0", deployed=False)
    keeper = fleet.keepers["n0"]
    keeper.reconcile()
    with pytest.raises(StagingBusy, match="was restarted, and no replica has sent it the deployment"):
        keeper.prepare(fleet.order(2))
    assert keeper.model.weights_id == fleet.weights_id(0)
    keeper.report(os.getpid(), "", later)
    assert keeper.spec == later
    keeper.reconcile()
    assert "not signed" in keeper.status().error
    assert keeper.model.weights_id == fleet.weights_id(0)


def test_a_keeper_that_begins_again_alone_waits_for_the_deployment_too(fleet: Fleet, tmp_path: Path) -> None:
    """No replica has its memory any more, and the place desires weights that the latest deployment refuses."""
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    key = tmp_path / "key.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with closing(NodeKeeper(fleet.spec, "n9", again=True)) as keeper:
        assert keeper.model.weights_id is None
        with pytest.raises(NoWeights, match="not signed"):
            keeper.attach(os.getpid(), fleet.spec._replace(since=1.0, require_signature=(str(key),)))
        assert keeper.model.weights_id is None
    with closing(NodeKeeper(fleet.spec, "n8", again=True)) as keeper:
        keeper.attach(os.getpid(), fleet.spec)
        assert keeper.model.weights_id == fleet.weights_id(0)


@pytest.mark.parametrize("told", [False, True])
def test_a_keeper_that_nobody_has_told_ends_soon(told: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses all changes until then. One with a deployment waits for replicas to come back."""
    actors = pytest.importorskip("weightswap_fleet.coordinator.controller")
    ended = threading.Event()
    monkeypatch.setattr(actors, "_LOOK", 0.01)
    monkeypatch.setattr(actors.ray, "get_runtime_context", MagicMock())
    monkeypatch.setattr(actors.ray, "kill", lambda _: ended.set())
    with closing(NodeKeeper(fleet.spec, "n9", again=True)) as keeper:
        if told:
            keeper.report(1, "", fleet.spec)
        threading.Thread(target=actors._end_when_idle, args=(keeper,), daemon=True).start()
        if told:
            assert not ended.wait(0.2)
            monkeypatch.setattr(actors, "_IDLE", 0.0)
        assert ended.wait(20)


def test_without_weights_nobody_gets_a_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, 1, monkeypatch)
    with pytest.raises(NoWeights, match="no weights are desired yet"):
        fleet.keepers["n0"].attach(1, fleet.spec)
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
