"""Sizes of 0 and 1, which a graph has no branch for: it computes what eager does, or they are refused at the export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Does
from tests.support.setups import loaded
from weightswap_exporter import export, skeleton
from weightswap_exporter.capture import trials
from weightswap_runtime import CaptureError, InputMismatch

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(4))
LARGEST = 9


def pooled(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) / max(x.shape[0], 1) * m.w


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 1:
        m.calls.add_(1)
    return x * m.w + m.calls


def checked(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 2:
        raise ValueError("too few")
    return x * m.w


def asserted(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] > 0)
    return x * m.w


# what asks, and the least size at which it answers as for larger ones
ASKING: dict[str, tuple[Callable[[Any, torch.Tensor], Any], int]] = {
    "more than one": (lambda m, x: x.sum(0) * m.w if x.shape[0] > 1 else -m.w, 2),
    "one, from the left": (lambda m, x: -m.w if 1 == x.size(0) else x.sum(0) * m.w, 2),  # noqa: SIM300
    "one of": (lambda m, x: -m.w if x.shape[0] in (0, 1) else x.sum(0) * m.w, 2),
    "a shape": (lambda m, x: -m.w if x.shape == (1, 3) else x.sum(0) * m.w, 2),
    "none": (lambda m, x: -m.w if x.shape[0] == 0 else x.sum(0) * m.w, 1),
    "truth": (lambda m, x: x.sum(0) * m.w if x.shape[0] else -m.w, 1),
    "no elements": (lambda m, x: x.sum(0) * m.w if x.numel() else -m.w, 1),
    "half": (lambda m, x: -m.w if x.shape[0] // 2 == 0 else x.sum(0) * m.w, 2),
    "a quotient": (lambda m, x: -m.w if 6 / x.shape[0] == 6 else x.sum(0) * m.w, 2),
    "a maximum": (pooled, 1),
    "a maximum of torch's": (lambda m, x: x.new_ones(torch.sym_max(x.shape[0], 1)) * m.w[0], 1),
    "a matrix": (lambda m, x: m.mix(x) if x.shape[0] > 1 else x @ m.mix.weight, 2),
    "state": (counted, 2),
    "an error": (checked, 2),
    "a check": (asserted, 1),
    "a norm in training": (lambda m, x: m.norm(x) * m.w, 2),
    "a part's size": (lambda m, x: x.sum(0) / len(x[:2]) * m.w, 2),
    "a part without elements": (lambda m, x: x.sum(0) * m.w if x[:1].numel() else -m.w, 1),
    "dimensions that are left": (lambda m, x: x.sum(0) * m.w if x.squeeze().dim() == 2 else -m.w, 2),
    "nearly the same": (lambda m, x: x * m.w if x.shape[0] > 1 else x * m.w * 1.002, 2),
    "weights that are still zero": (lambda m, x: x * m.zero.sum() if x.shape[0] > 1 else x * m.zero.prod(), 2),
    "a buffer that is still zero": (lambda m, x: x * m.w if x.shape[0] > 1 else x * m.w + m.shift, 2),
    "a flag that is still false": (lambda m, x: x * m.w if x.shape[0] > 1 else (x * m.w).masked_fill(m.flag, 1), 2),
    "a complex weight that is still zero": (lambda m, x: x * m.w * (m.phase.abs() if x.shape[0] < 2 else 0), 2),
    "integers that are still zero": (lambda m, x: x * m.w if x.shape[0] > 1 else x * m.w + m.code, 2),
    "state that is still zero": (lambda m, x: x + (m.calls.add_(1) if x.shape[0] > 1 else m.calls.mul_(2).add_(1)), 2),
    "other keys": (lambda m, x: {"a" if x.shape[0] > 1 else "b": x * m.w}, 2),
    "a write to a weight": (lambda m, x: x * (m.w if x.shape[0] > 1 else m.w.data.mul_(1)), 2),
    "a random mask": (lambda m, x: torch.dropout(x, 0.5, True) * m.w if x.shape[0] > 1 else -m.w, 2),
}
# what asks, and computes the same in both branches
ALIKE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "the only row": lambda m, x: (x * m.w).mean(0) if x.shape[0] != 1 else (x * m.w)[0],
    "nothing to add": lambda m, x: (x * m.w).sum(0) if x.shape[0] else torch.zeros(3),
    "a minimum": lambda m, x: x.sum(0) * m.w * min(x.shape[0], 2),
    "large": lambda m, x: (x * m.w).sum(0) if x.shape[0] < 100 else -m.w,
}


def model(act: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    norm, calls = nn.BatchNorm1d(3), nn.Buffer(torch.zeros(1))
    return Does(
        act,
        w=nn.Parameter(torch.rand(3) + 0.5),
        norm=norm,
        calls=calls,
        mix=nn.Linear(3, 3),
        s=nn.Parameter(torch.ones(())),
        zero=nn.Parameter(torch.zeros(2)),
        shift=nn.Buffer(torch.zeros(3)),
        flag=nn.Buffer(torch.zeros(3, dtype=torch.bool)),
        phase=nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
        code=nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False),
    )


def answer(call: Any, size: int) -> Any:
    torch.manual_seed(1)
    call = copy.deepcopy(call) if isinstance(call, nn.Module) else call  # a server begins with the same state
    with torch.no_grad():
        return call(torch.randn(size, 3, generator=torch.Generator().manual_seed(size)))


def check(eager: nn.Module, served: Any, sizes: range) -> None:
    for size in sizes:
        torch.testing.assert_close(answer(served, size), answer(eager, size), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "sample", [X, pytest.param(torch.zeros(6, 3), marks=pytest.mark.slow)], ids=["numbers", "zeros"]
)
@pytest.mark.parametrize("name", ASKING)
@pytest.mark.filterwarnings("ignore:the exported graph behaves as in training")
def test_a_size_that_computes_something_else_is_refused(name: str, sample: torch.Tensor, tmp_path: Path) -> None:
    act, least = ASKING[name]
    eager = model(act)
    for less in range(least):
        shapes = ({0: Dim("rows", min=less, max=LARGEST)},)
        with pytest.raises(CaptureError, match=rf"With x\.shape\[0\] = {least - 1}.*Dim min={least}"):
            export(eager, (sample,), out=tmp_path / "a", dynamic_shapes=shapes)
    artifact = export(eager, (sample,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows", min=least, max=LARGEST)},))
    served = loaded(artifact, tmp_path, eager)
    check(eager, served, range(least, LARGEST + 1))
    with pytest.raises(InputMismatch):
        answer(served, least - 1)


@pytest.mark.parametrize("name", ALIKE)
def test_a_size_that_computes_the_same_is_served(name: str, tmp_path: Path) -> None:
    eager = model(ALIKE[name])
    artifact = export(eager, (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows", max=LARGEST)},))
    check(eager, loaded(artifact, tmp_path, eager), range(LARGEST + 1))


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    eager = model(counted)
    before = {name: value.clone() for name, value in eager.state_dict().items()}
    state = torch.get_rng_state()
    export(eager, (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows", min=2)},))
    for act in (counted, lambda m, x: x * m.w if x.shape[0] > 1 else m.w.data.mul_(2)):
        eager.act = act
        with pytest.raises(CaptureError):
            export(eager, (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")},))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in eager.state_dict().items())


@pytest.mark.parametrize("name", ["more than one", "none", "state", "a matrix"])
def test_skeletons_are_tried_with_random_numbers(name: str, tmp_path: Path) -> None:
    act, least = ASKING[name]
    with skeleton():
        eager = model(act)
    with pytest.raises(CaptureError, match=f"Dim min={least}"):
        export(eager, (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")},))
    export(eager, (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows", min=least)},))


@pytest.mark.parametrize("mask", [torch.ones, torch.zeros], ids=["ones", "zeros"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.complex64], ids=str)
def test_masks_are_tried_with_other_values(mask: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    def act(m: Any, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, mask = given
        return x * m.w * (1 if x.shape[0] > 1 else 1 + mask.to(torch.complex64).abs()[:, None])

    shapes = (({0: (rows := Dim("rows", min=1, max=LARGEST))}, {0: rows}),)
    with pytest.raises(CaptureError, match="Dim min=2"):
        export(model(act), ((X, mask(len(X), dtype=dtype)),), out=tmp_path / "a", dynamic_shapes=shapes)


class Ragged(nn.Module):
    """Sums of numbers of which each row has some; `empty` is what it adds for no rows or no numbers at all."""

    def __init__(self, empty: float) -> None:
        super().__init__()
        self.w, self.empty = nn.Parameter(torch.ones(4)), empty

    def forward(self, features: dict[str, Any]) -> torch.Tensor:
        lengths, ids = features["lengths"], features["ids"]
        rows = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths, output_size=ids.shape[0])
        sums = torch.zeros(lengths.shape[0]).index_add(0, rows, self.w[ids])
        return sums if lengths.shape[0] * ids.shape[0] > 0 else sums + self.empty


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.uint8], ids=str
)
def test_inputs_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    eager = model(lambda m, x: x.float().sum(0) * m.w if x.shape[0] > 1 else -m.w)
    if dtype is torch.complex64:
        eager.act = lambda m, x: x.abs().sum(0) * m.w if x.shape[0] > 1 else -m.w
    with pytest.raises(CaptureError, match="Dim min=2"):
        export(eager, (X.to(dtype),), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")},))


def test_ids_that_are_all_zero_are_not_enough(tmp_path: Path) -> None:
    eager = Does(lambda m, ids: m.table(ids).sum(0) if ids.shape[0] > 1 else torch.zeros(3))
    eager.table = nn.Embedding(5, 3, padding_idx=0)
    with pytest.raises(CaptureError, match="Dim min=2"):
        export(eager, (torch.zeros(6, dtype=torch.int64),), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")},))


def test_rows_that_count_what_is_cut(tmp_path: Path) -> None:
    features = {"lengths": torch.tensor([2, 0, 3]), "ids": torch.tensor([1, 3, 0, 2, 2])}
    shapes = ({"lengths": {0: Dim("rows", max=50)}, "ids": {0: Dim("ids", max=50)}},)
    with pytest.raises(CaptureError, match=r"features\['(lengths|ids)'\]\.shape\[0\] = 0.*Dim min=1"):
        export(Ragged(1.0), (features,), out=tmp_path / "a", dynamic_shapes=shapes)
    eager = Ragged(0.0)
    served = loaded(export(eager, (features,), out=tmp_path / "a", dynamic_shapes=shapes), tmp_path, eager)
    for lengths in ([2, 1], [0, 0], [1], [0]):
        given = {"lengths": torch.tensor(lengths), "ids": torch.ones(sum(lengths), dtype=torch.int64)}
        with torch.no_grad():
            assert torch.equal(served(given), eager(given))


TOGETHER: dict[str, tuple[Callable[[int, int, int], Any], tuple[int, int, int], str]] = {
    "a sum": (lambda a, b, _: a + b > 3, (1, 1, 2), r"x\.shape\[0\] = 1, y\.shape\[0\] = 2"),
    "a sum above a range's end": (lambda a, b, _: a + b > 4, (1, 3, 2), r"x\.shape\[0\] = 1, y\.shape\[0\] = 3"),
    "a difference": (lambda a, b, _: b - a < 9, (1, 2, 2), r"x\.shape\[0\] = 1, y\.shape\[0\] = 10"),
    "any of three": (lambda a, b, c: a > 1 or b > 1 or c > 1, (1, 1, 1), r"(, )?[xyz]\.shape\[0\] = 1){3}"),
    "the largest of three": (lambda a, b, c: max(a, b, c) > 1, (1, 1, 1), r"(, )?[xyz]\.shape\[0\] = 1){3}"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_several_sizes_together(name: str, tmp_path: Path) -> None:
    asks, least, refused = TOGETHER[name]

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return self.w + x.sum(0) if asks(x.shape[0], y.shape[0], z.shape[0]) else -self.w

    shapes = {key: {0: Dim(f"of_{key}", min=size, max=10)} for key, size in zip("xyz", least, strict=True)}
    with pytest.raises(CaptureError, match=f"With {'(' if '{3}' in refused else ''}{refused}.*Dim min=2"):
        export(Three(), (X, X[:4], X[:5]), out=tmp_path / "a", dynamic_shapes=shapes)


def test_names_and_sizes_in_the_advice(tmp_path: Path) -> None:
    """Keyword arguments in another order than the signature's; a derived dimension below the one to change."""

    class Named(nn.Module):
        def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return x + a.sum(0) if b.shape[0] > 1 else x

    given = {"b": X, "a": X[:4]}
    with pytest.raises(CaptureError, match=r"With b\.shape\[0\] = 1"):
        export(Named(), (X[0],), given, out=tmp_path / "a", dynamic_shapes=(None, {0: Dim("of_a")}, {0: Dim("of_b")}))
    rows = Dim("rows", min=2, max=LARGEST)
    shapes = (None, {0: rows}, {0: rows - 1})
    with pytest.raises(CaptureError, match=r"With a\.shape\[0\] = 2.*Dim min=3"):
        export(Named(), (X[0], X, X[:5]), out=tmp_path / "a", dynamic_shapes=shapes)


@pytest.mark.parametrize("asks", [True, False])
def test_a_model_that_checks_its_inputs_is_not_refused_for_those_of_a_trial(asks: bool, tmp_path: Path) -> None:
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting() and (by < 1).any():
                raise ValueError("not positive")
            return x / by.sum() if asks and x.shape[0] > 1 else x / by.sum() + 0

    with pytest.warns(UserWarning, match="could not be tried") if asks else nullcontext():
        export(Divides(), (X, torch.tensor([1, 2])), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")}, None))


OTHERWISE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "exported": lambda m, x: x * m.w * (2 if torch.compiler.is_exporting() else 1),
    "an int": lambda m, x: x * m.w if isinstance(x.shape[0], int) else -x * m.w,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_graph_that_is_not_the_model_is_a_warning(name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="with the sample inputs, the model computes something else than the graph"):
        export(model(OTHERWISE[name]), (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")},))


def test_what_cannot_be_tried_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_FILLED", 1)
    with skeleton():
        large = model(ASKING["none"][0])
    with pytest.warns(UserWarning, match=r"x\.shape\[0\] = 0.*could not be tried.*Dim min=1"):
        export(large, (X,), out=tmp_path / "a", dynamic_shapes=({0: Dim("rows")},))
