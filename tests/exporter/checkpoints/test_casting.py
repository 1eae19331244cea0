"""Casting: only on request, only floating tensors, only to the dtype that the graph wants, and recorded."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.checkpoints import by_error, refuses, saved_distributed, saved_safetensors, weights_id
from tests.support.loading import Fused
from tests.support.models import Does
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, CheckpointError, WeightFile, WeightsMismatch, load

X = torch.ones(2, 3, dtype=torch.bfloat16)


def mixed_model(dtype: torch.dtype) -> nn.Module:
    """Linear layers in one dtype, a norm that stays F32, a counter, and a tied weight."""
    linear, tied = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, bias=False, dtype=dtype)
    tied.weight = linear.weight
    act = lambda m, x: m.norm(m.linear(x).float()) + m.tied(x) + m.count  # noqa: E731
    return Does(act, linear=linear, norm=nn.LayerNorm(3), tied=tied, count=nn.Buffer(torch.tensor(7))).eval()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(mixed_model(torch.bfloat16), (X,), out=tmp_path_factory.mktemp("mixed") / "mixed.artifact")


CAST = {"F32": ["linear.bias", "linear.weight"]}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
@pytest.mark.parametrize("kind", ["module", "state dict", "nested", "safetensors", "distributed"])
def test_what_the_graph_wants_in_the_dtype_is_cast(kind: str, dtype: Any, mixed: Artifact, tmp_path: Path) -> None:
    model = mixed_model(torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    sources = {
        "module": lambda: model,
        "state dict": lambda: state,
        "nested": lambda: {"model": {f"module.{key}": value for key, value in state.items()}},
        "safetensors": lambda: saved_safetensors(tmp_path / "c.safetensors", state),
        "distributed": lambda: saved_distributed(tmp_path / "dcp", {"model": state, "lr": torch.ones(1)}),
    }
    packed = pack(sources[kind](), mixed, out=tmp_path / "v.safetensors", dtype=dtype)
    assert packed.cast == CAST
    expected = mixed_model(torch.bfloat16)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(load(mixed, packed.path)(X), expected(X))
    with WeightFile(packed.path) as file:
        assert file.stamp is not None
        assert file.stamp.cast == CAST
    again = pack(state, mixed, out=tmp_path / "w.safetensors", dtype=dtype)
    assert again.path.read_bytes() == packed.path.read_bytes()
    assert again.weights_id == weights_id(expected, mixed, tmp_path)


def test_without_need_nothing_is_cast_or_recorded(mixed: Artifact, tmp_path: Path) -> None:
    model = mixed_model(torch.bfloat16)
    plain = pack(model, mixed, out=tmp_path / "v.safetensors")
    asked = pack(model, mixed, out=tmp_path / "w.safetensors", dtype="bfloat16")
    assert asked.cast == plain.cast == {}
    assert asked.path.read_bytes() == plain.path.read_bytes()
    raw = plain.path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "cast" not in json.loads(header["__metadata__"]["weightswap"])


def changed(key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**mixed_model(torch.float32).state_dict(), key: value}


FLOATS, DTYPES = functools.partial(mixed_model, torch.float32), "tensors can be cast to"
BAD: dict[type[Exception], dict[str, tuple[Any, Any, str]]] = {
    WeightsMismatch: {
        "not asked for": (FLOATS, None, "expected BF16[3], found F32[3]"),
        "another tensor is of another dtype": (
            lambda: changed("norm.weight", torch.ones(3, dtype=torch.float64)),
            "bfloat16",
            "1 problem\n  - norm.weight: expected F32[3], found F64[3]",
        ),
        "a whole number where the dtype is wanted": (
            lambda: changed("linear.bias", torch.ones(3, dtype=torch.int32)),
            "bfloat16",
            "1 problem\n  - linear.bias: expected BF16[3], found I32[3]",
        ),
        "another size": (
            lambda: changed("linear.bias", torch.ones(4)),
            "bfloat16",
            "1 problem\n  - linear.bias: expected BF16[3], found BF16[4]",
        ),
        "ties that differ": (
            lambda: changed("tied.weight", torch.ones(3, 3)),
            "bfloat16",
            "linear.weight and tied.weight are one tensor",
        ),
    },
    CheckpointError: {
        "another dtype asked for": (
            FLOATS,
            "float16",
            "dtype float16: the graph expects none, so nothing would be cast; it expects bfloat16, float32. Leave",
        ),
        "out of range": (
            lambda: changed("linear.bias", torch.tensor([1.0, 1e300, 0.0], dtype=torch.float64)),
            "bfloat16",
            "linear.bias: has values outside the range of BF16",
        ),
        "no dtype": (FLOATS, "bfloat", f"'bfloat': {DTYPES} float16, "),
        "no floating dtype": (FLOATS, torch.int8, f"'torch.int8': {DTYPES}"),
        "something else of torch": (FLOATS, "nn", DTYPES),
    },
}


@pytest.mark.parametrize(("error", "make", "dtype", "says"), by_error(BAD))
def test_every_other_mismatch_stays_an_error(
    error: type[Exception], make: Any, dtype: Any, says: str, mixed: Artifact, tmp_path: Path
) -> None:
    refuses(error, says, make(), mixed, tmp_path, dtype=dtype)


def test_infinities_stay_infinite(mixed: Artifact, tmp_path: Path) -> None:
    state = changed("linear.bias", torch.tensor([float("inf"), float("nan"), -0.0]))
    state["tied.weight"] = state["linear.weight"]
    packed = pack(state, mixed, out=tmp_path / "v.safetensors", dtype="bfloat16")
    found = safetensors.torch.load_file(packed.path)["linear.bias"]
    assert found[0] == float("inf")
    assert found[1].isnan()
    assert torch.signbit(found[2])
    assert packed.cast == CAST


def test_inputs_of_a_computed_weight_are_cast(tmp_path: Path) -> None:
    model = Fused().bfloat16().eval()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    artifact = export(model, (x,), out=tmp_path / "a.artifact")
    wide = {key: value.float() for key, value in model.state_dict().items()}
    packed = pack(wide, artifact, out=tmp_path / "v.safetensors", dtype="bfloat16")
    assert packed.cast == {"F32": ["k.weight", "norm.bias", "norm.weight", "q.weight", "v.weight"]}
    assert packed.weights_id == weights_id(model, artifact, tmp_path)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_values_beyond_a_range_without_infinity_do_not_become_its_largest(dtype: str, tmp_path: Path) -> None:
    eight = getattr(torch, dtype)
    model = Does(lambda m, x: x * m.scale.float(), scale=nn.Buffer(torch.ones(3).to(eight)))
    artifact = export(model, (torch.ones(2, 3),), out=tmp_path / "eight.artifact")
    most = torch.finfo(eight).max
    for value in (most * 1.125, -most * 1e6):
        state = {"scale": torch.tensor([0.0, value, float("nan")])}
        refuses(CheckpointError, "scale: has values outside the range of F8", state, artifact, tmp_path, dtype=dtype)
    pack({"scale": torch.tensor([-most, most * 1.03, 0.3])}, artifact, out=tmp_path / "fits", dtype=dtype)
    assert load(artifact, tmp_path / "fits")(torch.ones(2, 3))[0, :2].tolist() == [-most, most]


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_values_that_a_scale_cannot_have_do_not_become_others(value: float, tmp_path: Path) -> None:
    """A dtype of powers of two has neither a sign nor zero."""
    scales = torch.ones(3).to(torch.float8_e8m0fnu)
    model = Does(lambda m, x: x * m.scale.float(), scale=nn.Buffer(scales))
    artifact = export(model, (torch.ones(2, 3),), out=tmp_path / "scales.artifact")
    state = {"scale": torch.tensor([2.0, value, 1.0])}
    refuses(CheckpointError, "scale: has values outside the range", state, artifact, tmp_path, dtype="float8_e8m0fnu")
    pack({"scale": torch.tensor([2.0, 0.25, 1.0])}, artifact, out=tmp_path / "fits", dtype="float8_e8m0fnu")
    assert load(artifact, tmp_path / "fits")(torch.ones(2, 3))[0].tolist() == [2.0, 0.25, 1.0]
