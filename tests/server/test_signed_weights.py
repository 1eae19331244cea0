"""A server that requires signatures serves nothing else, whichever way weights come."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.server.test_stopping import serve, until_ready
from tests.support.administered import administered, change, operated
from tests.support.commands import run
from tests.support.damage import damaged
from tests.support.keys import write_keys
from tests.support.services import weights_id_of
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from tests.support.watched import SOON, eventually
from weightswap_runtime import (
    DesiredStore,
    DigestMismatch,
    Follower,
    MissingExtra,
    Model,
    SwapError,
    UnexpectedWeights,
    Unsupported,
    Watcher,
    load,
)
from weightswap_server.signed_weights import SignatureRefused, requires

pytestmark = pytest.mark.skipif(find_spec("model_signing") is None, reason="model_signing is not installed")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three pairs of keys."""
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder, "ours", "theirs", "strangers")
    return folder


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights, keys: Path) -> Model:
    """A model that takes what our key has signed, and has the weights of seed 1."""
    return load(tiny.path, signed(weight_file(1), keys), admit=requires(str(keys / "ours.pem")))


def signed(path: Path, keys: Path, by: str = "ours") -> Path:
    run("sign", path, "--key", keys / f"{by}.key")
    return path


@pytest.mark.usefixtures("_places")
def test_only_what_was_signed_is_served(
    model: Model, tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, keys: Path, tmp_path: Path
) -> None:
    with pytest.raises(SignatureRefused):
        load(tiny.path, weight_file(4), admit=requires(str(keys / "ours.pem")))
    second = weight_file(2)
    with pytest.raises(SignatureRefused):
        model.swap(second)
    with pytest.raises(SignatureRefused):
        model.swap(signed(second, keys, by="theirs"))
    (tmp_path / f"{second.name}.sig").write_bytes((tmp_path / "v1.safetensors.sig").read_bytes())
    with pytest.raises(SignatureRefused):
        model.swap(second)
    for junk in (b"", b"{}", b"\xff", b'{"dsseEnvelope": {"payload": "e30="}}', b"[" * 10_000):
        Path(f"{second}.sig").write_bytes(junk)
        with pytest.raises(SignatureRefused):
            model.swap(second)
    assert serves(model, 1)
    model.swap(signed(second, keys))
    assert serves(model, 2)
    third = delta(2, 3)
    with pytest.raises(SignatureRefused):
        model.swap(third)
    model.swap(signed(third, keys))
    assert serves(model, 3)


@pytest.mark.usefixtures("_places")
def test_what_leads_to_a_delta_is_held_to_its_weights_id(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, keys: Path, residency: Any
) -> None:
    """The base of a delta needs no signature, as it is never served; the result must have the signed id."""
    model = load(tiny.path, signed(weight_file(1), keys), admit=requires(str(keys / "ours.pem")), residency=residency)
    last, base = delta(2, 3), weight_file(2)
    onto = [(base, weights_id_of(base))]
    with pytest.raises(SignatureRefused):
        model.stage(last, onto=onto)
    signed(last, keys)
    with pytest.raises(UnexpectedWeights):
        model.stage(last, onto=[(weight_file(4), weights_id_of(base))])
    damaged(base)
    with pytest.raises(DigestMismatch):
        model.stage(last, onto=onto)
    assert serves(model, 1)
    weight_file(2)
    model.stage(last, onto=onto).commit()
    assert serves(model, 3)


@pytest.mark.usefixtures("_places")
def test_what_was_staged_before_a_key_was_replaced_is_held_to_the_new_one(
    tiny: TinyArtifact, weight_file: WriteWeights, keys: Path, residency: Any, tmp_path: Path
) -> None:
    required = tmp_path / "required.pem"
    shutil.copy(keys / "ours.pem", required)
    model = load(tiny.path, signed(weight_file(1), keys), admit=requires(str(required)), residency=residency)
    staged = model.stage(signed(weight_file(2), keys))
    shutil.copy(keys / "theirs.pem", required)
    with pytest.raises(SignatureRefused, match="not a signature"):
        staged.commit()
    assert serves(model, 1)
    signed(tmp_path / "v2.safetensors", keys, by="theirs")
    staged.commit()
    assert serves(model, 2)


def test_what_an_operator_has_staged_before_a_key_was_replaced_does_not_become_desired(
    tiny: TinyArtifact, weight_file: WriteWeights, keys: Path, tmp_path: Path, desired_store: DesiredStore
) -> None:
    required = tmp_path / "required.pem"
    shutil.copy(keys / "ours.pem", required)
    model = load(tiny.path, signed(weight_file(1), keys), admit=requires(str(required)))
    with operated(model, tiny, tmp_path) as operator, model.follow(desired_store.where, SOON):
        assert operator.change("stage", signed(weight_file(2), keys)).status == 200
        shutil.copy(keys / "theirs.pem", required)
        refused = operator.change("commit")
        assert refused.status != 200
        assert "not a signature" in str(refused.body)
        assert serves(model, 1)
    assert desired_store.read().revision == 1


def test_any_of_several_keys_will_do(tiny: TinyArtifact, weight_file: WriteWeights, keys: Path, tmp_path: Path) -> None:
    """As while keys are rotated. A file with two keys is refused, as the second would be ignored."""
    ours, theirs = keys / "ours.pem", keys / "theirs.pem"
    (tmp_path / "both.pem").write_bytes(ours.read_bytes() + theirs.read_bytes())
    with pytest.raises(Unsupported):
        requires(str(tmp_path / "both.pem"))
    model = load(tiny.path, signed(weight_file(1), keys), admit=requires(str(theirs), str(ours)))
    model.swap(signed(weight_file(2), keys, by="theirs"))
    assert serves(model, 2)
    with pytest.raises(SignatureRefused, match=r"theirs\.pem or .*ours\.pem"):
        model.swap(signed(weight_file(3), keys, by="strangers"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=["alone", "workers"])
def test_the_option_may_be_repeated(
    workers: tuple[str, ...], tiny: TinyArtifact, weight_file: WriteWeights, keys: Path
) -> None:
    options = ["--require-signature", str(keys / "theirs.pem"), "--require-signature", str(keys / "ours.pem")]
    path = signed(weight_file(1), keys)
    with serve(str(tiny.path), "-w", str(path), *options, *workers) as (process, port):
        until_ready(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_a_push_brings_its_signature(model: Model, weight_file: WriteWeights, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    with administered({"tiny": model}, upload_dir=str(tmp_path / "uploads")) as server:
        assert server.admin is not None
        assert "not signed" in run("push", server.admin.where, weight_file(2), status=1).stderr
        run("push", server.admin.where, signed(weight_file(2), keys))
        assert serves(model, 2)


def test_a_signature_is_of_the_bytes(
    model: Model, tiny: TinyArtifact, weight_file: WriteWeights, keys: Path, tmp_path: Path
) -> None:
    """A file that claims the id of other, signed weights is refused once its bytes are read."""
    claimed = signed(weight_file(2), keys)
    forged = tmp_path / "forged.safetensors"
    other, content = tiny.write(tmp_path / "other.safetensors", tiny.values(3)).read_bytes(), claimed.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    forged.write_bytes(content[:header] + other[header:])
    (tmp_path / "forged.safetensors.sig").write_bytes(Path(f"{claimed}.sig").read_bytes())
    with pytest.raises(SwapError):
        model.swap(forged)
    with pytest.raises(UnexpectedWeights):
        model.swap(claimed, expect="0" * 64)
    with pytest.raises(Unsupported):
        model.swap(claimed, only="bias")
    assert serves(model, 1)


def test_a_rollback_to_what_is_not_signed_writes_nothing(
    model: Model, weight_file: WriteWeights, keys: Path, desired_store: DesiredStore
) -> None:
    desired_store.set(weight_file(3), revision=1)
    before = desired_store.set(weight_file(1), revision=2)
    with model.follow(desired_store, 30), administered({"tiny": model}) as server:
        refused = change(server, "rollback", to=before.history[-1].weights_id)
        assert (refused.status, refused.json["kind"]) == (422, "SignatureRefused")
        assert (desired_store.read(), serves(model, 1)) == (before, True)
        signed(weight_file(3), keys)
        assert change(server, "rollback", to=before.history[-1].weights_id).status == 200
        assert (desired_store.read().revision, serves(model, 3)) == (4, True)


@contextmanager
def kept(model: Model, how: str, path: Path, folder: Path) -> Iterator[Watcher | Follower]:
    """Let a model take a file from a folder that it watches, or as the desired weights of a desired store."""
    folder.mkdir()
    if how == "watch":
        with model.watch(folder, SOON) as watcher:
            yield watcher
    else:
        desired_store = DesiredStore(folder)
        desired_store.set(path, revision=0)
        with model.follow(desired_store, SOON) as follower:
            yield follower


def is_refused(keeping: Watcher | Follower) -> bool:
    return isinstance(keeping.last_error, SignatureRefused)


@pytest.mark.parametrize("how", ["watch", "follow"])
def test_a_signature_may_come_after_its_file(
    how: str, model: Model, weight_file: WriteWeights, keys: Path, tmp_path: Path
) -> None:
    """Until then watchers and followers do not take it."""
    folder = tmp_path / "folder"
    path = folder / "v2.safetensors"
    with kept(model, how, path if how == "watch" else weight_file(2), folder) as keeping:
        path = weight_file(2).rename(path) if how == "watch" else weight_file(2)
        assert eventually(lambda: is_refused(keeping))
        assert serves(model, 1)
        signed(path, keys, by="strangers")
        assert eventually(lambda: "is not a signature" in str(keeping.last_error))
        signed(path, keys)
        assert eventually(lambda: serves(model, 2) and keeping.last_error is None)


@pytest.mark.parametrize("how", ["watch", "follow"])
def test_a_key_may_be_replaced(
    how: str, tiny: TinyArtifact, weight_file: WriteWeights, keys: Path, tmp_path: Path
) -> None:
    """What the new key has signed is then taken, and nothing that only the old one has."""
    key = tmp_path / "key.pem"
    key.write_bytes((keys / "ours.pem").read_bytes())
    model = load(tiny.path, signed(weight_file(1), keys), admit=requires(str(key)))
    folder, path = tmp_path / "folder", signed(weight_file(2), keys, by="theirs")
    with kept(model, how, path, folder) as keeping:
        if how == "watch":
            for name in (f"{path.name}.sig", path.name):
                path.with_name(name).rename(folder / name)
        assert eventually(lambda: is_refused(keeping))
        key.write_bytes(b"half")
        assert eventually(lambda: "not a public key" in str(keeping.last_error))
        key.write_bytes((keys / "theirs.pem").read_bytes())
        assert eventually(lambda: serves(model, 2))
    with pytest.raises(SignatureRefused):
        model.swap(signed(weight_file(3), keys))


def test_a_callback_may_say_that_it_decides_otherwise_now(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    class Approved:
        names: frozenset[str] = frozenset()

        def fingerprint(self) -> frozenset[str]:
            return self.names

        def __call__(self, location: object, weights_id: str) -> None:
            if Path(str(location)).name not in self.names:
                raise SignatureRefused(f"{location}: not approved")

    admit = Approved()
    model = load(tiny.path, admit=admit)
    with kept(model, "watch", tmp_path, tmp_path / "folder") as keeping:
        weight_file(2).rename(tmp_path / "folder" / "v2.safetensors")
        assert eventually(lambda: is_refused(keeping))
        admit.names = frozenset({"v2.safetensors"})
        assert eventually(lambda: model.generation == 0)


def test_keys_that_are_none(tmp_path: Path, keys: Path, weight_file: WriteWeights) -> None:
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    pem = other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "other.pem").write_bytes(pem)
    (tmp_path / "junk.pem").write_text(json.dumps("junk"))
    for key in (tmp_path / "none.pem", tmp_path / "junk.pem", tmp_path / "other.pem"):
        with pytest.raises(Unsupported, match="public key"):
            requires(str(key))
        run("sign", weight_file(1), "--key", key, status=2)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "model_signing.verifying", None)
    with pytest.raises(MissingExtra):
        requires(str(keys / "ours.pem"))
