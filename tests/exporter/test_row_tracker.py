"""Which rows have changed: a tracker says what a comparison of the tables says, or refuses to be made."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.models import Does
from tests.support.recommender import Recommender, ids_of, train
from weightswap_exporter import RowTracker, export, pack, publish
from weightswap_runtime import CheckpointError, Unsupported, load

SGD, Adagrad, SparseAdam = torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam
LOCAL: dict[str, tuple[bool, Callable[..., Any]]] = {
    "SGD, sparse": (True, lambda tables: SGD(tables, lr=0.1)),
    "SGD": (False, lambda tables: SGD(tables, lr=0.1)),
    "SparseAdam": (True, lambda tables: SparseAdam(list(tables), lr=0.01)),
    "Adagrad, sparse": (True, lambda tables: Adagrad(tables, lr=0.1)),
    "Adagrad": (False, lambda tables: Adagrad(tables, lr=0.1)),
    "Adagrad, fused": (False, lambda tables: Adagrad(tables, lr=0.1, fused=True)),
}


def differing(model: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """The rows that a comparison finds."""
    now = dict(model.named_parameters())
    return {name: (now[name] != old).any(1).nonzero().flatten().tolist() for name, old in before.items()}


def reported(tracker: RowTracker) -> dict[str, list[int]]:
    return {name: ids.tolist() for name, ids in tracker.changed().items()}


def unknown(tracker: RowTracker) -> list[str]:
    """Take what has changed, and return the tables of which the rows are not known."""
    lent = tracker.lend()
    lent.led_to("published")
    return lent.unknown


def copies(model: nn.Module, tracker: RowTracker) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters())
    return {name: tensors[name].detach().clone() for name in tracker.tables}


@contextmanager
def compared(model: nn.Module, tracker: RowTracker) -> Iterator[None]:
    """Expect that what a block changes is what the tracker reports."""
    before = copies(model, tracker)
    yield
    assert reported(tracker) == differing(model, before)


class Tracked:
    """A recommender that is trained by SGD, and tracked."""

    def __init__(self, *, sparse: bool = True, **options: Any) -> None:
        self.model = Recommender(sparse=sparse)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, **options)
        self.tracker = RowTracker(self.model, self.optimizer)

    def train(self, steps: int = 3) -> list[str]:
        """Return the tables of which the rows are not known then."""
        train(self.model, [self.optimizer], steps)
        return unknown(self.tracker)


BOTH = ["users.weight", "items.weight"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("sparse", "build"), LOCAL.values(), ids=LOCAL)
def test_the_rows_are_those_that_a_comparison_finds(
    sparse: bool, build: Callable[..., torch.optim.Optimizer], told: bool
) -> None:
    model = Recommender(sparse=sparse)
    optimizers = [build(model.tables()), torch.optim.AdamW(model.top.parameters())]
    tracker = RowTracker(model, *(optimizers if told else ()))
    assert tracker.tables == ("users.weight", "items.weight")
    for _ in range(3):
        with compared(model, tracker):
            train(model, optimizers)
        assert all(reported(tracker).values())
        tracker.lend().led_to("published")
        assert not any(reported(tracker).values())


def test_rows_of_lookups_without_a_step_have_not_changed() -> None:
    model = Recommender()
    tracker = RowTracker(model)
    model(ids_of(model)).sum().backward()
    with torch.no_grad():
        model(ids_of(model))
    assert not any(reported(tracker).values())


def test_lookups_that_scale_rows_change_them_even_without_a_step() -> None:
    model = nn.Sequential(nn.Embedding(500, 4, max_norm=0.1))
    tracker = RowTracker(model)
    with compared(model, tracker), torch.no_grad():
        model(torch.tensor([[7, 8], [400, 7]]))
    assert reported(tracker) == {"0.weight": [7, 8, 400]}
    assert unknown(tracker) == []


class Shifted(nn.Embedding):
    """Looks up other ids than it is called with."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids + 1)


def test_lookups_of_other_ids_than_those_of_the_call_do_not_hide_what_they_scale() -> None:
    model = Shifted(500, 4, max_norm=0.1)
    tracker = RowTracker(model)
    model(ids=torch.tensor([7, 8]))
    assert unknown(tracker) == ["weight"]
    table = nn.Embedding(500, 4, max_norm=0.1)
    tracker = RowTracker(table)
    table.register_forward_pre_hook(lambda _, args: args[0] + 1)
    with compared(table, tracker):
        table(torch.tensor([7, 8]))
    assert reported(tracker) == {"weight": [8, 9]}
    assert unknown(tracker) == []


def test_a_model_whose_lookups_are_watched_is_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(500, 4, max_norm=0.1))
    tracker = RowTracker(model)
    model[0].max_norm = None
    export(model, (torch.tensor([1, 2]),), out=tmp_path / "a")
    assert not any(reported(tracker).values())


def test_a_table_that_is_also_the_last_layer_changes_wherever_it_has_a_gradient() -> None:
    table, head = nn.Embedding(60, 4, padding_idx=0), nn.Linear(4, 60, bias=False)
    head.weight = table.weight
    model = Does(lambda m, ids: m.head(m.table(ids)), table=table, head=head)
    optimizer = SGD(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizer)
    assert tracker.tables == ("table.weight",)
    with compared(model, tracker):
        (model(torch.tensor([0, 3])) - 1).pow(2).sum().backward()
        optimizer.step()
    assert len(reported(tracker)["table.weight"]) == 60
    tracker.mark("head.weight", [5])


SHARING: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "turned": lambda weight: weight.data.t(),
    "a part": lambda weight: weight.data[:2],
}


@pytest.mark.parametrize("view", SHARING.values(), ids=SHARING)
def test_a_table_whose_memory_another_parameter_has_is_refused(view: Callable[[nn.Parameter], torch.Tensor]) -> None:
    model = Recommender()
    model.head = nn.Linear(1, 1)
    model.head.weight = nn.Parameter(view(model.items.weight))
    says = r"items\.weight has memory of head\.weight, which is another tensor.* Tie"
    with pytest.raises(CheckpointError, match=says):
        RowTracker(model)
    assert RowTracker(model, tables=["users.weight"]).tables == ("users.weight",)
    model.head.weight = model.items.weight
    RowTracker(model)


def test_tables_that_are_parts_of_one_memory_are_tracked_apart() -> None:
    model, memory = Recommender(sparse=False), torch.randn(45_000, 16)
    model.users.weight, model.items.weight = (nn.Parameter(part) for part in memory.split([5_000, 40_000]))
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    tracker = RowTracker(model, optimizer)
    with compared(model, tracker):
        train(model, [optimizer])


SPREADING: dict[str, tuple[Callable[..., Any], str]] = {
    "momentum": (lambda tables: SGD(tables, lr=0.1, momentum=0.9), "users.weight: the momentum of SGD keeps"),
    "weight decay": (lambda tables: SGD(tables, lr=0.1, weight_decay=0.1), "the weight decay of SGD changes all rows"),
    "Adagrad without eps": (lambda tables: Adagrad(tables, eps=0), "Adagrad with eps=0 makes NaN"),
    "eps that is zero in the table's dtype": (lambda tables: Adagrad(tables, eps=1e-50), "has to be 1.2e-38 or more"),
    "maximize": (lambda tables: SGD(tables, lr=0.1, maximize=True), "negate the loss instead"),
    "maximize of Adagrad": (lambda tables: Adagrad(tables, maximize=True), "Adagrad with maximize=True makes 0.0"),
    "lr is NaN": (lambda tables: SGD(tables, lr=torch.tensor(torch.nan)), "SGD with lr=nan changes rows that"),
    "lr is infinite": (lambda tables: Adagrad(tables, lr=float("inf")), "Adagrad with lr=inf changes rows that"),
    "decay of Adagrad": (lambda tables: Adagrad(tables, weight_decay=0.1), "the weight decay of Adagrad"),
    "Adam": (torch.optim.Adam, "the moments of Adam keep changing rows in steps in which they have no gradient"),
    "AdamW": (torch.optim.AdamW, "the weight decay of AdamW changes all rows at each step"),
    "RMSprop": (torch.optim.RMSprop, r"may change rows that have no gradient \(RowTracker\(row_local=\[RMSprop\]\)"),
}


@pytest.mark.parametrize(("build", "says"), SPREADING.values(), ids=SPREADING)
def test_an_optimizer_that_changes_other_rows_is_refused_at_once(build: Callable[..., Any], says: str) -> None:
    model = Recommender(sparse=False)
    optimizer = build(list(model.tables()))
    with pytest.raises(Unsupported, match=says) as refused:
        RowTracker(model, optimizer)
    assert "leave it out of RowTracker(tables=): it is then compared" in str(refused.value)
    assert "write_delta(last, new, out)" in str(refused.value)
    RowTracker(model, torch.optim.AdamW(model.top.parameters()), row_local=[type(optimizer)])


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 1e-4), (torch.bfloat16, 1e-10), (torch.float64, 1e-50)])
def test_the_least_eps_is_that_of_the_dtype_of_the_table(dtype: torch.dtype, least: float) -> None:
    model = Recommender(sparse=False, dtype=dtype)
    optimizer = Adagrad(model.parameters(), eps=least)
    tracker = RowTracker(model, optimizer)
    with compared(model, tracker):
        model(ids_of(model)).sum().backward()
        optimizer.step()
    if dtype is torch.float16:
        says = r"eps=1e-10 makes NaN .* a table of torch\.float16 it has to be 6\.1e-05"
        with pytest.raises(Unsupported, match=says):
            RowTracker(model, Adagrad(model.parameters()))


LATER: dict[str, Callable[[SGD, nn.Parameter], object]] = {
    "a new group": lambda first, items: first.add_param_group({"params": [items], "momentum": 0.5}),
    "a new momentum": lambda first, items: first.param_groups[0].update(momentum=0.9),
    "a new lr": lambda first, items: first.param_groups[0].update(lr=float("nan")),
    "a new optimizer": lambda first, items: torch.optim.Adam([items]),
}


@pytest.mark.parametrize("late", LATER)
def test_an_optimizer_that_comes_later_is_refused_before_it_changes_anything(late: str) -> None:
    model = Recommender(sparse=False)
    first = SGD([model.users.weight, *model.top.parameters()], lr=0.1)
    tracker = RowTracker(model, first)
    second = LATER[late](first, model.items.weight) or first
    model(ids_of(model)).sum().backward()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with pytest.raises(Unsupported):
        second.step()
    assert not any(differing(model, {name: before[name] for name in tracker.tables}).values())
    RowTracker(model, tables=["users.weight" if "group" in late or "optimizer" in late else "items.weight"])


def test_optimizers_within_others_are_examined() -> None:
    class Accelerated(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = Recommender(sparse=False)
    RowTracker(model, Accelerated(SGD(model.parameters(), lr=0.1)))
    with pytest.raises(Unsupported):
        RowTracker(model, Accelerated(torch.optim.Adam(model.parameters())))


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("told", [True, False])
def test_steps_of_torchrecs_optimizers_are_those_of_the_ones_within(told: bool, is_wrapped: bool) -> None:
    pytest.importorskip("torchrec")
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    def combined(model: Recommender, build: Callable[..., Any]) -> Any:
        both = {"tables": model.tables(), "top": model.top.parameters()}
        named = {part: {f"{part}.{n}": each for n, each in enumerate(tensors)} for part, tensors in both.items()}
        parts = {"tables": build, "top": torch.optim.AdamW}
        optimizer: Any = CombinedOptimizer([(part, KeyedOptimizerWrapper(named[part], parts[part])) for part in parts])
        if is_wrapped:
            stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.5)]
            clipped = GradientClippingOptimizer(optimizer, GradientClipping.NORM, max_gradient=1.0)
            optimizer = WarmupOptimizer(clipped, stages, lr=0.1)
        return optimizer

    model = Recommender(sparse=False)
    optimizer = combined(model, lambda tables: SGD(tables, lr=0.1))
    tracker = RowTracker(model, *[optimizer] if told else [])
    for _ in range(3):
        with compared(model, tracker):
            train(model, [optimizer])
        assert unknown(tracker) == []
    adam = combined(model, torch.optim.Adam)
    with pytest.raises(Unsupported, match="the moments of Adam keep"):
        train(model, [adam])


def test_steps_of_a_compiled_training_are_noticed() -> None:
    tracked = Tracked(sparse=False)
    compiled = torch.compile(tracked.model, backend="eager", fullgraph=True)
    with compared(tracked.model, tracked.tracker):
        compiled(ids_of(tracked.model)).sum().backward()
        tracked.optimizer.step()
    assert unknown(tracked.tracker) == []


def test_what_is_not_tracked_may_have_any_optimizer() -> None:
    model = Recommender(sparse=False)
    optimizers = [SGD([model.items.weight], lr=0.1), torch.optim.AdamW([model.users.weight])]
    tracker = RowTracker(model, *optimizers, tables=["items.weight"])
    with compared(model, tracker):
        train(model, optimizers)
    assert list(reported(tracker)) == ["items.weight"]


def test_marked_rows_of_any_tensor_are_reported() -> None:
    model = Recommender()
    model.register_buffer("cache", torch.zeros(20, 3))
    tracker = RowTracker(model, tables=["cache"])
    for ids in ([3, 1], torch.tensor([[9, 3]]), np.array([19], np.int32), []):
        tracker.mark("cache", ids)
    assert reported(tracker) == {"cache": [1, 3, 9, 19]}
    unknown = tracker.lend().unknown
    tracker.mark("cache", [2])
    assert (unknown, reported(tracker)) == ([], {"cache": [1, 2, 3, 9, 19]})


@pytest.mark.parametrize(
    ("name", "ids", "says"),
    [
        ("item", [1], "'item' is not a table of this tracker, which has items.weight, users.weight"),
        ("items.weight", [-1, 3], "items.weight has the rows 0 to 39999, got -1 to 3"),
        ("items.weight", [40_000], "got 40000 to 40000"),
        ("items.weight", [0.5], r"expected integers, got torch\.float32"),
        ("items.weight", [2**70], r"expected the numbers of rows \("),
        ("items.weight", ["a"], r"expected the numbers of rows \("),
    ],
)
def test_marks_that_cannot_be_right_are_refused(name: str, ids: list[Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        RowTracker(Recommender()).mark(name, ids)


@pytest.mark.parametrize(
    ("model", "tables", "says"),
    [
        (nn.Linear(3, 3), None, "has no nn.Embedding or nn.EmbeddingBag"),
        (Recommender(), ["item.weight"], "the model has no item.weight; it has users.weight, items.weight"),
        (Recommender().to("meta"), None, "users.weight, items.weight: no dense table with rows and values"),
    ],
)
def test_what_is_no_table_is_refused(model: nn.Module, tables: list[str] | None, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        RowTracker(model, tables=tables)
    with pytest.raises(CheckpointError):
        RowTracker(Recommender(), 3)  # type: ignore[arg-type]


def loaded(model: Recommender) -> None:
    model.load_state_dict(Recommender().state_dict())


def added(model: Recommender) -> None:
    with torch.no_grad():
        model.items.weight[5] += 1


@pytest.mark.parametrize("change", [loaded, added])
def test_changes_in_place_that_nobody_has_marked_are_noticed(change: Callable[[Recommender], None]) -> None:
    tracked = Tracked()
    assert tracked.train() == []
    change(tracked.model)
    assert "items.weight" in tracked.train()  # a step hides nothing
    assert unknown(tracked.tracker) == []
    added(tracked.model)
    tracked.tracker.mark("items.weight", [5])
    assert unknown(tracked.tracker) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_hook_of_a_step_that_changes_all_rows_is_noticed(options: dict[str, bool], when: str) -> None:
    tracked = Tracked(sparse=False, **options)

    @torch.no_grad()
    def decay(*_: object) -> None:
        tracked.model.items.weight.mul_(0.9)

    assert tracked.train() == []
    optimizer = tracked.optimizer
    (optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook)(decay)
    assert tracked.train(1) == ["items.weight"]


def test_a_table_that_is_given_other_memory_may_have_other_values() -> None:
    tracked = Tracked()
    tracked.model.half().float()  # rounds
    assert tracked.train() == BOTH
    assert tracked.train() == []
    tracked.model.items.weight.data = torch.zeros_like(tracked.model.items.weight)
    assert unknown(tracked.tracker) == ["items.weight"]


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_table_that_is_given_another_part_of_its_memory_may_have_other_values(is_strided: bool) -> None:
    tracked = Tracked()
    rows = tracked.model.items.weight
    buffer = torch.zeros(2, *rows.shape)
    rows.data = buffer[0]
    assert unknown(tracked.tracker) == ["items.weight"]
    assert tracked.train() == []
    rows.data = buffer.flatten(0, 1)[::2] if is_strided else buffer[1]
    assert unknown(tracked.tracker) == ["items.weight"]


def closure_of(tracked: Tracked) -> Callable[[], float]:
    def closure() -> float:
        tracked.optimizer.zero_grad()
        loss = tracked.model(ids_of(tracked.model)).sum()
        loss.backward()
        return float(loss.detach())

    return closure


@pytest.mark.parametrize("with_closure", [True, False])
@pytest.mark.parametrize(("sparse", "fused"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_cleared_within_a_step_is_no_sign_of_no_change(
    set_to_none: bool, sparse: bool, fused: bool, with_closure: bool
) -> None:
    tracked = Tracked(sparse=sparse, fused=fused)
    tracked.optimizer.register_step_post_hook(lambda *_: tracked.optimizer.zero_grad(set_to_none))
    if with_closure:
        tracked.optimizer.step(closure_of(tracked))
        assert unknown(tracked.tracker) == BOTH
    else:
        assert tracked.train(1) == BOTH


def test_a_fused_step_changes_no_table_that_has_no_gradient() -> None:
    tracked = Tracked(sparse=False, fused=True)
    tracked.model.users(torch.tensor([7])).sum().backward()
    tracked.optimizer.step()
    assert reported(tracked.tracker) == {"users.weight": [7], "items.weight": []}
    assert unknown(tracked.tracker) == []


OWN = {"each": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_rows_of_a_step_that_has_not_ended_are_not_known(options: dict[str, bool]) -> None:
    tracked, found = Tracked(sparse=False, **options), []
    hook = tracked.optimizer.register_step_post_hook(lambda *_: found.append(unknown(tracked.tracker)))
    tracked.train()
    assert found == [BOTH] * 3
    hook.remove()
    assert unknown(tracked.tracker) == []
    assert tracked.train() == []


@pytest.mark.parametrize("again", ["taken", "stepped", "another optimizer"])
@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_rows_of_a_step_that_has_failed_are_not_known(options: dict[str, bool], again: str) -> None:
    tracked = Tracked(sparse=False, **options)

    def fail(*_: object) -> None:
        raise ValueError("failed")

    hook = tracked.optimizer.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="failed"):
        tracked.train()
    hook.remove()
    if again == "another optimizer":
        del hook
        tracked.optimizer = None
        gc.collect()
        tracked.optimizer = SGD(tracked.model.parameters(), lr=0.1, **options)
    assert (unknown(tracked.tracker) if again == "taken" else tracked.train()) == BOTH
    tracked.train()
    assert tracked.train() == []


def alone(weight: nn.Parameter) -> nn.Module:
    return Does(lambda m, x: x, table=weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_gradient_of_minus_zero_changes_rows_of_minus_zero(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.full((9, 4), -0.0, dtype=dtype))
    tracker = RowTracker(alone(weight), optimizer := SGD([weight], lr=0.1), tables=["table"])
    weight.grad = torch.zeros_like(weight)
    weight.grad[[2, 5]] = -weight.grad[[2, 5]]
    before = weight.detach().clone()
    optimizer.step()
    changed = (before.view(torch.uint8) != weight.detach().view(torch.uint8)).any(1).nonzero().flatten().tolist()
    assert reported(tracker) == {"table": changed} == {"table": [2, 5]}


class Turning(torch.optim.Optimizer):
    """Changes the rows of a gradient, of any dtype."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter[parameter.grad.any(1)] *= -1


def test_tables_of_complex_numbers_need_an_optimizer_that_is_known_to_change_rows_alone() -> None:
    weight = nn.Parameter(torch.ones((9, 4), dtype=torch.complex64))
    with pytest.raises(Unsupported, match=r"table: SGD makes 0\.0 of each -0\.0 in rows of torch\.complex64"):
        RowTracker(alone(weight), SGD([weight], lr=0.1), tables=["table"])
    optimizer = Turning([weight])
    tracker = RowTracker(alone(weight), optimizer, tables=["table"], row_local=[Turning])
    weight[torch.tensor([3, 4])].real.sum().backward()
    optimizer.step()
    assert reported(tracker) == {"table": [3, 4]}


def test_a_step_with_a_closure_has_the_gradient_of_its_closure() -> None:
    tracked = Tracked()
    with compared(tracked.model, tracked.tracker):
        tracked.optimizer.step(closure_of(tracked))
    assert unknown(tracked.tracker) == []


def test_a_tracker_that_is_dropped_listens_no_more() -> None:
    model = nn.Sequential(nn.Embedding(500, 4, max_norm=0.1))
    tracker = RowTracker(model)
    reference = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert reference() is None
    assert not model[0]._forward_pre_hooks
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["lent", "in a cycle"])
def test_a_tracker_that_ends_within_a_step_does_not_break_it(form: str) -> None:
    model = nn.Sequential(nn.Embedding(500, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    ended = []
    hook = register_optimizer_step_post_hook(lambda *_: ended.append((gc.collect(), reference())))
    first, second = RowTracker(model), RowTracker(model)
    reference = weakref.ref(first)
    if form == "lent":
        first.lend()  # as a publication that fails does
    else:
        first.cycle = first  # type: ignore[attr-defined]
    gc.disable()
    try:
        del first
        optimizer.step()
    finally:
        gc.enable()
        hook.remove()
    assert ended[0][1] is None
    assert reported(second) == {"0.weight": [1]}


DISTRIBUTED = """
import sys, torch
from torch import distributed, nn
from tests.support.recommender import Recommender, train
from weightswap_exporter import RowTracker

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
for sparse in (False, True):
    torch.manual_seed(0)
    model = Recommender(sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = nn.parallel.DistributedDataParallel(model)
    tracker = RowTracker(parallel, optimizer)
    before = model.items.weight.detach().clone()
    torch.manual_seed(rank + 1)
    train(parallel, [optimizer], 1)
    changed = (model.items.weight != before).any(1).nonzero().flatten().tolist()
    assert tracker.changed()["module.items.weight"].tolist() == changed
    assert len(changed) > 40  # a process has looked up 32
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_rows_that_another_process_has_looked_up_are_known(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", DISTRIBUTED], {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"env": os.environ | environment, "stderr": subprocess.PIPE, "text": True}
    for process in [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes) for rank in range(2)]:
        said = process.communicate(timeout=200)[1]
        assert process.returncode == 0, said


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of processes, as torchrec wants one."""
    pytest.importorskip("torchrec")
    import torch.distributed as dist

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FUSED = ["torch.optim.SGD", "torch.optim.Adagrad", "torchrec.optim.RowWiseAdagrad"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("optimizer", FUSED)
def test_fused_optimizers_of_torchrec_change_what_its_tracker_knows(
    optimizer: str, is_pooled: bool, one_process: None
) -> None:
    from tests.support.sharded import Sharded

    sharded = Sharded(optimizer, is_pooled=is_pooled)
    tracker = RowTracker(sharded.model, sharded.model.fused_optimizer, *sharded.optimizers)
    assert tracker.tables == sharded.tables
    for steps in (2, 1, 3):
        with compared(sharded.model, tracker):
            sharded.train(steps)
        lent = tracker.lend()
        lent.led_to("published")
        assert lent.unknown == []
        assert sum(len(each.ids) for each in lent.rows) > 20
        assert not any(reported(tracker).values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", FUSED)
def test_tables_that_torchrec_has_sharded_are_published(optimizer: str, one_process: None, tmp_path: Path) -> None:
    from tests.support.sharded import Jagged, Sharded

    plain = Jagged(is_pooled=True)
    batch = plain.batch()
    artifact = export(plain.eval(), batch, out=tmp_path / "jagged.artifact")
    sharded = Sharded(optimizer)
    tracker = RowTracker(sharded.model, sharded.model.fused_optimizer)
    served = load(artifact)
    for step in range(4):
        sharded.train(2)
        packed = publish(sharded.model, tmp_path / "out", artifact, step=step, rows=tracker, check=True).wait(120)
        assert bool(packed.base) == bool(step)
        served.swap(packed.path)
        with torch.no_grad():
            expected = sharded.model(*batch)
        assert torch.allclose(served(*batch), expected)  # fbgemm's own sums
    assert packed.weights_id == pack(sharded.model, artifact, out=tmp_path / "e.safetensors").weights_id


@pytest.mark.filterwarnings("ignore")
def test_tables_that_torchrec_has_sharded_are_swapped_from_memory(one_process: None, tmp_path: Path) -> None:
    from tests.support.sharded import Jagged, Sharded

    plain = Jagged(is_pooled=True)
    artifact = export(plain.eval(), plain.batch(), out=tmp_path / "jagged.artifact")
    sharded = Sharded(FUSED[0])
    tracker = RowTracker(sharded.model, sharded.model.fused_optimizer)
    served = load(artifact)
    for kind in ("full", "delta", "delta"):
        sharded.train(2)
        receipt = served.swap(sharded.model, rows=tracker)
        assert receipt.kind == kind
        assert receipt.weights_id == pack(sharded.model, artifact, out=tmp_path / "e.safetensors").weights_id
    with pytest.raises(CheckpointError):
        RowTracker(sharded.model)
    del tracker
    RowTracker(sharded.model)


@pytest.mark.filterwarnings("ignore")
def test_a_tracker_of_torchrec_that_is_there_needs_our_consumer(one_process: None) -> None:
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

    from tests.support.sharded import Sharded

    first, second = Sharded(FUSED[0]), Sharded(FUSED[0])
    first.model.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["checkpoints"]))
    with pytest.raises(CheckpointError, match="has no consumer 'weightswap'"):
        RowTracker(first.model)
    theirs = second.model.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["checkpoints", "weightswap"]))
    tracker = RowTracker(second.model)
    second.train(2)
    rows = tracker.lend().rows
    ids = theirs.get_unique_ids("checkpoints")
    assert {each.name: each.ids.tolist() for each in rows} == {f"{name}.weight": ids[name].tolist() for name in ids}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "features",
    [[{"p": "a", "q": "abc"}], [{"p": "abc"}, {"q": "abc"}], [{"p": "ab", "r": "c"}, {"q": "bc", "s": "a"}]],
    ids=["one collection", "two collections", "in parts"],
)
def test_a_feature_of_several_sharded_tables_changes_each(features: list[dict[str, str]], one_process: None) -> None:
    from tests.support.sharded import Towers, bags, batch, shard

    model = shard(Towers(*[bags(**each) for each in features]))
    tracker = RowTracker(model, model.fused_optimizer)
    assert len(tracker.tables) == sum(map(len, features))
    for _ in range(3):
        before = copies(model, tracker)
        model(*batch()).backward()
        changed = differing(model, before)
        assert all(changed.values())
        lent = tracker.lend()
        lent.led_to("published")
        assert all(set(changed[each.name]) <= set(each.ids.tolist()) for each in lent.rows)


@pytest.mark.filterwarnings("ignore")
def test_sharded_tables_may_have_the_name_of_what_they_are_in(one_process: None) -> None:
    from tests.support.sharded import Towers, bags, batch, shard

    model = shard(Towers(bags(one="ab"), bags(top="bc")))
    tracker = RowTracker(model, model.fused_optimizer)
    assert tracker.tables == ("one.tables.embedding_bags.one.weight", "two.tables.embedding_bags.top.weight")
    before = copies(model, tracker)
    model(*batch()).backward()
    reports = reported(tracker)
    assert all(set(rows) <= set(reports[name]) for name, rows in differing(model, before).items())


@pytest.mark.filterwarnings("ignore")
def test_lookups_beside_the_forward_of_a_sharded_model_are_known(one_process: None) -> None:
    from tests.support.sharded import Towers, bags, batch, shard

    model = shard(Towers(bags(p="abc")))
    tracker = RowTracker(model, model.fused_optimizer)
    for _ in range(3):
        with compared(model, tracker):
            model.module(*batch()).backward()
        assert unknown(tracker) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_pooled", [True, False])
def test_sharded_tables_whose_rows_are_given_to_other_ids_are_not_tracked(is_pooled: bool, one_process: None) -> None:
    from tests.support.sharded import evicting

    model = evicting(is_pooled=is_pooled)
    with pytest.raises(CheckpointError, match="name its tables in tables="):
        RowTracker(model)
    evicted = f"tables._embedding_module.{'embedding_bags' if is_pooled else 'embeddings'}.e.weight"
    with pytest.raises(Unsupported, match=f"RowTracker: {evicted}: changed by a backward pass"):
        RowTracker(model, tables=[evicted])


@pytest.mark.filterwarnings("ignore")
def test_plain_tables_beside_sharded_ones_are_tracked_by_steps(one_process: None) -> None:
    from tests.support.sharded import Towers, bags, batch, shard

    plain = Towers(bags(p="abc"))
    plain.one["top"] = nn.Sequential(
        nn.Linear(8, 1), Does(lambda m, x: x * m.table.weight[2].sum(), table=nn.Embedding(9, 4))
    )
    model = shard(plain)
    optimizer = SGD([p for name, p in model.named_parameters() if "top" in name], lr=0.1)
    tracker = RowTracker(model, optimizer)
    assert tracker.tables == ("one.tables.embedding_bags.p.weight", "one.top.1.table.weight")
    with compared(model, tracker):
        model(*batch()).backward()
        optimizer.step()
    assert reported(tracker)["one.top.1.table.weight"] == [2]


@pytest.mark.filterwarnings("ignore")
def test_fused_optimizers_that_change_whole_tables_are_refused(one_process: None) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from tests.support.sharded import Towers, bags, shard

    averaging = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD})
    model = shard(Towers(bags(p="abc")), None, sharders=[averaging])
    with pytest.raises(Unsupported, match=r"one\.tables: fbgemm's EMAINPLACE_ROWWISE_ADAGRAD may change rows that are"):
        RowTracker(model)


@pytest.mark.filterwarnings("ignore")
def test_models_of_which_the_tracker_of_torchrec_fails_are_refused(one_process: None) -> None:
    from tests.support.sharded import Towers, bags, batch, shard

    model = shard(Towers(bags(p="ab"), bags(p="c")))
    with pytest.raises(CheckpointError, match="several tables have the name p, by which"):
        RowTracker(model)
    model(*batch()).backward()  # goes on
    with pytest.raises(CheckpointError, match="needs a model with dense parameters"):
        RowTracker(shard(nn.ModuleDict({"alone": bags(p="abc")})))


@pytest.mark.filterwarnings("ignore")
def test_tables_of_torchrec_that_are_not_sharded_are_tracked_by_steps() -> None:
    pytest.importorskip("torchrec")
    from tests.support.sharded import Jagged

    model = Jagged(is_pooled=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizer)
    with compared(model, tracker):
        model(*model.batch()).pow(2).sum().backward()
        optimizer.step()
    assert tracker.tables == ("tables.embedding_bags.first.weight", "tables.embedding_bags.second.weight")


@pytest.mark.filterwarnings("ignore")
def test_tables_that_a_backward_of_torchrec_changes_are_refused() -> None:
    pytest.importorskip("torchrec")
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["t"])
    fused = FusedEmbeddingBagCollection(
        tables=[table], optimizer_type=SGD, optimizer_kwargs={"lr": 0.1}, device=torch.device("cpu")
    )
    model, name = nn.ModuleDict({"fused": fused, "plain": nn.Embedding(9, 4)}), "fused.embedding_bags.t.weight"
    with pytest.raises(Unsupported, match=rf"RowTracker: {name}: changed by a backward pass .*; or leave it out of"):
        RowTracker(model, tables=[name, "plain.weight"])
    assert RowTracker(model).tables == ("plain.weight",)
