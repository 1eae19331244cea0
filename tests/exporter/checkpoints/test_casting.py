"""Casting: only on request, only floating tensors, only to the dtype that the graph wants, and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.checkpoints import saved_distributed, saved_safetensors
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, CheckpointError, WeightFile, WeightsMismatch, load

X = torch.ones(2, 3, dtype=torch.bfloat16)


class Mixed(nn.Module):
    """Linear layers in one dtype, a norm that stays F32, a counter, and a tied weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=dtype)
        self.norm = nn.LayerNorm(3)
        self.tied = nn.Linear(3, 3, bias=False, dtype=dtype)
        self.tied.weight = self.linear.weight
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).float()) + self.tied(x) + self.count


@pytest.fixture
def mixed(tmp_path: Path) -> Artifact:
    return export(Mixed(torch.bfloat16).eval(), (X,), out=tmp_path / "mixed.artifact")


CAST = {"F32": ["linear.bias", "linear.weight"]}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
@pytest.mark.parametrize("kind", ["module", "state dict", "nested", "safetensors", "distributed"])
def test_what_the_graph_wants_in_the_dtype_is_cast(kind: str, dtype: Any, mixed: Artifact, tmp_path: Path) -> None:
    model = Mixed(torch.float32).eval()
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
    expected = Mixed(torch.bfloat16).eval()
    expected.load_state_dict(model.state_dict())
    assert torch.equal(load(mixed, packed.path)(X), expected(X))
    with WeightFile(packed.path) as file:
        assert file.stamp is not None
        assert file.stamp.cast == CAST
    again = pack(state, mixed, out=tmp_path / "w.safetensors", dtype=dtype)
    assert again.path.read_bytes() == packed.path.read_bytes()
    assert again.weights_id == pack(expected, mixed, out=tmp_path / "e.safetensors").weights_id


def test_without_need_nothing_is_cast_or_recorded(mixed: Artifact, tmp_path: Path) -> None:
    model = Mixed(torch.bfloat16)
    plain = pack(model, mixed, out=tmp_path / "v.safetensors")
    asked = pack(model, mixed, out=tmp_path / "w.safetensors", dtype="bfloat16")
    assert asked.cast == plain.cast == {}
    assert asked.path.read_bytes() == plain.path.read_bytes()
    raw = plain.path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "cast" not in json.loads(header["__metadata__"]["weightswap"])


def changed(key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**Mixed(torch.float32).state_dict(), key: value}


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "not asked for": (lambda: Mixed(torch.float32), None, WeightsMismatch, "expected BF16[3], found F32[3]"),
    "another dtype asked for": (
        lambda: Mixed(torch.float32),
        "float16",
        CheckpointError,
        "dtype float16: the graph expects none, so nothing would be cast; it expects bfloat16, float32. Leave",
    ),
    "another tensor is of another dtype": (
        lambda: changed("norm.weight", torch.ones(3, dtype=torch.float64)),
        "bfloat16",
        WeightsMismatch,
        "1 problem\n  - norm.weight: expected F32[3], found F64[3]",
    ),
    "a whole number where the dtype is wanted": (
        lambda: changed("linear.bias", torch.ones(3, dtype=torch.int32)),
        "bfloat16",
        WeightsMismatch,
        "1 problem\n  - linear.bias: expected BF16[3], found I32[3]",
    ),
    "another size": (
        lambda: changed("linear.bias", torch.ones(4)),
        "bfloat16",
        WeightsMismatch,
        "1 problem\n  - linear.bias: expected BF16[3], found BF16[4]",
    ),
    "ties that differ": (
        lambda: changed("tied.weight", torch.ones(3, 3)),
        "bfloat16",
        WeightsMismatch,
        "linear.weight and tied.weight are one tensor",
    ),
    "out of range": (
        lambda: changed("linear.bias", torch.tensor([1.0, 1e300, 0.0], dtype=torch.float64)),
        "bfloat16",
        CheckpointError,
        "linear.bias: has values outside the range of BF16",
    ),
    "no dtype": (lambda: Mixed(torch.float32), "bfloat", CheckpointError, "'bfloat': tensors can be cast to float16, "),
    "no floating dtype": (lambda: Mixed(torch.float32), torch.int8, CheckpointError, "'torch.int8': tensors can be"),
    "something else of torch": (lambda: Mixed(torch.float32), "nn", CheckpointError, "tensors can be cast to"),
}


@pytest.mark.parametrize(("make", "dtype", "error", "says"), BAD.values(), ids=BAD)
def test_every_other_mismatch_stays_an_error(
    make: Any, dtype: Any, error: type[Exception], says: str, mixed: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(error) as refused:
        pack(make(), mixed, out=tmp_path / "v.safetensors", dtype=dtype)
    assert says in str(refused.value)
    assert not list(tmp_path.glob("*v.safetensors*"))


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
    from tests.support.loading import Fused

    model = Fused().bfloat16().eval()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    artifact = export(model, (x,), out=tmp_path / "a.artifact")
    wide = {key: value.float() for key, value in model.state_dict().items()}
    packed = pack(wide, artifact, out=tmp_path / "v.safetensors", dtype="bfloat16")
    assert packed.cast == {"F32": ["k.weight", "norm.bias", "norm.weight", "q.weight", "v.weight"]}
    assert packed.weights_id == pack(model, artifact, out=tmp_path / "w.safetensors").weights_id
