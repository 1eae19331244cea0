"""Place of the weights in a checkpoint: given by the caller, or named by the error for a refused checkpoint."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import (
    by_error,
    refuses,
    saved,
    saved_before_zip,
    saved_distributed,
    saved_safetensors,
    tensors,
    weights_id,
)
from tests.support.models import Renamed
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, CheckpointError, WeightsMismatch

State = dict[str, Any]


def prefixed(prefix: str, state: State) -> State:
    return {f"{prefix}{key}": value for key, value in tensors(state).items()}


def other(state: State) -> State:
    """Another set of weights."""
    return {key: value + 1 for key, value in tensors(state).items()}


def flat(tree: State, start: str = "") -> State:
    return {
        name: value
        for key, below in tree.items()
        for name, value in (flat(below, f"{start}{key}.") if isinstance(below, dict) else {start + key: below}).items()
    }


FORMS: dict[str, Callable[[State, Path], Any]] = {
    "a dict": lambda tree, path: tree,
    ".pt": lambda tree, path: saved(path / "c.pt", tree),
    ".safetensors": lambda tree, path: saved_safetensors(path / "c.safetensors", flat(tree)),
    "distributed": lambda tree, path: saved_distributed(path / "dcp", tree),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
Form = Callable[[State, Path], Any]


@every_form
@pytest.mark.parametrize("level", ["ema", "app.model", "dotted.key", "", "model"])
def test_a_level_that_is_named_is_taken_even_if_others_fit(
    level: str, form: Form, renamed: Artifact, tmp_path: Path
) -> None:
    state, wrong = tensors(Renamed().state_dict()), other(Renamed().state_dict())
    trees: dict[str, State] = {
        "ema": {"ema": state, "model": wrong, "state_dict": other(wrong), "step": torch.ones(1)},
        "app.model": {"app": {"model": state, "optim": {"layers.0.bias": torch.ones(1)}}, "model": wrong},
        "dotted.key": {"dotted.key": state, "dotted": {"other": torch.ones(1)}, "model": wrong},
        "model": {"model": state, "state_dict": wrong},
        "": state,
    }
    packed = pack(form(trees[level], tmp_path), renamed, out=tmp_path / "v.safetensors", level=level)
    assert packed.weights_id == weights_id(state, renamed, tmp_path)
    assert (packed.level, packed.ignored) == (level, ())


@every_form
@pytest.mark.parametrize("level", [None, "state_dict"])
def test_a_prefix_leaves_the_other_tensors_out(
    level: str | None, form: Form, renamed: Artifact, tmp_path: Path
) -> None:
    state = Renamed().state_dict()
    inner = prefixed("net.", state) | prefixed("teacher.net.", other(state)) | {"loss": torch.ones(2)}
    tree = {"state_dict": inner, "epoch": torch.ones(1)} if level else inner
    packed = pack(form(tree, tmp_path), renamed, out=tmp_path / "v.safetensors", prefix="net.", level=level)
    assert packed.weights_id == weights_id(tensors(state), renamed, tmp_path)
    assert packed.level == (level or "")
    assert sorted(packed.ignored) == sorted([*prefixed("teacher.net.", state), "loss"])


def test_a_prefix_is_looked_for_on_every_level(renamed: Artifact, tmp_path: Path) -> None:
    state = Renamed().state_dict()
    path = saved(tmp_path / "c.ckpt", {"epoch": 1, "state_dict": prefixed("net.", state) | {"net.extra.b": 1}})
    packed = pack(path, renamed, out=tmp_path / "v.safetensors", prefix="net.")
    assert packed.level == "state_dict"


def test_a_prefix_passes_over_keys_that_are_no_texts(renamed: Artifact, tmp_path: Path) -> None:
    state = prefixed("1.", Renamed().state_dict())
    packed = pack({**state, 1: torch.ones(1), 12: 3}, renamed, out=tmp_path / "v.safetensors", prefix="1.")
    assert packed.ignored == ("1",)


def test_the_prefix_of_a_module(renamed: Artifact, tmp_path: Path) -> None:
    whole = torch.nn.ModuleDict({"net": Renamed(), "loss": torch.nn.Linear(2, 2)})
    packed = pack(whole, renamed, out=tmp_path / "v.safetensors", prefix="net.")
    assert packed.weights_id == weights_id(whole["net"], renamed, tmp_path)
    assert packed.ignored == ("net._extra_state", "loss.weight", "loss.bias")


def test_ignored_names_have_their_prefix(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    with pytest.warns(UserWarning, match="as in training"):
        artifact = export(model.train(), (torch.ones(2, 3),), out=tmp_path / "a.artifact")
    packed = pack(prefixed("net.", model.state_dict()), artifact, out=tmp_path / "v.safetensors", prefix="net.")
    assert packed.ignored == ("net.running_mean", "net.running_var", "net.num_batches_tracked")


@every_form
def test_a_level_and_a_prefix_go_before_the_models_own_loading_code(form: Form, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    artifact = export(model, (torch.zeros(1, 3),), out=tmp_path / "a.artifact")
    state = model.state_dict()
    source = form({"ema": prefixed("net.", state) | {"loss": torch.ones(1)}, "model": other(state)}, tmp_path)
    found = weights_id(source, artifact, tmp_path, model=torch.nn.Linear(3, 2), level="ema", prefix="net.")
    assert found == weights_id(state, artifact, tmp_path)


Make = Callable[[State], State]
BAD: dict[type[Exception], dict[str, tuple[Make, dict[str, Any], str]]] = {
    CheckpointError: {
        "an unknown level": (
            lambda state: {"ema": {"net": state}, "model": other(state), "step": 3},
            {"level": "em"},
            "the state dict: has no level 'em'; it has 'ema.net' (4 tensors), 'model' (4 tensors). Give one of them",
        ),
        "a level that is a tensor": (
            lambda state: {"model": state},
            {"level": "model.layers.0.bias"},
            "has no level 'model.layers.0.bias'; it has 'model' (4 tensors)",
        ),
        "an unknown prefix": (
            lambda state: prefixed("net.", state),
            {"prefix": "nat."},
            "begins with the prefix 'nat.'; they begin with 'net.' (4 tensors), 'net.layers.' (4 tensors)",
        ),
        "levels without tensors": (
            lambda state: {"ema": state, "app": {"model": state}},
            {},
            "It has 'ema' (4 tensors), 'app.model' (4 tensors): pass one of them as level=... (--level)",
        ),
        "nothing at all": (lambda state: {"step": 3}, {}, "holds no tensors with names; give a state dict"),
        "a named level without tensors": (
            lambda state: {"optimizer": {"lr": 3}, "model": state},
            {"level": "optimizer"},
            "the state dict, optimizer: holds no tensors with names; give a state dict",
        ),
    },
    WeightsMismatch: {
        "another level that fits": (
            lambda state: {"ema": state, "step": torch.ones(1)},
            {},
            "1 problem\n  - the names of the graph are in 'ema', where no state dict is expected: pass level='ema'\n"
            "Pass it (--level)",
        ),
        "two levels": (
            lambda state: {"model": state, "module": other(state)},
            {},
            "level='model' or level='module' (-",
        ),
        "a common prefix": (
            lambda state: prefixed("net.", state),
            {},
            "1 problem\n  - its names are those of the graph after 'net.' (all names have it): pass prefix='net.'",
        ),
        "a common prefix of two parts below state_dict": (
            lambda state: {"state_dict": prefixed("module.net.", state), "epoch": 3},
            {},
            "the state dict, state_dict: refused, 1 problem\n  - its names are those of the graph after 'module.net.'",
        ),
        "a prefix of some": (
            lambda state: {"state_dict": prefixed("net.", state) | {"loss": torch.ones(2)}},
            {},
            "after 'net.' (1 other left out): pass prefix='net.'",
        ),
        "a prefix that is too short": (
            lambda state: prefixed("a.net.", state),
            {"prefix": "a."},
            "the state dict, prefix 'a.': refused, 1 problem\n  - its names are those of the graph after 'net.' (all "
            "names have it): pass prefix='a.net.'",
        ),
        "a prefix without its dot": (lambda state: prefixed("net.", state), {"prefix": "net"}, "pass prefix='net.'"),
        "a named level that does not fit": (
            lambda state: {"ema": {"other": torch.ones(1)}, "model": state},
            {"level": "ema"},
            "the state dict, ema: refused, 5 problems",
        ),
    },
}


@pytest.mark.parametrize(("error", "make", "arguments", "says"), by_error(BAD))
def test_a_refusal_names_the_way_out(
    error: type[Exception], make: Make, arguments: dict[str, Any], says: str, renamed: Artifact, tmp_path: Path
) -> None:
    refuses(error, says, make(tensors(Renamed().state_dict())), renamed, tmp_path, **arguments)


FLAT_LEVELS = {  # a distributed checkpoint says itself which parts of a name were keys
    ".safetensors": "'', the top (5 tensors), 'app' (5 tensors), '",
    "distributed": "'app' (1 tensor), 'app.model' (4 tensors). Give one",
}


@pytest.mark.parametrize("name", FLAT_LEVELS)
def test_flat_files_name_the_way_out(name: str, renamed: Artifact, tmp_path: Path) -> None:
    source = FORMS[name]({"app": {"model": tensors(Renamed().state_dict()), "optim": torch.ones(1)}}, tmp_path)
    refuses(WeightsMismatch, "after 'app.model.' (1 other left out)", source, renamed, tmp_path)
    refuses(CheckpointError, f"no level 'app.x'; it has {FLAT_LEVELS[name]}", source, renamed, tmp_path, level="app.x")


class Scaled(torch.nn.Module):
    """Its output depends on an extra state, as TransformerEngine's layers do; a plain one has no extra state."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Extra(Scaled):
    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


X = torch.zeros(1, 3)
SAYS: dict[str, Any] = {
    "bytes": b"scales",
    "a dict": {"scale": 2.0},
    "a text": "recipe",
    "a number": 0,
    "a pair": (1, None),
    "a tensor": torch.ones(2),
}
EMPTY: dict[str, Any] = {"None": None, "an empty dict": {}, "an empty tensor": torch.zeros(0)}
SAVED: dict[str, Callable[[State, Path], Any]] = {
    **{name: form for name, form in FORMS.items() if name != ".safetensors"},
    "before torch 1.6": lambda tree, path: saved_before_zip(path / "c.pth", tree),
    "a level": lambda tree, path: saved(path / "c.pt", {"model": tree, "epoch": 3}),
    "distributed, a level": lambda tree, path: saved_distributed(path / "dcp", {"model": tree, "epoch": 3}),
}


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact of a model that has no extra state."""
    return export(Scaled(), (X,), out=tmp_path_factory.mktemp("unknown") / "a.artifact")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact of a model that has one, of whatever kind: the graph does not depend on it."""
    return export(Extra(b"scales"), (X,), out=tmp_path_factory.mktemp("known") / "a.artifact")


@pytest.mark.parametrize("form", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("extra", SAYS.values(), ids=SAYS)
def test_an_extra_state_is_named(extra: Any, form: Form, known: Artifact, unknown: Artifact, tmp_path: Path) -> None:
    source = form(Extra(extra).state_dict(), tmp_path)
    names = {("_extra_state",), ("model._extra_state",)}
    assert pack(source, known, out=tmp_path / "a.safetensors").ignored in names
    if source == tmp_path / "dcp" and not isinstance(extra, torch.Tensor):  # its content is tensors alone
        with pytest.raises(CheckpointError, match=r'Missing key.* "_extra_state"'):
            pack(source, known, out=tmp_path / "b.safetensors", model=Extra("other"))
    else:
        with pytest.warns(UserWarning, match="its extra state changes extra.*, but the graph keeps the values"):
            packed = pack(source, known, out=tmp_path / "b.safetensors", model=Extra("other"))
        assert packed.ignored == ("_extra_state",)
    message = refuses(WeightsMismatch, "_extra_state: unexpected\n", source, unknown, tmp_path)
    assert re.search(r"such as \S*_extra_state.*ignore=", message)
    assert pack(source, unknown, out=tmp_path / "d.safetensors", ignore="*_extra_state*").ignored in names


@pytest.mark.parametrize("form", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("extra", EMPTY.values(), ids=EMPTY)
def test_an_extra_state_that_says_nothing_is_no_matter(
    extra: Any, form: Form, unknown: Artifact, tmp_path: Path
) -> None:
    model = Extra(extra)
    source = form(model.state_dict(), tmp_path)
    assert weights_id(source, unknown, tmp_path) == weights_id(model, unknown, tmp_path)


def test_extra_states_below_a_prefix_or_in_a_module(unknown: Artifact, tmp_path: Path) -> None:
    def ignored(source: Any, **options: Any) -> list[str]:
        return sorted(pack(source, unknown, out=tmp_path / "v.safetensors", **options).ignored)

    state = {f"net.{key}": value for key, value in Extra(b"1").state_dict().items()} | {"loss._extra_state": b"2"}
    refuses(WeightsMismatch, "_extra_state: unexpected", state, unknown, tmp_path, prefix="net.")
    assert ignored(state, prefix="net.", ignore="net._extra_state") == ["loss._extra_state", "net._extra_state"]
    assert ignored(Extra(io.BytesIO(b"1"))) == ["_extra_state"]
    assert ignored(Extra(io.BytesIO())) == ignored(Scaled().state_dict() | {"_extra_state": b""}) == []
    inner = Scaled().state_dict() | {"linear._extra_state": io.BytesIO(b"1")}
    refuses(WeightsMismatch, "_extra_state: unexpected", inner, unknown, tmp_path)


def test_an_extra_state_beside_other_problems(unknown: Artifact, tmp_path: Path) -> None:
    state = Extra({"scale": 2}).state_dict()
    del state["linear.bias"]
    message = refuses(WeightsMismatch, "2 problems", state, unknown, tmp_path)
    assert "linear.bias: missing" in message
    assert "ignore=" not in message
