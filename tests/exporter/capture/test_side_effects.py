"""Tensors that a call stores in attributes: accepted if no later call reads them, refused if one may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.utils import prune

from tests.support.models import Does, doing
from tests.support.setups import loaded, served
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_runtime import CaptureError

Act = Callable[[Any, torch.Tensor], torch.Tensor]
BATCH = {0: Dim("batch", max=9)}
SIZES = {"x": BATCH}


class Plain:
    """Object of a user's class, which may contain itself."""

    last: torch.Tensor | None = None
    itself: Plain | None = None


class Stores(nn.Module):
    """Module that calls `act(self, x)`, which may store anything."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act
        self.linear = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(3))
        self.last: torch.Tensor | None = None
        self.start = torch.zeros(3)
        self.calls = 0
        self.plain = Plain()
        self.cache: dict[str, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []
        self.window: deque[torch.Tensor] = deque(maxlen=2)
        self.deep: dict[str, list[torch.Tensor]] = {"a": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        self.features = x + 1
        return self(x) + 1


def write_only(model: Stores, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x)
    model.last = y
    return y.relu()


def write_then_read(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.start = model.linear(x)
    return model.start.relu() + model.start.shape[0]


def new_attribute(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.features = model.linear(x)  # type: ignore[assignment]
    return x * 2


def dict_entry(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.cache["features"] = model.linear(x)
    return model.cache["features"] - 1


def nested(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.inner[1].seen = (x, [model.inner(x)])  # type: ignore[assignment]
    return model.inner[1].seen[1][0]  # type: ignore[index, no-any-return]


def list_of_the_call(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.kept = []
    for part in (model.linear, model.inner):
        x = part(x)
        model.kept.append(x)
    return torch.stack(model.kept).sum(0)


def cache_of_weights(model: Stores, x: torch.Tensor) -> torch.Tensor:
    """Like LeViT's attention biases."""
    if str(x.device) not in model.cache:
        model.cache[str(x.device)] = model.linear.weight[:, torch.tensor([2, 0, 1])]
    return x @ model.cache[str(x.device)]


def beside_state(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.count.add_(1)
    model.last = x + 1
    return model.linear(x)


def in_place_on_its_own(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.last = torch.zeros_like(x)
    model.last.view(-1).add_(1)
    return x + model.last


def in_a_region(model: Stores, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.last = model.linear(x)
    return model.last + torch.tensor(2.0)


def read_then_write(model: Stores, x: torch.Tensor) -> torch.Tensor:
    y = x + model.start
    model.start = model.start + 1
    return y


def recurrent(model: Stores, x: torch.Tensor) -> torch.Tensor:
    y = x if model.last is None else x + model.last
    model.last = y.sum(0)
    return y


def pair_of_before(model: Stores, x: torch.Tensor) -> torch.Tensor:
    """Like the states of recurrent models. torch does not warn of tuples."""
    hidden, cell = model.last or (torch.zeros(3), torch.ones(3))
    model.last = (hidden + x.sum(0), cell * 2)  # type: ignore[assignment]
    return x + hidden * cell


def first_one(model: Stores, x: torch.Tensor) -> torch.Tensor:
    if model.last is None:
        model.last = model.linear(x).sum(0)
    return x - model.last


def entry_of_before(model: Stores, x: torch.Tensor) -> torch.Tensor:
    before = model.cache.get("sum", x.sum(0) * 0)
    model.cache["sum"] = x.sum(0)
    return x + before


def through_a_view(model: Stores, x: torch.Tensor) -> torch.Tensor:
    if model.last is None:
        model.last = torch.zeros(3)
    model.last.view(-1).add_(x.sum(0))
    return x + model.last


def nested_of_before(model: Stores, x: torch.Tensor) -> torch.Tensor:
    y = x + getattr(model.inner[0], "seen", 0)
    model.inner[0].seen = x.mean(0)  # type: ignore[assignment]
    return y


def size_of_the_first(model: Stores, x: torch.Tensor) -> torch.Tensor:
    if model.last is None:
        model.last = torch.arange(x.shape[0])
    return x * model.last.sum()


def chance_of_the_first(model: Stores, x: torch.Tensor) -> torch.Tensor:
    if model.last is None:
        model.last = torch.rand(3)
    return x * model.last


def state_from_before(model: Stores, x: torch.Tensor) -> torch.Tensor:
    if model.last is not None:
        model.count.add_(model.last)
    model.last = x.sum(0)
    return x * 2


def state_of_the_first(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.count.add_(1)
    if model.last is None:
        model.last = model.count * 2
    return x + model.last


def from_the_third_call(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    y = x + model.last if model.calls > 2 and model.last is not None else x
    model.last = x.sum(0)
    return y


def circular(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.cache["x"] = model.cache["again"] = x
    model.cache["again"] = model.cache  # type: ignore[assignment]
    return x + 1


def list_that_grows(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.kept.append(model.linear(x))
    return x * 2


def delayed_by_two(model: Stores, x: torch.Tensor) -> torch.Tensor:
    """Each value is read two calls later."""
    y = model.linear(x) + model.start
    model.start = torch.zeros(3) if model.last is None else model.last
    model.last = x.sum(0)
    return y


def window(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.window.append(x.sum(0))
    return x + sum(model.window)


def list_in_a_dict(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.deep["a"].append(x)
    return x * 2


def object_that_is_written(model: Stores, x: torch.Tensor) -> torch.Tensor:
    model.plain.last, model.plain.itself = model.linear(x), model.plain
    return model.plain.last * 2


def object_of_a_class_of_the_call(model: Stores, x: torch.Tensor) -> torch.Tensor:
    class Result(Plain):
        pass

    model.result = Result()
    model.result.last = model.linear(x)
    return model.result.last * 2


def object_of_before(model: Stores, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x) if model.plain.last is None else x + model.plain.last
    model.plain.last = y.sum(0)
    return y


NOT_READ = {
    act.__name__: act
    for act in (
        write_only,
        write_then_read,
        new_attribute,
        dict_entry,
        nested,
        list_of_the_call,
        cache_of_weights,
        beside_state,
        in_place_on_its_own,
        in_a_region,
        circular,
        object_that_is_written,
        object_of_a_class_of_the_call,
    )
}
READ = {
    act.__name__: act
    for act in (
        read_then_write,
        recurrent,
        pair_of_before,
        first_one,
        entry_of_before,
        through_a_view,
        nested_of_before,
        size_of_the_first,
        chance_of_the_first,
        state_from_before,
        state_of_the_first,
        from_the_third_call,
        list_that_grows,
        delayed_by_two,
        window,
        list_in_a_dict,
        object_of_before,
    )
}


def exported(
    eager: nn.Module, folder: Path, *, says: str = r"^a call leaves tensors in self\..*No later call reads"
) -> Any:
    with pytest.warns(UserWarning, match=says):
        return served(folder, eager, torch.randn(2, 3), dynamic_shapes=(BATCH,))


def compare_calls(model: Any, eager: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        for size in (3, 2, 5, 3):
            x = torch.randn(size, 3)
            assert torch.equal(model(x), eager(x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("act", NOT_READ.values(), ids=NOT_READ)
def test_what_no_later_call_reads_is_let_through(act: Act, tmp_path: Path) -> None:
    eager = Stores(act).eval()
    before = {path: dict(vars(module)) for path, module in eager.named_modules()}
    model = exported(eager, tmp_path)
    assert {path: dict(vars(module)) for path, module in eager.named_modules()} == before
    assert eager.cache == {}
    assert vars(eager.plain) == {}
    assert eager.kept == []
    compare_calls(model, eager)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", READ.values(), ids=READ)
def test_what_a_later_call_may_read_is_refused(act: Act, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"^method 'forward': a call stores tensors in self\.") as refused:
        export(eager := Stores(act).eval(), (torch.randn(2, 3),), out=tmp_path / "a", dynamic_shapes=SIZES)
    assert "torch.export cannot" not in str(refused.value)
    assert (eager.cache, eager.kept, list(eager.window), eager.deep) == ({}, [], [], {"a": []})


def test_a_hook_that_grabs_features(tmp_path: Path) -> None:
    eager = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    eager.features = {}  # type: ignore[assignment]
    eager[0].register_forward_hook(lambda _module, _inputs, output: eager.features.__setitem__("0", output))  # type: ignore[operator, union-attr]
    compare_calls(exported(eager, tmp_path), eager)


def test_a_pruned_layer(tmp_path: Path) -> None:
    eager = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    prune.l1_unstructured(eager[0], "weight", 0.5)
    compare_calls(exported(eager, tmp_path), eager)


def test_a_swap_reaches_what_was_kept_of_weights(tmp_path: Path) -> None:
    eager, other = Stores(cache_of_weights).eval(), Stores(cache_of_weights).eval()
    model = exported(eager, tmp_path)
    model.swap(pack(other, tmp_path / "a", out=tmp_path / "other.safetensors").path)
    compare_calls(model, other)


def test_of_a_skeleton_and_of_another_method(tmp_path: Path) -> None:
    with skeleton():
        model = Stores(cache_of_weights).eval()
    spec = MethodSpec("forward", (torch.randn(2, 3),), dynamic_shapes=SIZES)
    with pytest.warns(UserWarning, match=r"in self\.cache\['cpu'\], self\.features\."):
        artifact = export(model, methods={"forward": spec, "again": replace(spec, fn_name="again")}, out=tmp_path / "a")
    real = Stores(cache_of_weights).eval()
    model = loaded(artifact, tmp_path, real)
    compare_calls(model, real)
    compare_calls(model.again, real.again)


def counting(looks: Callable[[int], int]) -> nn.Module:
    """Return a module that counts its calls, and may read the number."""

    def act(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        model.name = f"call {model.calls}"
        return model.linear(x) * looks(model.calls)

    return Does(act, linear=nn.Linear(3, 3), calls=0, name="first").eval()


def test_a_number_that_nobody_looks_at_is_named(tmp_path: Path) -> None:
    eager = counting(lambda _: 2)
    says = r"^a call changes self\.calls, self\.name\. The next call computes the same"
    model = exported(eager, tmp_path, says=says)
    assert (eager.calls, eager.name) == (0, "first")
    compare_calls(model, eager)


@pytest.mark.parametrize("looks", [lambda calls: calls, lambda calls: 1 if calls == 1 else 2])
def test_a_number_that_the_next_call_looks_at_is_refused(looks: Callable[[int], int], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"a call changes self\.calls, self\.name, so a later call computes"):
        export(counting(looks), (torch.randn(2, 3),), out=tmp_path / "a")


def test_a_size_that_each_call_finds_anew(tmp_path: Path) -> None:
    eager = Does(lambda m, x: doing(setattr(m, "width", x.shape[1]), x.reshape(-1, m.width)))
    compare_calls(served(tmp_path, eager, torch.randn(2, 3), dynamic_shapes=(BATCH,)), eager)


def attending(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.attention = torch.softmax(model.linear(x), 1)
    return model.attention * 2


def regularised() -> nn.Module:
    """Return a module that has its parameters in a list, too, as deepctr's do for their losses."""
    linear = nn.Linear(3, 3)
    return Does(attending, linear=linear, regularised=[list(linear.parameters())], attention=None).eval()


def test_parameters_in_a_list_are_no_side_effects(tmp_path: Path) -> None:
    with skeleton():
        hollow = regularised()
    eager, artifacts = regularised(), []
    for name, model in (("hollow", hollow), ("real", eager)):
        with pytest.warns(UserWarning, match=r"^a call leaves tensors in self\.attention"):
            artifacts.append(export(model, (torch.randn(2, 3),), out=tmp_path / name, dynamic_shapes=SIZES))
    assert artifacts[0].graph_id == artifacts[1].graph_id
    compare_calls(loaded(artifacts[0], tmp_path, eager), eager)
