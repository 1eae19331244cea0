"""Checkpoints that differ from the weights: swapped in through the conversion, they give what eager computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support import loading
from tests.support.setups import different
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import Artifact, load

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))


class Case(NamedTuple):
    """Model, with `old`: a checkpoint that `load_state_dict` accepts, or None for the one that the model saves."""

    build: Callable[[], nn.Module]
    computed: set[str]
    old: Callable[[int], dict[str, Any]] | None = None
    x: torch.Tensor = X

    def checkpoint(self, seed: int) -> dict[str, Any]:
        return self.old(seed) if self.old else different(self.build, seed).state_dict()

    def eager(self, checkpoint: dict[str, Any]) -> torch.Tensor:
        model = different(self.build, 99)
        model.load_state_dict(checkpoint, strict=False)
        with torch.no_grad():
            return model(self.x)

    def export(self, out: Path) -> Artifact:
        with skeleton():
            model = self.build().eval()
        return export(model, (self.x,), out=out, checkpoint=self.old(0) if self.old else None)


def halved() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def halved_checkpoint(seed: int) -> dict[str, Any]:
    state = different(halved, seed).state_dict()
    return {key: value.bfloat16() if value.is_floating_point() else value for key, value in state.items()}


CASES = {
    "fused, below other names": Case(
        loading.Nested, {f"blocks.{block}.{name}.weight" for block in range(2) for name in "qkv"}
    ),
    "permuted": Case(loading.Permuted, {"proj.weight", "proj.bias"}),
    "dequantised": Case(loading.Quantised, {"weight"}, loading.Quantised.old),
    "interpolated": Case(loading.Interpolated, {"positions"}, loading.Interpolated.old, torch.zeros(1, 36, 4)),
    "renamed on loading only": Case(loading.Renaming, set(), loading.Renaming.old),
    "written in pieces": Case(loading.InPieces, {"fused", "gain"}, loading.InPieces.old),
    "cast": Case(
        halved, {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}, halved_checkpoint
    ),
    "extra state": Case(loading.ExtraState, set()),
}


def saved(path: Path, checkpoint: dict[str, Any]) -> Path:
    tensors = {key: value.contiguous() for key, value in checkpoint.items() if isinstance(value, torch.Tensor)}
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("residency", ["double", pytest.param("single", marks=pytest.mark.slow)])
def test_swapping_a_checkpoint_equals_loading_it(case: Case, residency: Any, tmp_path: Path) -> None:
    artifact = case.export(tmp_path / "a.artifact")
    sources = artifact.manifest.conversion.sources
    assert {source.weight for source in sources if source.transform is not None} == case.computed
    assert all(source.keys for source in sources)
    model = load(artifact, residency=residency)
    for seed in (1, 2):
        checkpoint = case.checkpoint(seed)
        receipt = model.swap(saved(tmp_path / f"{seed}.safetensors", checkpoint), keys="checkpoint")
        assert torch.equal(model(case.x), case.eager(checkpoint))
        packed = pack(checkpoint, artifact, out=tmp_path / f"{seed}.packed.safetensors")
        assert packed.weights_id == receipt.weights_id
        model.swap(packed.path)
        assert torch.equal(model(case.x), case.eager(checkpoint))
        for given in (checkpoint, reversed(checkpoint.items())):  # without a file
            assert model.swap(given, keys="checkpoint").weights_id == receipt.weights_id
            assert torch.equal(model(case.x), case.eager(checkpoint))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_skeleton_records_the_conversion_of_a_real_model(case: Case, tmp_path: Path) -> None:
    hollow = case.export(tmp_path / "hollow.artifact")
    model = different(case.build, 3)
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    real = export(model, (case.x,), out=tmp_path / "real.artifact", checkpoint=case.old(0) if case.old else None)
    assert [file.read_bytes() for file in sorted(real.path.rglob("*.*"))] == [
        file.read_bytes() for file in sorted(hollow.path.rglob("*.*"))
    ]
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
