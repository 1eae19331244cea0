"""PEFT's factors are numbers of a graph: weights of an adapter that has another one are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import RANK, X, base, with_lora
from weightswap_exporter import export, pack
from weightswap_runtime import CheckpointError, WeightsMismatch, load
from weightswap_runtime.format.model_config import config_of, config_problems

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
    other = tuned(1)
    with torch.no_grad():
        other.get_base_model().second.base_layer.weight.mul_(2)
    with pytest.raises(WeightsMismatch, match=r"adapters are variants of this graph: lora.*\n.*get_base_model\(\)"):
        served.swap(other)
    served.swap(other.get_base_model())
    with other.disable_adapter():
        assert torch.equal(served(X), other(X))


@pytest.mark.parametrize("kind", ["FourierFTConfig", "WaveFTConfig"])
def test_an_adapter_with_another_scaling_is_refused(kind: str, tmp_path: Path) -> None:
    """Kinds that name their factor after themselves."""

    def build(scaling: float) -> Any:
        config = getattr(peft, kind)(n_frequency=3, scaling=scaling, target_modules=["first"])
        return peft.get_peft_model(base(0), config).eval()

    artifact = export(build(2.0), (X,), out=tmp_path / "a.artifact")
    served = load(artifact, build(2.0))
    check_refused(served, artifact, build(3.0), r"peft_scaling.first: \[2.0\] in the graph, \[3.0\]")


SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("FourierFTConfig", {"n_frequency": 3}, {"random_loc_seed": 2}),
    ("RoadConfig", {"group_size": 4}, {"group_size": 2}),
    ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 2, "topk": 2}, {"topk": 3}),
    ("OFTConfig", {"r": 0, "oft_block_size": 2, "use_cayley_neumann": True}, {"use_cayley_neumann": False}),
    ("DeftConfig", {"r": 2}, {"decomposition_method": "qr"}),
    (
        "LoraConfig",
        {"r": RANK, "trainable_token_indices": {"second": [0, 1]}},
        {"trainable_token_indices": {"second": [0, 2]}},
    ),
]


@pytest.mark.parametrize(("kind", "options", "other"), SETTINGS)
def test_an_adapter_with_another_setting_is_refused(
    kind: str, options: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    """Its tensors have the same names and shapes, and compute something else."""

    def build(seed: int, **changed: Any) -> Any:
        config = getattr(peft, kind)(**{"target_modules": ["first"], **options, **changed})
        model = peft.get_peft_model(base(0), config).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "base_layer" not in name:
                    parameter.normal_()
        return model

    model = build(0)
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    served = load(artifact, model)
    different = build(0, **other)
    assert not torch.equal(different(X), model(X))
    check_refused(served, artifact, different, rf"peft_settings\.default\.{next(iter(other))}")
    same = build(1)
    served.swap(same)
    assert torch.equal(served(X), same(X))


def pair() -> Any:
    """Return a model with two adapters, of which PEFT applies the first."""
    model = tuned(0)
    model.add_adapter("second", peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["first", "second"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".second.weight" in name and "lora_" in name:
                parameter.normal_()
    return model.eval()


def test_a_module_that_applies_other_adapters_is_refused(tmp_path: Path) -> None:
    """Which of its adapters a model applies, and whether any, is in no tensor: a graph has those of the export."""
    model = pair()
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    served = load(artifact, model)
    before = served(X)
    assert torch.equal(before, model(X))
    model.base_model.set_adapter("second")
    assert not torch.equal(before, model(X))
    check_refused(served, artifact, model, r"peft_adapters.first: \['default'\] in the graph, \['second'\]")
    model.base_model.set_adapter("default")
    model.base_model.disable_adapter_layers()
    check_refused(served, artifact, model, r"peft_adapters.first: \['default'\] in the graph, \[\]")
    without = export(model, (X,), out=tmp_path / "without.artifact")
    disabled = load(without, model)
    assert torch.equal(disabled(X), model(X))
    model.base_model.enable_adapter_layers()
    check_refused(disabled, without, model, r"peft_adapters.first: \[\] in the graph, \['default'\]")
    served.swap(model)
    assert torch.equal(served(X), model(X))


def test_a_module_that_applies_another_copy_of_a_saved_module_is_refused(tmp_path: Path) -> None:
    model = with_lora(base(0), target_modules=["first"], modules_to_save=["second"])
    with torch.no_grad():
        model.get_submodule("base_model.model.second.modules_to_save.default").weight.zero_()
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    served = load(artifact, model)
    assert torch.equal(served(X), model(X))
    with model.disable_adapter():
        check_refused(served, artifact, model, r"peft_adapters.second: \['default'\] in the graph, \[\]")


def check_refused(served: Any, artifact: Any, other: Any, text: str) -> None:
    before = served(X)
    with pytest.raises(WeightsMismatch, match=text):
        served.swap(other)
    with pytest.raises((WeightsMismatch, CheckpointError), match=text):
        pack(other, artifact, out=artifact.path.with_suffix(".safetensors"))
    assert torch.equal(served(X), before)


@pytest.mark.parametrize(
    "other",
    [
        {"top_k_lora": 1},
        {"softmax_temperature": 3.0},
        {"enable_softmax": False},
        {"scaling_pass_value": 0.5},
        {"global_scaling_weight": 2.0},
    ],
)
def test_settings_of_what_weighs_other_adapters_are_compared(other: dict[str, Any]) -> None:
    """X-LoRA's own settings are of an adapter that no layer applies."""
    config, weighed = peft.XLoraConfig(hidden_size=4, adapters={"0": "a"}), torch.nn.Linear(4, 4)
    layers = peft.get_peft_model(torch.nn.Sequential(weighed), peft.LoraConfig(target_modules=["0"]))
    layers.base_model.xlora_config = config  # as XLoraModel keeps it, and its setters change it
    before = config_of(layers)
    assert not config_problems(before, config_of(layers))
    vars(config).update(other)
    (problem,) = config_problems(before, config_of(layers))
    assert next(iter(other)) in problem
