"""Recording of the conversion: renames, transforms, code that cannot be recorded, and the messages about it."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support import loading, warm
from tests.support.checkpoints import weights_id
from tests.support.models import Does
from tests.support.setups import different
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import CaptureError, CheckpointError, WeightsMismatch, load
from weightswap_runtime.format.manifest import WeightSource

X = torch.ones(2, 4)
State = dict[str, Any]


def sources(artifact: Any) -> dict[str, WeightSource]:
    return {source.weight: source for source in artifact.manifest.conversion.sources}


class Padded(nn.Module):
    """Loads as transformers' tied heads do, which pad a bias to the rows of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def _load_from_state_dict(self, state: State, prefix: str, *others: Any) -> None:
        bias = state[f"{prefix}linear.bias"]
        missing = self.linear.weight.shape[0] - bias.shape[0]
        state[f"{prefix}linear.bias"] = nn.functional.pad(bias, (0, missing))
        super()._load_from_state_dict(state, prefix, *others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_padding_by_nothing_is_a_rename(tmp_path: Path) -> None:
    artifact = export(Padded().eval(), (X,), out=tmp_path / "a.artifact")
    assert sources(artifact)["linear.bias"] == WeightSource(weight="linear.bias", keys=("linear.bias",))
    assert not (artifact.path / "conversion.pt2").exists()


def test_keys_without_a_weight_are_reported(tmp_path: Path) -> None:
    artifact = export(loading.ExtraState().eval(), (X,), out=tmp_path / "a.artifact")
    extra = ("_extra_state", "linear._extra_state")
    assert artifact.manifest.conversion.ignored == extra
    model = different(loading.ExtraState, 1)
    state = model.state_dict()
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file({name: value for name, value in state.items() if name != extra[1]}, path)
    served = load(artifact)
    assert served.swap(path).ignored == extra[:1]
    assert pack(state, artifact, out=tmp_path / "v.safetensors").ignored == extra


def test_loading_code_that_reads_values_leaves_packing(tmp_path: Path) -> None:
    model = different(loading.ReadsValues, 1)
    with pytest.warns(UserWarning, match=r"cannot be recorded: _rescale \(loading.py, line \d+\): .* pack them on the"):
        artifact = export(model, (X,), out=tmp_path / "a.artifact")
    with torch.no_grad():
        model.linear.weight[0, 0] = 3
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file(checkpoint, path)
    served = load(artifact)
    with pytest.raises(WeightsMismatch, match=r"could not be recorded at export: _rescale \(loading.py, line"):
        served.swap(path)
    with pytest.raises(WeightsMismatch):
        pack(checkpoint, artifact, out=tmp_path / "v.safetensors")
    loaded = different(loading.ReadsValues, 2)
    served.swap(pack(path, artifact, out=tmp_path / "v.safetensors", model=loaded).path)
    model.load_state_dict(checkpoint)
    assert model.linear.weight[0, 0] == 1.5
    with torch.no_grad():
        assert torch.equal(served(X), model(X))
    served.swap(path, keys="fqn")
    assert not torch.equal(served(X), model(X).detach())


def custom() -> nn.Module:
    """Return a model whose checkpoints come in a form that only `read` knows."""
    return Does(lambda m, x: m.linear(x), linear=nn.Linear(4, 4)).eval()


def read(model: nn.Module, checkpoint: State) -> None:
    weight, bias = checkpoint["all"].split([16, 4])
    model.load_state_dict({"linear.weight": weight.view(4, 4), "linear.bias": bias})


def test_a_loading_function_is_traced(tmp_path: Path) -> None:
    example = {"all": torch.zeros(20, device="meta")}
    artifact = export(custom(), (X,), out=tmp_path / "a.artifact", load=read, checkpoint=example)
    checkpoint = {"all": torch.randn(20, generator=torch.Generator().manual_seed(1))}
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file(checkpoint, path)
    model = custom()
    read(model, checkpoint)
    with torch.no_grad():
        assert torch.equal(load(artifact, path)(X), model(X))


LINEAR = {"linear.weight": torch.zeros(4, 4), "linear.bias": torch.zeros(4)}
EXPLICIT: dict[str, tuple[Any, type[Exception], str]] = {
    "another name": ({"linear.weight": torch.zeros(4, 4), "linear.bais": torch.zeros(4)}, CaptureError, "bais"),
    "a key too many": (LINEAR | {"more": torch.zeros(1)}, CaptureError, "more"),
    "a level above": ({"model": {"a": torch.zeros(1)}}, CheckpointError, r"under 'model'; give checkpoint\['model'\]"),
    "a path of nothing": ("nowhere.pt", CheckpointError, "nowhere.pt: no such file"),
    "a number": (3, CheckpointError, "expected a dict of tensors or a path, got a int"),
}


@pytest.mark.parametrize(("checkpoint", "error", "says"), EXPLICIT.values(), ids=EXPLICIT)
def test_an_example_that_the_model_does_not_load_is_refused(
    checkpoint: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        export(custom(), (X,), out=tmp_path / "a.artifact", checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["old.safetensors", "old.pt", "nested.pt"])
def test_an_example_may_be_a_file(name: str, tmp_path: Path) -> None:
    old = loading.Renaming.old(1)
    if name == "old.safetensors":
        safetensors.torch.save_file(old, tmp_path / name)
    else:
        torch.save({"model": old, "epoch": 1} if name == "nested.pt" else old, tmp_path / name)
    artifact = export(loading.Renaming().eval(), (X,), out=tmp_path / "a.artifact", checkpoint=tmp_path / name)
    assert sources(artifact)["blocks.0.inner.weight"].keys == ("blocks.0.weight",)


def test_keys_that_a_loading_function_leaves_out_are_reported(tmp_path: Path) -> None:
    def lenient(model: nn.Module, checkpoint: State) -> None:
        model.load_state_dict(checkpoint, strict=False, assign=True)

    checkpoint = {**custom().state_dict(), "more": torch.zeros(1)}
    with pytest.warns(UserWarning, match="no weight uses these checkpoint keys: more$"):
        artifact = export(custom(), (X,), out=tmp_path / "a.artifact", load=lenient, checkpoint=checkpoint)
    assert artifact.manifest.conversion.ignored == ("more",)


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_wrapper_is_taken_off(wrap: Any, tmp_path: Path) -> None:
    model = different(custom, 1)
    artifact = export(wrap(model), (X,), out=tmp_path / "a.artifact")
    assert artifact.manifest == export(model, (X,), out=tmp_path / "b.artifact").manifest
    assert weights_id(wrap(model), artifact, tmp_path) == weights_id(model, artifact, tmp_path)


class Partly(nn.Module):
    """Loads the first row of a weight only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight[0].copy_(state["row"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Lacking(loading.InPieces):
    """Never loads its gain."""

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state, "gain": self.gain.detach() / 2}, prefix, *rest)


def test_a_weight_that_a_checkpoint_never_gives_is_reported(tmp_path: Path) -> None:
    checkpoint = {"gate": torch.zeros(4, 4), "up": torch.zeros(2, 4)}
    with pytest.warns(UserWarning, match="leaves old values in a part of gain"):
        export(Lacking(), (X,), out=tmp_path / "a.artifact", checkpoint=checkpoint)


def test_weights_of_which_a_checkpoint_gives_a_part_are_reported(tmp_path: Path) -> None:
    says = "recorded: loading a checkpoint leaves old values in a part of weight. A server takes only weight files"
    with pytest.warns(UserWarning, match=says):
        artifact = export(Partly(), (X,), out=tmp_path / "a.artifact", checkpoint={"row": torch.zeros(4)})
    assert all(not source.keys for source in sources(artifact).values())
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file(Partly().state_dict(), path)
    with pytest.raises(WeightsMismatch):
        load(artifact, path)


def tied() -> nn.Module:
    """Return a model with one tensor under two names."""
    model = Does(lambda m, x: m.head(x), embed=nn.Embedding(3, 4), head=nn.Linear(4, 3, bias=False))
    model.head.weight = model.embed.weight
    return model.eval()


def test_tied_tensors_that_loading_tears_apart_are_reported(tmp_path: Path) -> None:
    def read(model: nn.Module, checkpoint: State) -> None:
        scaled = {"embed.weight": checkpoint["w"], "head.weight": checkpoint["w"] * 2}
        model.load_state_dict(scaled, assign=True)

    with pytest.warns(UserWarning, match=r"loading a checkpoint gives embed.weight and head.weight, which are one"):
        export(tied(), (X,), out=tmp_path / "a.artifact", load=read, checkpoint={"w": torch.zeros(3, 4)})


class Twice(nn.Module):
    """One layer in two places, whose loading is traced."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.layers = nn.ModuleList([layer, nn.ReLU(), layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_both_copies_of_a_layer_that_is_there_twice_count(tmp_path: Path) -> None:
    artifact = export(Twice().eval(), (X,), out=tmp_path / "a.artifact")
    assert sources(artifact)["layers.0.bias"].keys == ("layers.0.bias", "layers.2.bias")
    assert artifact.manifest.conversion.ignored == ()
    model, after = different(Twice, 1), different(Twice, 2)
    served = load(artifact, model)
    for keys in (None, "checkpoint"):
        served.swap(after.state_dict(), keys=keys)
        assert torch.equal(served(X), after(X))
    state = after.state_dict() | {"layers.0.bias": torch.ones(4)}
    for keys in (None, "checkpoint"):
        with pytest.raises(WeightsMismatch, match=r"layers\.0\.bias and layers\.2\.bias are one tensor"):
            served.swap(state, keys=keys)


def test_the_last_of_two_tied_tensors_that_have_to_be_cast_counts(tmp_path: Path) -> None:
    names = ("embed.weight", "head.weight")
    checkpoint = {name: torch.zeros(3, 4, dtype=torch.bfloat16) for name in names}
    artifact = export(tied(), (X,), out=tmp_path / "a.artifact", checkpoint=checkpoint)
    assert sources(artifact)["embed.weight"].keys == ("head.weight",)


@pytest.mark.parametrize("hollow", [False, True])
def test_present_values_of_the_model_do_not_become_a_part_of_the_conversion(hollow: bool, tmp_path: Path) -> None:
    """Checkpoints have the difference to the model's values; a hook keeps the parameter itself."""
    with skeleton() if hollow else nullcontext():
        model = Does(lambda m, x: x * m.weight, weight=nn.Parameter(torch.ones(4)))
    weight = model.weight
    model.register_load_state_dict_pre_hook(lambda _, state, *__: state.update(weight=state["weight"] + weight))
    with pytest.raises(CaptureError, match="the loading code uses the model's current values"):
        export(model, (X,), out=tmp_path / "a.artifact")


class Versioned(nn.Module):
    """Doubles what an older version has saved."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def _load_from_state_dict(self, state: State, prefix: str, metadata: State, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_where_the_version_of_a_checkpoint_counts_it_is_packed_with_the_model(tmp_path: Path) -> None:
    """A file of tensors alone has none, and is an old one for the model's own code."""
    model, path = different(Versioned, 1), tmp_path / "c.safetensors"
    with pytest.warns(UserWarning, match="cannot be recorded: loading a checkpoint depends on the version that"):
        artifact = export(model, (X,), out=tmp_path / "a.artifact")
    safetensors.torch.save_file(model.state_dict(), path)
    served = load(artifact, model)
    assert torch.equal(served(X), model(X))
    for refused in (path, dict(model.state_dict()), model.state_dict()):
        with pytest.raises(WeightsMismatch):
            served.swap(refused)
    eager = different(Versioned, 2)
    eager.load_state_dict(safetensors.torch.load_file(path))
    served.swap(pack(path, artifact, out=tmp_path / "v.safetensors", model=different(Versioned, 3)).path)
    assert torch.equal(served(X), eager(X))
    example = {"weight": torch.zeros(4)}  # without a version, as such files are
    served = load(export(model, (X,), out=tmp_path / "b.artifact", checkpoint=example), model)
    served.swap(path, keys="checkpoint")
    assert torch.equal(served(X), eager(X))


class Strict(Versioned):
    """Takes no state dict without a version, as torchvision's MNASNet."""

    def _load_from_state_dict(self, state: State, prefix: str, metadata: State, *rest: Any) -> None:
        if metadata.get("version") is None:
            raise ValueError("no version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Looks(Versioned):
    """Looks at the values of what an older version has saved."""

    def _load_from_state_dict(self, state: State, prefix: str, metadata: State, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / float(state[f"{prefix}weight"].max())
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_model_that_loads_nothing_without_a_version_needs_no_packing(tmp_path: Path) -> None:
    model = different(Strict, 1)
    served = load(export(model, (X,), out=tmp_path / "a.artifact"), model.state_dict())
    assert torch.equal(served(X), model(X))


def test_what_cannot_be_recorded_without_a_version_depends_on_it(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="cannot be recorded: loading a checkpoint depends on the version that"):
        export(different(Looks, 1), (X,), out=tmp_path / "a.artifact")


class KeepsItsOwn(nn.Module):
    """Has a table that it keeps, or makes anew, whatever a checkpoint has."""

    def __init__(self, is_remade: bool) -> None:
        super().__init__()
        self.linear, self.is_remade = nn.Linear(4, 4), is_remade
        self.register_buffer("table", torch.arange(4.0))

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        state[f"{prefix}table"] = torch.arange(4.0) if self.is_remade else self.table
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table


@pytest.mark.parametrize("is_remade", [False, True])
def test_a_weight_that_loading_does_not_take_is_not_read_from_a_checkpoint(is_remade: bool, tmp_path: Path) -> None:
    model = KeepsItsOwn(is_remade).eval()
    with pytest.warns(UserWarning, match=r"no checkpoint key provides the weight\(s\) table"):
        artifact = export(model, (X,), out=tmp_path / "a.artifact")
    state = different(partial(KeepsItsOwn, is_remade), 1).state_dict() | {"table": torch.ones(4)}
    path, served = tmp_path / "c.safetensors", load(artifact, model)
    safetensors.torch.save_file(state, path)
    for refused in (path, dict(state), iter(state.items())):
        with pytest.raises(WeightsMismatch):
            served.swap(refused)
    with pytest.raises(WeightsMismatch, match="does not take table from a checkpoint"):
        pack(state, artifact, out=tmp_path / "v.safetensors")
    eager = KeepsItsOwn(is_remade).eval()
    eager.load_state_dict(dict(state))
    served.swap(pack(path, artifact, out=tmp_path / "v.safetensors", model=KeepsItsOwn(is_remade)).path)
    assert torch.equal(served(X), eager(X))
    served.swap(state, keys="fqn")  # as they are
    assert torch.equal(served(X), nn.functional.linear(X, state["linear.weight"], state["linear.bias"]))


class TiesAgain(nn.Module):
    """Doubles one of two tied tensors on loading, and ties them again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self._tie()
        self.register_load_state_dict_pre_hook(
            lambda _, state, *__: state.update({"embed.weight": state["embed.weight"] * 2})
        )
        self.register_load_state_dict_post_hook(lambda *_: self._tie())

    def _tie(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_a_tied_weight_of_which_loading_computes_one_name_is_packed_with_the_model(tmp_path: Path) -> None:
    model = different(TiesAgain, 1)
    with pytest.warns(UserWarning, match="computes embed.weight without head.weight, under which a state dict has it"):
        artifact = export(model, (X,), out=tmp_path / "a.artifact")
    path, eager = tmp_path / "c.pt", different(TiesAgain, 2)
    torch.save(model.state_dict(), path)
    eager.load_state_dict(torch.load(path))
    with pytest.raises(WeightsMismatch):
        pack(path, artifact, out=tmp_path / "v.safetensors")
    served = load(artifact, pack(path, artifact, out=tmp_path / "v.safetensors", model=different(TiesAgain, 3)).path)
    assert torch.equal(served(X), eager(X))


def test_loading_that_changes_a_constant_is_refused(tmp_path: Path) -> None:
    buffer = nn.Buffer(torch.ones(4), persistent=False)
    model = Does(lambda m, x: x * m.squares, weight=nn.Parameter(torch.ones(4)), squares=buffer)
    model.register_load_state_dict_post_hook(lambda m, _: setattr(m, "squares", m.weight.detach() ** 2))
    with pytest.raises(CaptureError, match="replaces squares, which belongs to the graph"):
        export(model, (X,), out=tmp_path / "a.artifact")
    assert model.squares is buffer


def test_a_state_dict_that_fails_is_named(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no saving today")

    model = Does(lambda m, x: x * m.weight, weight=nn.Parameter(torch.ones(4)))
    model._register_state_dict_hook(fail)
    says = r"model.state_dict\(\) fails: fail \(test_conversion_recording.py, line \d+\): ValueError: no saving today"
    with pytest.warns(UserWarning, match=says):
        export(model, (X,), out=tmp_path / "a.artifact")


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ({"linear.weight": torch.zeros(5, 4), "linear.bias": torch.zeros(4)}, "size mismatch for linear.weight"),
        ({"linear.weight": torch.zeros(4, 4)}, "linear.bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_at_export(checkpoint: State, says: str, tmp_path: Path) -> None:
    def strictly(model: nn.Module, state: State) -> None:
        model.load_state_dict(state, assign=True)

    says = f"a checkpoint like the given one does not load into the model: (.|\n)*{says}"
    with pytest.raises(CaptureError, match=says):
        export(custom(), (X,), out=tmp_path / "a.artifact", load=strictly, checkpoint=checkpoint)
    assert not (tmp_path / "a.artifact").exists()


def test_recurrent_layers_keep_their_own_list_of_weights(tmp_path: Path) -> None:
    model = nn.LSTM(4, 4).eval()
    flat = list(model._flat_weights)
    export(model, (X,), out=tmp_path / "a.artifact", load=lambda m, c: m.load_state_dict(c, assign=True))
    assert all(one is other for one, other in zip(model._flat_weights, flat, strict=True))
    assert all(one is other for one, other in zip(model._flat_weights, model.parameters(), strict=True))


NEEDS_AN_OPERATOR = """
import sys, torch
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from weightswap_runtime import ArtifactError, load

model = load(sys.argv[1])
try:
    model.swap(sys.argv[2], keys="checkpoint")
except ArtifactError as error:
    assert "conversion.pt2: needs torch.ops.weightswap_test.halve.default, which this process lacks" in str(error)
else:
    raise AssertionError
"""


def test_an_operator_that_the_server_lacks_is_named(tmp_path: Path) -> None:
    with torch.library._scoped_library("weightswap_test", "FRAGMENT") as library:
        library.define("halve(Tensor x) -> Tensor")
        library.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")

        def read(model: nn.Module, checkpoint: State) -> None:
            halved = {name: torch.ops.weightswap_test.halve(value) for name, value in checkpoint.items()}
            model.load_state_dict(halved, assign=True)

        artifact = export(custom(), (X,), out=tmp_path / "a.artifact", load=read)
        path = tmp_path / "c.safetensors"
        safetensors.torch.save_file(dict(custom().state_dict()), path)
        load(artifact, path, keys="checkpoint")
    subprocess.run([warm.python(), "-c", NEEDS_AN_OPERATOR, artifact.path, path], check=True)


def test_a_constant_that_loading_fills_is_advised_to_be_a_weight(tmp_path: Path) -> None:
    """A buffer that checkpoints do not have, filled after each loading."""
    turned = nn.Buffer(torch.zeros(3, 3), persistent=False)
    model = Does(lambda m, x: x @ m.turned, linear=nn.Linear(3, 3), turned=turned)
    model.register_load_state_dict_post_hook(lambda m, _: m.turned.copy_(m.linear.weight.detach().T))
    with pytest.warns(UserWarning, match=r"neither a weight nor of the checkpoint; if it is a buffer, register it"):
        export(model.eval(), (torch.ones(2, 3),), out=tmp_path / "a")
