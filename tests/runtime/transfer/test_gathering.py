"""Weights whose rows lie on several ranks of a trainer, and which it sends without having them whole anywhere but on
the first."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests import ROOT
from tests.runtime.transfer.test_groups import group_of
from tests.support import warm
from tests.support.ports import free_port
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_exporter import export, pack
from weightswap_runtime import (
    Model,
    NonFiniteWeights,
    Sender,
    SwapReceipt,
    TransferFailed,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.transfer import gathering
from weightswap_runtime.transfer import group as groups


class Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Rows:
    """Rows of a tensor, as a DTensor on one rank has them."""

    def __init__(self, whole: torch.Tensor, first: int, stop: int, *, along: int = 0) -> None:
        self.shape, self.placements = whole.shape, ()
        self._local = whole.narrow(along, first, stop - first).clone()
        offsets = [0] * whole.dim()
        offsets[along] = first
        self._chunk = Chunk(tuple(offsets), tuple(self._local.shape))

    def to_local(self) -> torch.Tensor:
        return self._local

    def __create_chunk_list__(self) -> list[Chunk]:
        return [self._chunk]


def cut(values: dict[str, torch.Tensor], rank: int, count: int) -> dict[str, Any]:
    """What each of several ranks has: rows, in shares that differ, or nothing; tensors without rows are on all."""
    return {
        name: Rows(value, *(len(value) * edge // count for edge in (rank, rank + 1))) if value.dim() else value
        for name, value in values.items()
    }


def send_on_all(senders: list[Sender], given: Callable[[int], Any], **options: Any) -> list[Any]:
    """Send at the same time on all ranks; return receipts and errors."""

    def send(rank: int) -> Any:
        try:
            return senders[rank].send(given(rank), **options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(senders)) as pool:
        return list(pool.map(send, range(len(senders))))


class Rig:
    """The ranks of a trainer in this process, and a model that receives from the first."""

    def __init__(self, tiny: TinyArtifact, model: Model, at: str, count: int, timeout: float, stack: ExitStack) -> None:
        self.model, self.count = model, count
        model.receive(at, timeout=5.0)
        self.senders = [
            stack.enter_context(Sender(at, tiny.path, trainers=group)) for group in group_of(count, timeout)
        ]

    def send(self, given: Callable[[int], Any], **options: Any) -> list[Any]:
        return send_on_all(self.senders, given, **options)


@pytest.fixture
def count() -> int:
    return 2


@pytest.fixture
def timeout() -> float:
    return 5.0


@pytest.fixture
def rig(
    count: int, timeout: float, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path, monkeypatch: Any
) -> Any:
    monkeypatch.setattr(groups, "BUCKET", 16)
    monkeypatch.setattr(gathering, "BUCKET", 16)
    with ExitStack() as stack, load(tiny.path, weight_file(0)) as model:
        yield Rig(tiny, model, f"unix:{tmp_path / 'x.sock'}", count, timeout, stack)


class Empty(nn.Module):
    """Weights without values, one of them without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2, 0))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([x, self.rows])) + self.columns.sum()


def test_weights_without_values_are_sent(tmp_path: Path) -> None:
    module, at = Empty().eval(), f"unix:{tmp_path / 'x.sock'}"
    artifact = export(module, (torch.zeros(2, 3),), out=tmp_path / "a.artifact")
    state = module.state_dict()
    with ExitStack() as stack, load(artifact) as model, model.receive(at):
        senders = [stack.enter_context(Sender(at, artifact, trainers=group)) for group in group_of(2)]
        for given in (lambda rank: state, lambda rank: cut(state, rank, 2)):
            assert send_on_all(senders, given) == [model.history[-1]] * 2
        assert model.weights_id == load(artifact, module).weights_id


@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_of_all_ranks_are_served(rig: Rig, tiny: TinyArtifact) -> None:
    for seed in (1, 2, 3):
        receipts = rig.send(lambda rank: cut(tiny.values(seed), rank, rig.count), labels={"step": str(seed)})  # noqa: B023
        assert isinstance(receipts[0], SwapReceipt)
        assert receipts == [rig.model.history[-1]] * rig.count
        assert receipts[0].weights_id == load(tiny.path, tiny.values(seed)).weights_id
        assert receipts[0].labels == {"step": str(seed)}
        assert serves(rig.model, seed)


def broken(change: Callable[[dict[str, Any], int], Any]) -> Callable[[int, int], Any]:
    def given(rank: int, count: int) -> Any:
        values = cut(TinyArtifact.values(1), rank, count)
        return change(values, rank) or values

    return given


WEIGHT = TinyArtifact.values(1)["weight"]
BIAS = TinyArtifact.values(1)["bias"]
REFUSED: dict[str, tuple[Callable[[int, int], Any], type[Exception], str]] = {
    "a missing tensor": (broken(lambda v, r: v.pop("bias") and None), WeightsMismatch, "bias: missing"),
    "NaN": (broken(lambda v, r: v.update(bias=BIAS * float("nan"))), NonFiniteWeights, "bias: 5 NaN of 5"),
    "a lost part": (
        broken(lambda v, r: v.update(weight=Rows(WEIGHT, 1, 3) if r else Rows(WEIGHT, 0, 0))),
        WeightsMismatch,
        r"weight: rows \[\(1, 3\)\] of 3, which are not each there once, between the trainer's ranks",
    ),
    "parts that overlap": (
        broken(lambda v, r: v.update(weight=Rows(WEIGHT, 1, 3) if r else Rows(WEIGHT, 0, 2))),
        WeightsMismatch,
        r"weight: rows \[\(0, 2\), \(1, 3\)\] of 3",
    ),
    "other dtypes": (
        broken(lambda v, r: v.update(weight=Rows(WEIGHT.half() if r else WEIGHT, *((1, 3) if r else (0, 1))))),
        WeightsMismatch,
        "weight: dtypes or shapes differ between the trainer's ranks",
    ),
    "parts of columns": (
        broken(lambda v, r: v.update(weight=Rows(WEIGHT, r, r + 1, along=1))),
        WeightsMismatch,
        r"weight: cut along other dimensions than the first .* give its full_tensor\(\)",
    ),
    "no tensor on one rank": (
        broken(lambda v, r: v.update(bias=[1.0]) if r else None),
        WeightsMismatch,
        "bias: no tensor",
    ),
    "an iterator": (broken(lambda v, r: iter(v.items())), WeightFileError, "expected tensors by name, or a module"),
}


@pytest.mark.parametrize(("given", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_all_ranks_get_the_same_reason(
    given: Callable[[int, int], Any], error: type[Exception], says: str, rig: Rig, tiny: TinyArtifact
) -> None:
    refusals = rig.send(lambda rank: given(rank, rig.count))
    for refusal in refusals:
        with pytest.raises(error, match=says):
            raise refusal
    assert (rig.model.generation, serves(rig.model, 0)) == (0, True)
    assert rig.send(lambda rank: cut(tiny.values(2), rank, rig.count)) == [rig.model.history[-1]] * rig.count
    assert serves(rig.model, 2)


def test_ranks_that_send_other_steps_are_refused(rig: Rig, tiny: TinyArtifact) -> None:
    first, second = rig.senders
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.send, cut(tiny.values(2), 1, 2), labels={"step": "2"})
        with pytest.raises(WeightsMismatch, match="labels differ between the trainer's ranks"):
            first.send(cut(tiny.values(1), 0, 2), labels={"step": "1"})
        with pytest.raises(WeightsMismatch):
            other.result(120)
    for refusal in rig.send(lambda rank: cut(tiny.values(1), rank, 2), labels={"step": 7}):
        assert isinstance(refusal, Unsupported)
        assert str(refusal) == "labels: expected texts by name"
    with pytest.raises(Unsupported, match="several ranks of a trainer wait"):
        first.send(cut(tiny.values(1), 0, 2), wait=False)


def test_bytes_that_change_on_the_way_are_found(rig: Rig, tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    give = groups.Members.send
    monkeypatch.setattr(groups.Members, "send", lambda members, rows: give(members, memoryview(bytearray(len(rows)))))
    for refusal in rig.send(lambda rank: cut(tiny.values(1), rank, 2)):
        assert "what rank 1 of the trainer has sent is not what has come" in str(refusal)
    assert serves(rig.model, 0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("timeout", [1.0])
def test_a_rank_that_fails_at_any_step_leaves_whole_weights(
    rank: int, step: int, rig: Rig, tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = groups.Members._begin

    def begin_unless_failed(members: groups.Members, work: Any) -> Any:
        if members.rank == rank:
            begun.append(step)
            if len(begun) > step:
                raise members.fail(OSError("the machine has no power"))
        return begin(members, work)

    monkeypatch.setattr(groups.Members, "_begin", begin_unless_failed)
    outcomes = rig.send(lambda rank: cut(tiny.values(1), rank, 2))
    assert isinstance(outcomes[rank], TransferFailed)
    assert serves(rig.model, rig.model.generation or 0)


MEMBER = """
import sys, torch
from datetime import timedelta
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from weightswap_runtime import Sender

rank, address, artifact, at, count = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
mesh = distributed.init_device_mesh("cpu", (count,))
for part in (model[0], model[2], model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
group = distributed.new_group(timeout=timedelta(seconds=30))
with Sender(at, artifact, trainers=group) as sender:
    for step in range(3):
        model(torch.ones(4, 6) * (rank + 1 + torch.arange(4.0)[:, None])).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        receipt = sender.send(model, labels={"step": str(step)})
state = model.state_dict()
state = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
if rank == 0:
    torch.save(state, sys.argv[6])
    print(receipt.generation)
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_of_fsdp_sends_its_rows(count: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).eval()
    artifact = export(model, (torch.zeros(2, 6),), out=tmp_path / "a.artifact")
    address, at = f"tcp://127.0.0.1:{free_port()}", f"unix:{tmp_path / 'x.sock'}"
    with load(artifact, model) as served, served.receive(at):
        arguments = [address, str(artifact.path), at, str(count), str(tmp_path / "state.pt")]
        processes = [
            subprocess.Popen([warm.python(), "-c", MEMBER, str(rank), *arguments], cwd=ROOT, stdout=subprocess.PIPE)
            for rank in range(count)
        ]
        said = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * count
        assert said == [b"3\n", *[b""] * (count - 1)]
        packed = pack(torch.load(tmp_path / "state.pt"), artifact, out=tmp_path / "packed.safetensors")
        assert served.weights_id == packed.weights_id
        assert served.history[-1].labels == {"step": "2"}
