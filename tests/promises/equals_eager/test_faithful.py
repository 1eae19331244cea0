"""Loading code of every kind: swap and pack give the weights that eager has after loading, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from weightswap_exporter import export, pack
from weightswap_runtime import WeightsMismatch, load

State = dict[str, Any]


def whole(seed: int, *size: int) -> torch.Tensor:
    """Return integers, whose sums are exact in any order: a transposed weight may use another kernel."""
    return torch.randint(-9, 10, size, generator=torch.Generator().manual_seed(seed)).float()


X = whole(3, 3, 4)


class Pair(nn.Module):
    """Model of two layers; `pre` and `post` are its load hooks."""

    pre: Callable[[Pair, State], object] | None = None
    post: Callable[[Pair], object] | None = None
    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if self.tied:
            self.b.weight = self.a.weight
        self.held = [self.a.weight]
        self.register_load_state_dict_pre_hook(self._before)
        self.register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _before(module: Pair, state: State, *_: Any) -> None:
        if module.pre:
            type(module).pre(module, state)

    @staticmethod
    def _after(module: Pair, _: Any) -> None:
        if module.post:
            with torch.no_grad():
                type(module).post(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) - 3 * self.b(x)


def transpose(model: Pair) -> None:
    model.a.weight.data = model.a.weight.data.t()


def exchange(model: Pair) -> None:
    model.a.weight.data, model.b.weight.data = model.b.weight.data, model.a.weight.data


def copied_into_the_other(model: Pair, state: State) -> None:
    state["b.weight"] = state["a.weight"]


def marked(model: Pair, state: State) -> None:
    if state.pop("transposed", None) is None:
        state["a.weight"] = state["a.weight"].t()


def refused_by_values(model: Pair, state: State) -> None:
    state["a.weight"] = torch.linalg.cholesky(state["a.weight"] @ state["a.weight"].t() + torch.eye(4))


def random(model: Pair, state: State) -> None:
    state["a.weight"] = state["a.weight"] + torch.rand(4, 4)


def added(model: Pair, state: State) -> None:
    state["a.weight"] = state["a.weight"] + model.a.weight.detach()


def doubled(model: Pair) -> None:
    model.a.weight.mul_(2)


def held(model: Pair) -> None:
    model.held[0].mul_(2)


def shared(model: Pair, state: State) -> None:
    state["a.weight"].mul_(2)
    state["b.weight"] = state["a.weight"].view(4, 4)[:]
    state["a.weight"] = state["a.weight"].clone().t()


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an assignment of .data": {"post": transpose},
    "an exchange of .data": {"post": exchange},
    "one key for two weights": {"pre": copied_into_the_other},
    "one key for two weights, one of which is changed": {"pre": copied_into_the_other, "post": doubled},
    "a key that is asked for": {"pre": marked},
    "checks of values": {"pre": refused_by_values},
    "random numbers": {"pre": random},
    "a sum with what was there": {"pre": added},
    "a tied weight that is changed": {"post": doubled, "tied": True},
    "a parameter that is held": {"post": held},
    "views of a changed tensor": {"pre": shared},
}


@pytest.mark.parametrize("marker", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore:how a checkpoint becomes weights:UserWarning")
@pytest.mark.filterwarnings("ignore:no weight uses these checkpoint keys:UserWarning")
def test_weights_are_those_of_eager_or_refused(case: dict[str, Any], marker: bool, tmp_path: Path) -> None:
    kind = type("Model", (Pair,), dict(case))
    checkpoint = {f"{name}.weight": whole(seed, 4, 4) for seed, name in enumerate("ab")}
    example = checkpoint | ({"transposed": torch.zeros(1)} if marker else {})
    model = kind().eval()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def read(model: nn.Module, state: State) -> None:
        model.load_state_dict(state, strict=False)

    artifact = export(model, (X,), out=tmp_path / "a.artifact", load=read, checkpoint=example)
    assert all(map(torch.equal, model.parameters(), before))
    if case.get("tied"):
        checkpoint["b.weight"] = checkpoint["a.weight"].clone()
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file(checkpoint, path)
    eager = kind().eval()
    read(eager, {name: value.clone() for name, value in checkpoint.items()})
    with torch.no_grad():
        expected = eager(X)
    for source in (path, tmp_path / "packed.safetensors"):
        try:
            if source is not path:
                pack(checkpoint, artifact, out=source)
            served = load(artifact, source, keys="checkpoint")
        except WeightsMismatch:
            assert case not in (CASES["nothing"], CASES["one key for two weights"]) or marker
            continue
        assert torch.equal(served(X), expected)


def test_a_key_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    kind = type("Marked", (Pair,), {"pre": marked})
    checkpoint = {"a.weight": whole(0, 4, 4), "b.weight": whole(1, 4, 4), "transposed": torch.zeros(1)}

    def read(model: nn.Module, state: State) -> None:
        model.load_state_dict(state, strict=False)

    with pytest.warns(UserWarning, match="no weight uses these checkpoint keys: transposed"):
        artifact = export(kind().eval(), (X,), out=tmp_path / "a.artifact", load=read, checkpoint=checkpoint)
    assert artifact.manifest.conversion.needed == ("transposed",)
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file(checkpoint, path)
    eager = kind().eval()
    read(eager, checkpoint)
    with torch.no_grad():
        assert torch.equal(load(artifact, path)(X), eager(X))
    del checkpoint["transposed"]
    safetensors.torch.save_file(checkpoint, path)
    with pytest.raises(WeightsMismatch, match="transposed: missing; the loading code checks whether it is present"):
        load(artifact, path)
