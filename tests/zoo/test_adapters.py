"""Adapters of PEFT: trained apart from their base, and merged by the loading code that the export has recorded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.setups import equal
from tests.zoo.entries import BY_NAME, randomised
from weightswap_exporter import export, skeleton
from weightswap_exporter.modules.libraries import checkpoint, load
from weightswap_runtime import load as serve

RANK, ALPHA = 3, 8
LLAMA = BY_NAME["llama"]
PREFIX = "base_model.model."


def load_merged(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Loading code for a base's file and an adapter's in one: each adapted weight is W + B A alpha / rank."""
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith(PREFIX)}
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        name = key.removeprefix(PREFIX).replace(".lora_A", "")
        weights[name] = weights[name] + tensors[key.replace(".lora_A", ".lora_B")] @ tensors[key] * (ALPHA / RANK)
    load(model, weights)


@pytest.mark.slow
def test_a_base_and_its_adapter_are_merged_by_the_swap(tmp_path: Path) -> None:
    with skeleton():
        hollow = LLAMA.build().eval()
    described = checkpoint(hollow) | saved_adapter(randomised(LLAMA, 0), 0, tmp_path / "a0")[0]
    artifact = export(
        hollow,
        kwargs=LLAMA.inputs(2, 7),
        dynamic_shapes=LLAMA.dynamic,
        load=load_merged,
        checkpoint=described,
        out=tmp_path / "a.artifact",
    )
    served = serve(artifact)
    base = randomised(LLAMA, 1)
    tensors = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    for seed in (2, 3):  # two adapters of one base
        adapter, merged = saved_adapter(base, seed, tmp_path / f"a{seed}")
        safetensors.torch.save_file(tensors | adapter, tmp_path / "both.safetensors")
        served.swap(tmp_path / "both.safetensors")
        inputs = LLAMA.inputs(3, 11)
        with torch.no_grad():
            assert equal(served(**inputs), merged(**inputs))


def saved_adapter(base: Any, seed: int, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """A random adapter for a copy of `base`: what PEFT saves of it, and the model that PEFT merges."""
    import peft

    copy = LLAMA.build().eval()
    copy.load_state_dict(base.state_dict())
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft 0.21's own
        adapted = peft.get_peft_model(copy, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return safetensors.torch.load_file(folder / "adapter_model.safetensors"), adapted.merge_and_unload().eval()
