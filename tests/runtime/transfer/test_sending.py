"""Weights that one process sends and another serves: receipts, refusals, and senders that die at any moment."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests import ROOT
from tests.support import warm
from tests.support.descriptors import descriptors
from tests.support.forks import in_a_child
from tests.support.refusals import because
from tests.support.services import weights_id_of
from tests.support.tiny import TinyArtifact, Values, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_exporter import export
from weightswap_runtime import (
    DigestMismatch,
    Model,
    NonFiniteWeights,
    NotPromoted,
    Receiver,
    Sender,
    Sending,
    SwapReceipt,
    TransferFailed,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.transfer.messages import VERSION, Channel, Offer, Outcome

Far = float("inf")


@pytest.fixture
def at(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'x.sock'}"


@pytest.fixture
def served(tiny: TinyArtifact, weight_file: WriteWeights, residency: Any) -> Iterator[Model]:
    model = load(tiny.path, weight_file(0), residency=residency)
    yield model
    model.close()


@pytest.fixture
def receiver(served: Model, at: str) -> Iterator[Receiver]:
    with served.receive(at, timeout=5.0) as receiver:
        yield receiver


@pytest.fixture
def sender(tiny: TinyArtifact, at: str) -> Iterator[Sender]:
    with Sender(at, tiny.path, timeout=20.0) as sender:
        yield sender


@pytest.mark.usefixtures("receiver")
def test_what_is_sent_is_served(served: Model, sender: Sender, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    forms: list[Any] = [tiny.values(1), iter(tiny.values(2).items()), weight_file(3), tiny.values(4)]
    for seed, given in enumerate(forms, 1):
        receipt = sender.send(given, labels={"step": str(seed)} if seed != 3 else None)
        assert isinstance(receipt, SwapReceipt)
        assert receipt == served.history[-1]
        assert serves(served, seed)
        assert receipt.weights_id == load(tiny.path, weight_file(seed)).weights_id
        assert (receipt.by, receipt.reloadable) == ("receive", False)
        assert receipt.labels == ({"step": str(seed)} if seed != 3 else {})


@pytest.mark.usefixtures("receiver")
def test_what_was_sent_may_change_at_once(served: Model, sender: Sender) -> None:
    values = TinyArtifact.values(1)
    sending = sender.send(values, wait=False)
    for value in values.values():
        value.zero_()
    assert isinstance(sending, Sending)
    sending.wait(120)
    assert serves(served, 1)


@pytest.mark.usefixtures("receiver")
def test_long_labels_do_not_move_the_weights(served: Model, sender: Sender) -> None:
    for length in (0, 10, 60_000):
        receipt = sender.send(TinyArtifact.values(1), labels={"notes": '"' * (length // 2)})
        assert isinstance(receipt, SwapReceipt)
        assert receipt.labels == {"notes": '"' * (length // 2)}


REFUSED: dict[str, tuple[Values, type[WeightsMismatch] | type[NonFiniteWeights]]] = {
    "here": ({"bias": torch.ones(3)}, WeightsMismatch),
    "there": ({"bias": torch.full((5,), torch.nan)}, NonFiniteWeights),
}


@pytest.mark.parametrize(("change", "error"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_comes_back_with_its_reason(
    change: Values,
    error: type[WeightsMismatch] | type[NonFiniteWeights],
    served: Model,
    sender: Sender,
    receiver: Receiver,
) -> None:
    with pytest.raises(error) as caught:
        sender.send(TinyArtifact.values(1) | change)
    assert caught.value.problems
    assert serves(served, 0)
    assert (receiver.last_error is None) == (error is WeightsMismatch)
    sender.send(TinyArtifact.values(1))
    assert serves(served, 1)
    assert receiver.last_error is None


def test_of_several_that_wait_the_latest_is_sent(served: Model, sender: Sender, receiver: Receiver) -> None:
    with served.turn(lambda: None):  # no swap begins
        first = sender.send(TinyArtifact.values(1), wait=False)
        assert eventually(lambda: bool(receiver._connections))
        time.sleep(0.2)
        others = [sender.send(TinyArtifact.values(seed), wait=False) for seed in (2, 3, 4)]
        assert not first.done  # type: ignore[union-attr]
    assert first.wait(120)  # type: ignore[union-attr, call-arg]
    for other in others[:2]:
        with pytest.raises(NotPromoted, check=because("superseded")):
            other.wait(120)  # type: ignore[union-attr, call-arg]
    others[2].wait(120)  # type: ignore[union-attr, call-arg]
    assert serves(served, 4)
    assert served.generation == 2


def test_what_an_interrupted_send_has_handed_over_is_sent_once(
    served: Model, sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is the sender's thread's then; given back twice, two sends would have it."""

    class Interrupted(threading.Condition):
        def __exit__(self, *details: Any) -> None:
            super().__exit__(*details)
            if sender._waiting not in (None, superseded) and interrupting:
                interrupting.clear()
                raise KeyboardInterrupt

    with served.turn(lambda: None):  # what is on its way waits
        first = sender.send(TinyArtifact.values(1), wait=False)
        assert isinstance(first, Sending)
        while sender._waiting is not None:
            time.sleep(0.001)
        superseded = sender.send(TinyArtifact.values(2), wait=False)
        interrupting = [True]
        changed = Interrupted(sender._changed._lock)  # type: ignore[attr-defined]
        monkeypatch.setattr(sender, "_changed", changed)
        with pytest.raises(KeyboardInterrupt):
            sender.send(TinyArtifact.values(3), wait=False)
        monkeypatch.undo()
        assert isinstance(superseded, Sending)
        with pytest.raises(NotPromoted):
            superseded.wait(120)
    first.wait(120)
    while not serves(served, 3):
        time.sleep(0.001)
    for seed in (4, 5, 6):
        sender.send(TinyArtifact.values(seed))
        assert serves(served, seed)
    assert len({id(memory) for memory in sender._free}) == len(sender._free)


def test_a_receiver_that_starts_again_is_found(served: Model, at: str, sender: Sender) -> None:
    for seed in (1, 2):
        with served.receive(at):
            sender.send(TinyArtifact.values(seed))
            assert serves(served, seed)
        assert not Path(at.removeprefix("unix:")).exists()
        with pytest.raises(TransferFailed, match=r"nobody receives there .* Start the receiver first"):
            sender.send(TinyArtifact.values(9))


def test_a_closed_or_dropped_model_stops_listening(tiny: TinyArtifact, at: str) -> None:
    path = Path(at.removeprefix("unix:"))
    model = load(tiny.path)
    receiver = model.receive(at)
    assert path.stat().st_mode & 0o777 == 0o600
    assert model.receivers == (receiver,)
    model.close()
    assert not receiver.alive
    assert not path.exists()
    model = load(tiny.path)
    receiver = model.receive(at)
    del model
    gc.collect()
    assert not path.exists()
    assert receiver.stop(20)


def test_the_address_must_be_free(served: Model, receiver: Receiver, tmp_path: Path, at: str) -> None:
    with pytest.raises(Unsupported, match="another process receives there"):
        served.receive(at)
    (tmp_path / "file").touch()
    for address, says in (
        (f"unix:{tmp_path / 'file'}", "is there already, and no socket"),
        (f"unix:{tmp_path / 'nowhere' / 'x.sock'}", r"cannot listen there \(No such file or directory\)"),
        ("x.sock", "expected unix:PATH"),
        ("unix:" + "x" * 200, "a path of more than 107 bytes"),
        ("unix:a\0b", "expected unix:PATH"),
    ):
        with pytest.raises(Unsupported, match=says):
            served.receive(address)
    receiver.stop()
    left = socket.socket(socket.AF_UNIX)  # by a process that was killed
    left.bind(str(tmp_path / "x.sock"))
    left.close()
    assert served.receive(at).alive


@pytest.mark.usefixtures("receiver")
def test_another_graph_is_refused(at: str, tmp_path: Path, served: Model) -> None:
    linear = torch.nn.Linear(3, 3)
    other = export(linear, (torch.zeros(1, 3),), out=tmp_path / "other.artifact")
    with Sender(at, other) as sender, pytest.raises(TransferFailed, match=r"the sender has the graph .*, the receiver"):
        sender.send(linear)
    assert serves(served, 0)


def test_who_follows_a_place_takes_no_weights_from_memory(
    served: Model, receiver: Receiver, sender: Sender, tmp_path: Path
) -> None:
    served.follow(tmp_path)
    with pytest.raises(UnexpectedWeights, match=r"this model follows .*, which says what is served"):
        sender.send(TinyArtifact.values(1))
    assert serves(served, 0)


def test_weights_that_were_rolled_back_are_refused(tiny: TinyArtifact, weight_file: WriteWeights, at: str) -> None:
    model = load(tiny.path, weight_file(0))
    at += "2"
    with model.receive(at), Sender(at, tiny.path) as sender:
        sender.send(tiny.values(1))
        model.rollback(by="operator")
        with pytest.raises(NotPromoted, check=because("superseded")):
            sender.send(tiny.values(1))
        assert serves(model, 0)
        sender.send(tiny.values(2))
        assert serves(model, 2)
        model.swap(weight_file(1))  # by hand they may come again
        sender.send(tiny.values(1))
    model.close()


# a peer that does not keep to the messages


def connected(at: str) -> Channel:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(at.removeprefix("unix:"))
    return Channel(connection)


def offered(channel: Channel, descriptor: int | None, tiny: TinyArtifact, weights_id: str = "0" * 64) -> Outcome:
    channel.send(Offer(VERSION, tiny.manifest.graph_id, weights_id), Far, descriptor)
    outcome = channel.receive(Outcome, Far)
    assert outcome is not None
    return outcome


def in_memory(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


DESCRIPTORS: dict[str, tuple[Callable[[bytes], int | None], type[Exception], str]] = {
    "none": (lambda raw: None, TransferFailed, "no descriptor came"),
    "no weight file": (lambda raw: in_memory(b"x" * 100), WeightFileError, "header"),
    "a pipe": (lambda raw: os.pipe()[0], WeightFileError, "not a regular file"),
    "cut off": (lambda raw: in_memory(raw[:-1]), WeightFileError, "truncated"),
    "another byte": (lambda raw: in_memory(raw[:-1] + bytes([raw[-1] ^ 1])), DigestMismatch, "records the digest"),
    "another id": (in_memory, UnexpectedWeights, "expected 000000000000"),
}


@pytest.mark.parametrize(("make", "error", "says"), DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_a_descriptor_that_cannot_be_served_is_refused(
    make: Callable[[bytes], int | None],
    error: type[Exception],
    says: str,
    receiver: Receiver,
    served: Model,
    at: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
) -> None:
    raw = weight_file(1).read_bytes()
    stamp = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["weightswap"])
    before = descriptors()
    channel, descriptor = connected(at), make(raw)
    outcome = offered(channel, descriptor, tiny, "0" * 64 if error is UnexpectedWeights else stamp["weights_id"])
    assert outcome.refusal is not None
    refused = outcome.refusal.as_error()
    assert isinstance(refused, error)
    assert says in str(refused)
    assert serves(served, 0)
    good = in_memory(raw)
    assert offered(channel, good, tiny, stamp["weights_id"]).receipt is not None
    assert serves(served, 1)
    channel.close()
    os.close(good)
    if descriptor is not None:
        os.close(descriptor)
    receiver.stop()
    gc.collect()
    assert descriptors() <= before + (says == "not a regular file")  # the pipe's other end


MESSAGES = {
    "nothing": b"",
    "no message": b"\xff\xfe\n",
    "another version": b'{"version":7,"graph_id":"x"}\n',
    "half a message": b'{"version":1,',
    "a long message": b"x" * (2 << 20),
}


@pytest.mark.parametrize("raw", MESSAGES.values(), ids=MESSAGES)
@pytest.mark.usefixtures("receiver")
def test_who_does_not_keep_to_the_messages_disturbs_nobody(raw: bytes, at: str, served: Model, sender: Sender) -> None:
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(at.removeprefix("unix:"))
        with suppress(OSError):
            odd.sendall(raw)
        sender.send(TinyArtifact.values(1))
        assert serves(served, 1)
    sender.send(TinyArtifact.values(2))
    assert serves(served, 2)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
@pytest.mark.usefixtures("receiver")
def test_another_user_is_refused(at: str, tmp_path: Path, tiny: TinyArtifact) -> None:
    path = Path(at.removeprefix("unix:"))
    path.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        with suppress(OSError):
            folder.chmod(folder.stat().st_mode | 0o111)
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "print(s.recv(4096).decode())"
    )
    done = subprocess.run(
        [warm.python(), "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "takes weights from processes of its own user alone" in done.stdout


def test_a_sender_of_another_release_is_told_so(receiver: Receiver, at: str) -> None:
    before, descriptor = descriptors(), in_memory(b"x")
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(at.removeprefix("unix:"))
        offer = Offer(VERSION + 1, "x", "0" * 64)
        socket.send_fds(other, [msgspec.json.encode(offer) + b"\n"], [descriptor])
        os.close(descriptor)
        answer = other.recv(4096).decode()
        assert f"the sender speaks version {VERSION + 1}, the receiver {VERSION}; install one release" in answer
        assert descriptors() <= before + 2  # both ends, and not what was offered
    assert isinstance(receiver.last_error, TransferFailed)


def test_who_offers_nothing_is_given_up(served: Model, at: str) -> None:
    with served.receive(at, timeout=0.2), closing(connected(at)) as channel:
        assert channel.receive(Outcome, Far) is None


def test_descriptors_are_not_hoarded(receiver: Receiver, at: str) -> None:
    before, descriptor = descriptors(), in_memory(b"x")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(at.removeprefix("unix:"))
        for _ in range(20):
            socket.send_fds(peer, [b"{"], [descriptor] * 3)
        time.sleep(0.2)
        assert descriptors() <= before + 5
    os.close(descriptor)
    receiver.stop()


def test_half_a_message_is_given_up(served: Model, at: str) -> None:
    with served.receive(at, timeout=0.2) as receiver:
        channel = connected(at)
        channel._socket.sendall(b'{"weights_id"')
        assert channel._socket.recv(1) == b""
        assert receiver.alive
        channel.close()


def test_weights_whose_sender_has_gone_are_served_in_their_turn(
    served: Model, receiver: Receiver, at: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    with served.turn(lambda: None):
        channel, descriptor = connected(at), in_memory(weight_file(1).read_bytes())
        channel.send(Offer(VERSION, tiny.manifest.graph_id, weights_id_of(weight_file(1))), Far, descriptor)
        assert eventually(lambda: bool(receiver._connections))
        channel.close()
        os.close(descriptor)
    assert eventually(lambda: not receiver._connections)
    assert serves(served, 1)


def test_who_comes_when_many_are_connected_is_told(
    receiver: Receiver, at: str, tiny: TinyArtifact, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightswap_runtime.transfer.receiver.MOST_SENDERS", 2)
    others = [connected(at) for _ in range(2)]
    with pytest.raises(TransferFailed, match="2 senders are connected; close one of them"):
        sender.send(tiny.values(1))
    for other in others:
        other.close()
    assert eventually(lambda: not receiver._connections)
    time.sleep(0.05)  # their threads end
    sender.send(tiny.values(1))


def test_what_waits_is_sent_if_what_comes_later_is_refused(served: Model, receiver: Receiver, sender: Sender) -> None:
    with served.turn(lambda: None):
        first = sender.send(TinyArtifact.values(1), wait=False)
        assert eventually(lambda: bool(receiver._connections))
        second = sender.send(TinyArtifact.values(2), wait=False)
        with pytest.raises(WeightsMismatch):
            sender.send({"bias": torch.ones(5)})
    for sending in (first, second):
        assert isinstance(sending, Sending)
    second.wait(120)  # type: ignore[union-attr, call-arg]
    assert serves(served, 2)


def test_a_sender_leaves_no_descriptor(at: str, tiny: TinyArtifact) -> None:
    before = descriptors()
    for _ in range(3):
        sender = Sender(at, tiny.path)

        def items(sender: Sender = sender) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(tiny.values(1).items())[:2]
            sender.close()
            yield from list(tiny.values(1).items())[2:]

        with pytest.raises(TransferFailed, match="the sender was closed"):
            sender.send(items())
    del sender
    gc.collect()
    assert descriptors() <= before


@pytest.mark.usefixtures("receiver")
def test_a_send_within_a_send_is_refused(sender: Sender) -> None:
    def items() -> Iterator[tuple[str, torch.Tensor]]:
        sender.send(TinyArtifact.values(1))
        yield from TinyArtifact.values(1).items()

    with pytest.raises(TransferFailed, match="a send within an iterator that is being sent"):
        sender.send(items())
    sender.send(TinyArtifact.values(1))


@pytest.mark.usefixtures("receiver")
def test_a_forked_child_makes_its_own_sender(sender: Sender, served: Model) -> None:
    sender.send(TinyArtifact.values(1))

    def child() -> bool:
        with pytest.raises(TransferFailed, match="made before a fork"):
            sender.send(TinyArtifact.values(2))
        return True

    assert in_a_child(child)
    sender.send(TinyArtifact.values(3))
    assert serves(served, 3)


def test_the_working_directory_may_change(
    served: Model, tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with Sender("unix:x.sock", tiny.path) as sender:
        receiver = served.receive("unix:x.sock")
        monkeypatch.chdir(tmp_path / "other")
        Path("x.sock").touch()
        sender.send(tiny.values(1))
        receiver.stop()
    assert Path("x.sock").exists()
    assert not Path("../x.sock").exists()


def test_the_socket_of_another_receiver_stays(served: Model, tiny: TinyArtifact, at: str) -> None:
    path = Path(at.removeprefix("unix:"))
    first = served.receive(at)
    path.unlink()
    with load(tiny.path) as other, other.receive(at), Sender(at, tiny.path) as sender:
        first.stop()
        sender.send(tiny.values(1))
        assert serves(other, 1)


# processes

TRAINER = """
import sys, os
import torch
from tests.support.tiny import TinyArtifact
from weightswap_runtime import Sender
sender = Sender(sys.argv[1], sys.argv[2], timeout=20)
for seed in range(1, 1000):
    print(sender.send(TinyArtifact.values(seed), labels={"seed": str(seed)}).generation, flush=True)
"""


def test_a_trainer_that_is_killed_leaves_whole_weights(
    served: Model, receiver: Receiver, at: str, tiny: TinyArtifact
) -> None:
    command = [warm.python(), "-c", TRAINER, at, str(tiny.path)]
    for kill in range(3):
        before = served.generation
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            for _ in range(3 + kill):
                trainer.stdout.readline()
            time.sleep(0.003 * kill)
            trainer.send_signal(signal.SIGKILL)
        while receiver._connections:  # what was passed before is still served
            time.sleep(0.01)
        assert served.generation > before  # type: ignore[operator]
        assert serves(served, int(served.history[-1].labels["seed"]))


def test_a_receiver_that_does_not_answer_is_given_up(tiny: TinyArtifact, at: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(at.removeprefix("unix:"))
        listener.listen()
        silent = pool.submit(lambda: Channel(listener.accept()[0]))
        with Sender(at, tiny.path, timeout=0.3) as sender, pytest.raises(TransferFailed, match="not answer in time"):
            sender.send(TinyArtifact.values(1))
        silent.result().close()


def test_a_closed_sender_sends_nothing(tiny: TinyArtifact, at: str) -> None:
    sender = Sender(at, tiny.path)
    sender.close()
    sender.close()
    with pytest.raises(TransferFailed):
        sender.send(TinyArtifact.values(1))
