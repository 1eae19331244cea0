"""PEFT's factors are numbers of a graph: weights of an adapter that has another one are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import RANK, X, base, with_lora
from weightswap_exporter import export, pack
from weightswap_runtime import CheckpointError, WeightsMismatch, load

peft = pytest.importorskip("peft")


def tuned(seed: int, **options: Any) -> Any:
    model = with_lora(base(0), **options)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model


def hotswapped(folder: Path) -> Any:
    """Return a model whose factors are tensors, after PEFT has put another adapter into it."""
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    model = tuned(0)
    prepare_model_for_compiled_hotswap(model)
    tuned(1, lora_alpha=8 * RANK).save_pretrained(folder)
    hotswap_adapter(model, str(folder), "default")
    return model


@pytest.mark.parametrize("prepared", [False, True])
def test_an_adapter_with_another_factor_is_refused(prepared: bool, tmp_path: Path) -> None:
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    model = tuned(0)
    if prepared:
        prepare_model_for_compiled_hotswap(model)
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    served = load(artifact, model)
    before = served(X)
    assert torch.equal(before, model(X))
    for other in (tuned(1, lora_alpha=3 * RANK), tuned(1, use_rslora=True), hotswapped(tmp_path / "adapter")):
        with pytest.raises(WeightsMismatch, match=r"peft_scaling.first: \[2.0\] in the graph"):
            served.swap(other)
        with pytest.raises((WeightsMismatch, CheckpointError), match=r"peft_scaling.first: \[2.0\] in the graph"):
            pack(other, artifact, out=tmp_path / "other.safetensors")
    assert torch.equal(served(X), before)
    same = tuned(2)
    served.swap(same)
    assert torch.equal(served(X), same(X))


def test_a_base_takes_no_factor_from_the_variants_of_its_model(tmp_path: Path) -> None:
    artifact = export(with_lora(base(0)), (X,), out=tmp_path / "a.artifact", variants={"lora": "*lora_*"})
    served = load(artifact, pack(tuned(1, lora_alpha=3 * RANK), artifact, out=tmp_path / "w.safetensors").path)
    assert torch.equal(served(X), base(0)(X))
