"""Weights over a process group: receivers that change together, refusals, members that end at any step."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests import ROOT
from tests.support import warm
from tests.support.ports import free_port
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_exporter import export
from weightswap_runtime import (
    GraphMismatch,
    Model,
    NonFiniteWeights,
    Sender,
    Sending,
    StageCancelled,
    SwapReceipt,
    TransferFailed,
    Unsupported,
    load,
    process_group,
)
from weightswap_runtime.transfer import group as groups


def group_of(size: int, timeout: float = 20.0, *, of_first: float | None = None) -> list[Any]:
    """Return the members of a gloo group, all in this process. of_first: the timeout of the first member."""
    store, limits = torch.distributed.HashStore(), [timeout if of_first is None else of_first, *[timeout] * (size - 1)]
    make: Any = torch.distributed.ProcessGroupGloo  # type: ignore[attr-defined]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: make(store, rank, size, timedelta(seconds=limits[rank])), range(size)))


class Rig:
    """A sender of the tiny artifact, and models that receive from it, each with options of its own."""

    def __init__(
        self, tiny: TinyArtifact, models: list[Model], *options: dict[str, Any], timeout: float = 20.0
    ) -> None:
        first, *others = group_of(1 + len(models), timeout)
        self.models = models
        self.receivers = [
            model.receive(group, **(options[index] if options else {}))
            for index, (model, group) in enumerate(zip(models, others, strict=True))
        ]
        self.sender = Sender(first, tiny.path)

    def serve(self, seed: int) -> bool:
        return all(serves(model, seed) for model in self.models)

    def close(self) -> None:
        self.sender.close()
        for model in self.models:
            model.close()
        assert not any(receiver.alive for receiver in self.receivers)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "BUCKET", 40)
    monkeypatch.setattr(groups.GroupLink, "tick", 0.05)


@pytest.fixture
def models(tiny: TinyArtifact, weight_file: WriteWeights, residency: Any) -> list[Model]:
    return [load(tiny.path, weight_file(0), residency=residency) for _ in range(2)]


def test_all_receivers_serve_what_is_sent(tiny: TinyArtifact, models: list[Model]) -> None:
    with closing(Rig(tiny, models)) as rig:
        for seed in (1, 2, 3):
            receipt = rig.sender.send(tiny.values(seed), labels={"step": str(seed)})
            assert isinstance(receipt, SwapReceipt)
            assert receipt == models[0].history[-1]
            assert receipt.weights_id == load(tiny.path, tiny.values(seed)).weights_id
            assert (receipt.labels, receipt.by, receipt.reloadable) == ({"step": str(seed)}, "receive", False)
            assert rig.serve(seed)
            time.sleep(0.12)  # some turns without weights


SPOILED = {**TinyArtifact.values(1), "bias": torch.full((5,), torch.nan)}


@pytest.mark.parametrize("strict", [0, 1])
def test_what_one_refuses_none_serves(strict: int, tiny: TinyArtifact, models: list[Model]) -> None:
    options: list[dict[str, Any]] = [{"allow_nonfinite": index != strict} for index in range(2)]
    with closing(Rig(tiny, models, *options)) as rig:
        for _ in range(2):
            with pytest.raises(NonFiniteWeights):
                rig.sender.send(SPOILED)
            assert rig.serve(0)
        assert isinstance(rig.receivers[strict].last_error, NonFiniteWeights)
        rig.sender.send(tiny.values(2))
        assert rig.serve(2)
        assert rig.receivers[strict].last_error is None


@pytest.mark.parametrize("other", [0, 1])
def test_another_graph_is_refused_by_its_header(
    other: int, tiny: TinyArtifact, models: list[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(3, 3).eval()
    models[other] = load(export(linear, (torch.zeros(1, 3),), out=tmp_path / "b.artifact"), linear)
    sent: list[int] = []
    plain = groups.GroupLink._send
    monkeypatch.setattr(groups.GroupLink, "_send", lambda link, content: (sent.append(1), plain(link, content)))
    with closing(Rig(tiny, models)) as rig:
        with pytest.raises(GraphMismatch):
            rig.sender.send(tiny.values(1))
        assert sent == [1]  # the header
        assert [model.generation for model in models] == [0, 0]


def test_an_interrupt_is_told(tiny: TinyArtifact, models: list[Model]) -> None:
    with closing(Rig(tiny, models, {}, {"rate_limit": SLOW})) as rig:
        sending = rig.sender.send(tiny.values(1), wait=False)
        assert isinstance(sending, Sending)
        while models[1].progress is None or models[1].progress.phase != "reading":
            time.sleep(0.01)
        rig.receivers[1].interrupt()
        with pytest.raises(StageCancelled):
            sending.wait(120)
        assert rig.serve(0)


def test_a_receiver_that_leaves_ends_the_group(tiny: TinyArtifact, models: list[Model]) -> None:
    with closing(Rig(tiny, models)) as rig:
        assert rig.receivers[0].stop()
        for _ in range(2):
            with pytest.raises(TransferFailed, match="a receiver was stopped; make a new group"):
                rig.sender.send(tiny.values(1))
        assert rig.serve(0)
        assert eventually(lambda: not rig.receivers[1].alive)  # before it is stopped, too
    assert not models[1].receivers
    assert "another receiver was stopped; make a new group" in str(rig.receivers[1].last_error)


def test_an_operator_need_not_wait_for_a_sender_that_hangs(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor need who stops: without the sender there is no turn at which to leave."""
    model, hangs, go_on = load(tiny.path, weight_file(0)), threading.Event(), threading.Event()
    send = groups.GroupLink._send

    def send_and_hang(link: groups.GroupLink, content: memoryview) -> None:
        if content.nbytes == 40:  # after the first bucket
            hangs.set()
            go_on.wait(120)
        send(link, content)

    monkeypatch.setattr(groups.GroupLink, "_send", send_and_hang)
    first, second = group_of(2, of_first=2.0)  # after which the sender gives up
    receiver = model.receive(second)
    with Sender(first, tiny.path) as sender:
        sending = sender.send(tiny.values(1), wait=False)
        assert isinstance(sending, Sending)
        assert hangs.wait(120)
        while model.progress is None or model.progress.phase != "reading":
            time.sleep(0.01)
        receiver.interrupt()
        model.swap(weight_file(2), busy="wait", timeout=5)
        assert serves(model, 2)
        assert receiver.stop(5)
        go_on.set()
        with pytest.raises(TransferFailed):
            sending.wait(120)


def test_a_group_may_serve_nothing_but_names(tmp_path: Path) -> None:
    """Weights without values: no bucket is sent, and all ranks are at the same step after it."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.rows])

    module = Empty().eval()
    artifact = export(module, (torch.zeros(2, 3),), out=tmp_path / "a.artifact")
    first, second = group_of(2)
    with load(artifact) as model, Sender(first, artifact) as sender:
        model.receive(second)
        for generation in (0, 1):
            receipt = sender.send(module)
            assert isinstance(receipt, SwapReceipt)
            assert receipt.generation == generation


def test_who_speaks_another_version_is_refused(
    tiny: TinyArtifact, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = groups.GroupLink._turn
    with closing(Rig(tiny, models)) as rig:
        older = groups.VERSION - 1
        monkeypatch.setattr(
            groups.GroupLink, "_turn", lambda link, what: turn(link, msgspec.structs.replace(what, version=older))
        )
        with pytest.raises(TransferFailed, match=f"speaks version {older}, the receiver {groups.VERSION}; install one"):
            rig.sender.send(tiny.values(1))
        assert rig.serve(0)


def test_a_dropped_model_leaves(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    first, second = group_of(2)
    receiver = load(tiny.path, weight_file(0)).receive(second)
    with Sender(first, tiny.path):
        assert eventually(lambda: not receiver.alive)


def test_what_cannot_be_a_group_is_refused(tiny: TinyArtifact) -> None:
    model, (first, second) = load(tiny.path), group_of(2)
    with pytest.raises(Unsupported, match="rank 0 sends, all others receive"):
        model.receive(first)
    with pytest.raises(Unsupported, match="rank 0 sends, all others receive"):
        Sender(second, tiny.path)
    with Sender(first, tiny.path), model.receive(second) as receiver:  # what was refused before has left no trace
        assert receiver.alive
    third, _ = group_of(2, timeout=0.5)  # its sender waits so long for the receiver at its end
    with Sender(third, tiny.path), pytest.raises(Unsupported, match="is in use already, by a sender or a receiver"):
        Sender(third, tiny.path)
    for odd, says in ((process_group_of_one(), "has no other rank"), (3, "or a process group")):
        for use in (model.receive, lambda group: Sender(group, tiny.path)):
            with pytest.raises(Unsupported, match=says):
                use(odd)
    for address, rank, size in (("127.0.0.1:1", 0, 2), ("tcp://x", 0, 2), ("tcp://x:1", 2, 2), ("tcp://x:1", 0, 1)):
        with pytest.raises(Unsupported, match="expected"):
            process_group(address, rank, size)
    with pytest.raises(TransferFailed, match="the group of 2 did not come together"):
        process_group(f"tcp://127.0.0.1:{free_port()}", 1, 2, timeout=0.5)


def process_group_of_one() -> Any:
    store = torch.distributed.HashStore()
    return torch.distributed.ProcessGroupGloo(store, 0, 1)  # type: ignore[attr-defined]


STEPS = ["header"] + ["vote"] * 2 + ["bucket"] * 3 + ["vote"] * 2 + ["outcome"] * 2  # each is a collective


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", range(-1, len(STEPS)))
def test_a_member_that_fails_at_any_step_leaves_whole_weights(
    step: int, rank: int, tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those from before; if only the answer is lost, the new ones. Step -1: a turn."""
    models = [load(tiny.path, weight_file(0)) for _ in range(2)]
    begun: list[str] = []
    counting = threading.Event()
    turn, begin = groups.Members.gather_documents, groups.Members._begin

    def tell(members: groups.Members, document: Any) -> Any:
        told = turn(members, document)
        if members.rank == rank and isinstance(document, groups.Turn) and told[0].size:
            counting.set()
        return told

    def begin_unless_failed(members: groups.Members, work: Any) -> Any:
        if members.rank == rank and (counting.is_set() or step < 0):
            begun.append("")
            if len(begun) > step:
                raise members.fail(OSError("the machine has no power"))
        return begin(members, work)

    monkeypatch.setattr(groups.Members, "gather_documents", tell)
    monkeypatch.setattr(groups.Members, "_begin", begin_unless_failed)
    with closing(Rig(tiny, models, timeout=1.0)) as rig:
        with pytest.raises(TransferFailed, match="another rank is gone, or late"):
            rig.sender.send(tiny.values(1))
        monkeypatch.undo()
        assert eventually(lambda: not any(receiver.alive for receiver in rig.receivers))
        assert rig.serve(1 if step >= 0 and STEPS[step] == "outcome" else 0)
        first, *others = group_of(3)
        for model, group in zip(models, others, strict=True):
            model.receive(group)
        with Sender(first, tiny.path) as sender:
            sender.send(tiny.values(2))
            assert rig.serve(2)


SENDER = """
import signal, sys, threading
from weightswap_runtime import Sender, load, process_group
from weightswap_runtime.transfer import group as groups
from tests.support.tiny import TinyArtifact

address, artifact, step, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), getattr(signal, sys.argv[4])
groups.BUCKET = 40
sent = []
plain = groups.GroupLink._send

def send(link, content):
    if len(sent) == step:
        signal.pthread_kill(threading.get_ident(), number)  # this thread: another one would stop it a moment later
    sent.append(1)
    plain(link, content)

groups.GroupLink._send = send
Sender(process_group(address, 0, 2, timeout=20.0), artifact).send(TinyArtifact.values(1))
"""


@pytest.mark.parametrize(("step", "number"), [(0, "SIGKILL"), (2, "SIGKILL"), (3, "SIGSTOP")])
def test_a_trainer_that_ends_or_hangs_changes_nothing(
    step: int, number: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    model, address = load(tiny.path, weight_file(0)), f"tcp://127.0.0.1:{free_port()}"
    command = [warm.python(), "-c", SENDER, address, str(tiny.path), str(step), number]
    with subprocess.Popen(command, cwd=ROOT) as trainer:
        try:
            receiver = model.receive(process_group(address, 1, 2, timeout=20.0 if number == "SIGKILL" else 3.0))
            deadline = time.monotonic() + 120
            while receiver.alive:
                assert time.monotonic() < deadline
                assert serves(model, 0)
                time.sleep(0.01)
        finally:
            trainer.kill()
    assert isinstance(receiver.last_error, TransferFailed)
    assert (model.generation, serves(model, 0)) == (0, True)
    with closing(Rig(tiny, [model])) as rig:
        rig.sender.send(tiny.values(2))
        assert serves(model, 2)


MEMBER = """
import sys, torch
from datetime import timedelta
from torch import distributed
from weightswap_runtime import Sender, load
from tests.support.tiny import TinyArtifact, serves

rank, address, artifact = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
group = distributed.new_group([2, 1], timeout=timedelta(seconds=30))
if rank == 1:
    with Sender(group, artifact) as sender:
        print(sender.send(TinyArtifact.values(1)).labels)
if rank == 2:
    model = load(artifact)
    receiver = model.receive(group)
    while receiver.alive:
        pass
    assert serves(model, 1)
    print("served")
value = torch.ones(1)
distributed.all_reduce(value)
assert value == 3, value
distributed.destroy_process_group()
"""


def test_trainers_use_a_group_of_torchs(tiny: TinyArtifact) -> None:
    """A group that `new_group` makes, beside the default one, which goes on to work."""
    address = f"tcp://127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [warm.python(), "-c", MEMBER, str(rank), address, str(tiny.path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert said == ["", "{}\n", "served\n"]
