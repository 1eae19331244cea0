"""Weights that a swap gets as tensors of this process: mappings, modules and iterators, in every form."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.arriving import arriving
from tests.support.tiny import Affine, TinyArtifact, Values, WriteWeights, serves
from weightswap_exporter import export, pack
from weightswap_runtime import (
    BaseMismatch,
    Model,
    SourceChanged,
    StageCancelled,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.sources.memory import MemorySource


def module(seed: int) -> Affine:
    model = Affine()
    model.load_state_dict(TinyArtifact.values(seed) | {"again": TinyArtifact.values(seed)["tied"]})
    return model


def non_contiguous(values: Values) -> Values:
    """The same values in memory that is not in their order."""
    return {
        name: torch.stack([value, value], dim=-1)[..., 1] if value.dim() else value for name, value in values.items()
    }


FORMS: dict[str, Callable[[int], Any]] = {
    "module": module,
    "wrapped module": lambda seed: nn.DataParallel(module(seed)),
    "state dict": lambda seed: module(seed).state_dict(),
    "values": TinyArtifact.values,
    "checkpoint keys": lambda seed: {"w" if k == "weight" else k: v for k, v in TinyArtifact.values(seed).items()},
    "arrays": lambda seed: {name: value.numpy() for name, value in TinyArtifact.values(seed).items()},
    "arrays that are read-only": lambda seed: {
        name: np.frombuffer(value.numpy().tobytes(), value.numpy().dtype).reshape(value.shape)
        for name, value in TinyArtifact.values(seed).items()
    },
    "big-endian arrays": lambda seed: {
        name: value.numpy().astype(value.numpy().dtype.newbyteorder(">"))
        for name, value in TinyArtifact.values(seed).items()
    },
    "not contiguous": lambda seed: non_contiguous(TinyArtifact.values(seed)),
    "iterator": lambda seed: iter(TinyArtifact.values(seed).items()),
    "iterator of all names": lambda seed: reversed(module(seed).state_dict().items()),
    "iterator with prefixes": lambda seed: ((f"module.{k}", v) for k, v in module(seed).state_dict().items()),
    "list": lambda seed: list(TinyArtifact.values(seed).items()),
    "lists": lambda seed: [[name, value] for name, value in TinyArtifact.values(seed).items()],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weights_in_memory_are_those_of_their_file(
    form: Callable[[int], Any], tiny: TinyArtifact, weight_file: WriteWeights, residency: Any
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    expected = load(tiny.path, weight_file(1)).weights_id
    receipts = [
        model.swap(form(1)),
        model.stage(form(1), background=True).commit(),
        asyncio.run(model.aswap(form(1), labels={"step": "7"})),
    ]
    assert {receipt.weights_id for receipt in receipts} == {expected}
    assert all(receipt.source.startswith("memory") and not receipt.reloadable for receipt in receipts)
    assert [receipt.labels for receipt in receipts] == [{}, {}, {"step": "7"}]
    assert serves(model, 1)
    assert load(tiny.path, form(2)).weights_id == load(tiny.path, weight_file(2)).weights_id


def test_nothing_of_what_was_given_is_shared(tiny: TinyArtifact, residency: Any) -> None:
    values = TinyArtifact.values(1)
    model = load(tiny.path, values, residency=residency)
    for value in values.values():
        value.fill_(7)
    assert serves(model, 1)
    memory = torch.empty(15)

    def reusing(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in TinyArtifact.values(seed).items():
            part = memory[: value.numel()].view(value.shape)
            yield name, part.copy_(value) if value.dtype == part.dtype else value

    model.swap(reusing(2))
    assert serves(model, 2)


def test_a_part_comes_from_memory_too(tiny: TinyArtifact, weight_file: WriteWeights, residency: Any) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    for given in (module(1), {"bias": TinyArtifact.values(1)["bias"], "foreign": torch.ones(2)}):
        model.swap(weight_file(0))
        assert model.swap(given, only="bias").kind == "partial"
        part = model.weights_id
        model.swap(weight_file(0))
        assert model.swap(weight_file(1), only="bias").weights_id == part
        model.swap(weight_file(0))
        items = given.state_dict().items() if isinstance(given, nn.Module) else given.items()
        assert model.swap(iter(items), only="bias").weights_id == part
    with pytest.raises(BaseMismatch):
        load(tiny.path).swap(module(1), only="bias")


def test_names_that_are_ignored_are_not_read(tiny: TinyArtifact) -> None:
    model = load(tiny.path)
    values = TinyArtifact.values(1) | {"old.positions": torch.ones(3), "extra": torch.ones(1)}
    for given in (values, iter(values.items())):
        assert model.swap(given, ignore="old.*").ignored == ("extra", "old.positions")


class Strided(nn.Module):
    """A weight that the graph wants in another order, and one in two views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize("background", [False, True])
def test_an_arena_in_another_order_takes_rows(background: bool, tmp_path: Path, residency: Any) -> None:
    x, models = torch.randn(2, 3, 5, 5), [Strided().eval() for _ in range(2)]
    artifact = export(models[0], (x,), out=tmp_path / "a.artifact")
    assert any(weight.stride for weight in artifact.manifest.weights)
    model = load(artifact, residency=residency)
    packed = pack(models[1], artifact, out=tmp_path / "v1.safetensors").weights_id
    forms = (models[1], models[1].state_dict(), iter(models[1].state_dict().items()))
    for given in (*forms, arriving(tmp_path / "v1.safetensors")):
        assert model.stage(given, background=background).commit().weights_id == packed
        with torch.no_grad():
            assert torch.equal(model(x), models[1](x))


def test_who_may_only_take_listed_files_takes_none_from_memory(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), admit=lambda where, weights_id: None)
    for options in ({}, {"rows": {"bias": [1]}}):
        with pytest.raises(UnexpectedWeights, match="in no file, which somebody could have signed or listed"):
            model.swap(module(1), **options)  # type: ignore[arg-type]
    assert serves(model, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"labels": {"step": 7}}, "labels: expected texts by name"),
        ({"labels": {"step": "x" * 70_000}}, "its labels have 70"),
        ({"expect": "ab"}, "expect='ab': a weights id has 64 hexadecimal digits, this has 2"),
        ({"onto": [("v0.safetensors", "0" * 64)]}, "onto: for deltas alone"),
        ({"weights": "a file", "labels": {"step": "1"}}, "a file has its own"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], says: str, tiny: TinyArtifact) -> None:
    with pytest.raises(Unsupported, match=says):
        load(tiny.path).stage(**{"weights": TinyArtifact.values(0), **options})


@pytest.mark.parametrize("thing", [None, 3, b"weights", torch.ones(2), np.ones(2), Affine.forward, object()])
def test_what_is_neither_a_path_nor_tensors_is_refused(thing: Any, tiny: TinyArtifact) -> None:
    with pytest.raises(WeightFileError, match="expected a path or URL, tensors by name, a module, or an iterator"):
        load(tiny.path).swap(thing)


def writes(model: Affine) -> dict[str, Callable[[], object]]:
    """Writes to a parameter: those that torch counts, and those that it does not."""
    return {
        "counted": lambda: model.bias.detach().add_(1),
        "data": lambda: model.bias.data.add_(1),
        "numpy": lambda: model.bias.detach().numpy().__iadd__(1),
    }


@pytest.mark.parametrize("how", ["counted", "data", "numpy"])
@pytest.mark.parametrize("form", ["module", "iterator"])
def test_a_write_meanwhile_is_found(how: str, form: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    """A counted one always, the others where the owner goes on: in the background."""
    model, source = load(tiny.path, weight_file(0)), module(1)
    write, reads = writes(source)[how], []

    plain = MemorySource.read_into

    def read_into(self: MemorySource, buffers: list[memoryview], offset: int) -> None:
        plain(self, buffers, offset)
        if self.where == "bias" and not reads:
            reads.append(write())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemorySource, "read_into", read_into)
        staged = model.stage(source if form == "module" else iter(source.state_dict().items()), background=True)
        with pytest.raises(SourceChanged):
            staged.wait()
    assert reads
    assert serves(model, 0)


def freed(value: torch.Tensor) -> torch.Tensor:
    copy = value.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize(
    "change", [lambda value: value.half(), lambda value: value.double(), lambda value: value[:0], freed]
)
def test_what_is_assigned_to_its_data_is_another_tensor(
    change: Callable[[torch.Tensor], torch.Tensor], tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    """Its size and dtype may differ: the rest of its place would be bytes of the weights from before."""
    model, source, reads = load(tiny.path, weight_file(0)), module(1), []
    plain = MemorySource.read_into

    def read_into(self: MemorySource, buffers: list[memoryview], offset: int) -> None:
        if not reads:
            reads.append(self.where)
            for parameter in source.parameters():
                parameter.data = change(parameter.data)
        plain(self, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemorySource, "read_into", read_into)
        with pytest.raises(SourceChanged):
            model.stage(source, background=True).wait()
    assert serves(model, 0)


class Homonyms(nn.Module):
    """Weights whose names differ by what containers add to names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) @ self.weight


@pytest.mark.parametrize("absent", [None, "model.module.model.weight"])
def test_a_part_is_not_taken_by_a_name_with_two_meanings(absent: str | None, tmp_path: Path) -> None:
    old, new = Homonyms().eval(), Homonyms().eval()
    model = load(export(old, (torch.zeros(1, 3),), out=tmp_path / "a.artifact"), old)
    given = {f"model.module.{name}": value for name, value in new.state_dict().items()}
    given.pop(absent or "", None)
    for form in (given, iter(given.items()), reversed(given.items())):
        with pytest.raises(WeightsMismatch, match=r"model.module.weight: may be model.weight or weight"):
            model.swap(form, only="model.*")
    served = model.swap(new, only="model.*").weights_id
    assert served == model.swap(new.state_dict(), only="model.*").weights_id


def test_nothing_of_an_iterator_is_held(tiny: TinyArtifact) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        for name in tiny.values(0):
            value = tiny.values(1)[name]
            alive.add(value)
            yield name, value
            assert len(alive) <= 2  # the last one, and that of this frame

    model = load(tiny.path)
    model.swap(items())
    assert serves(model, 1)


def test_a_staging_of_an_iterator_may_be_cancelled(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model, waits, go_on = load(tiny.path, weight_file(0)), threading.Event(), threading.Event()

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        values = list(TinyArtifact.values(1).items())
        yield values[0]
        waits.set()
        go_on.wait(120)
        yield from values[1:]

    staged = model.stage(items(), background=True)
    assert waits.wait(120)
    staged.cancel_soon()
    go_on.set()
    with pytest.raises(StageCancelled):
        staged.wait()
    assert serves(model, 0)
    model.swap(module(1))


def test_an_iterator_is_asked_in_the_thread_that_stages(tiny: TinyArtifact) -> None:
    threads = []

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        for item in TinyArtifact.values(0).items():
            threads.append(threading.current_thread())
            yield item

    load(tiny.path).swap(items())
    assert set(threads) == {threading.current_thread()}


def test_a_rollback_goes_back_to_weights_that_came_from_memory(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model: Model = load(tiny.path, module(1))
    model.swap(weight_file(2))
    receipt = model.rollback()
    assert serves(model, 1)
    assert not receipt.reloadable
