"""The commands and the code of docs/checkpoints.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import blocks, page, python, shell

CHECKPOINTS = """
import json, os
from torch.distributed import checkpoint
torch.save({"model": trained.state_dict(), "epoch": 3}, "last.pt")
torch.save({name: value.double() for name, value in trained.state_dict().items()}, "double.pt")
os.mkdir("sharded")
save_file(trained.state_dict(), "sharded/one.safetensors")
index = {"weight_map": dict.fromkeys(trained.state_dict(), "one.safetensors")}
open("sharded/model.safetensors.index.json", "w").write(json.dumps(index))
ema = {f"net.{key}": value for key, value in trained.named_parameters()} | {"loss": torch.ones(1)}
torch.save({"state_dict": {}, "state_dict_ema": ema}, "ema.ckpt")
import warnings
warnings.simplefilter("ignore")
checkpoint.save({"model": dict(trained.named_parameters())}, checkpoint_id="step-1000", no_dist=True)
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
LlamaForCausalLM(config).save_pretrained("llama")
"""


@pytest.mark.slow
def test_the_page_on_checkpoints(tmp_path: Path) -> None:
    text = page("checkpoints")
    attention, serve, quantised, save, publish, samples, recipe = blocks(text, "python")
    swap, parts, pack, llama, given = blocks(text, "sh")
    python(tmp_path, attention, CHECKPOINTS)
    assert python(tmp_path, serve) == "torch.Size([4, 8])\n"
    assert "computed from qkv" in shell(tmp_path, "weightswap inspect attention.artifact")
    python(tmp_path, quantised)
    ids = re.findall(r"weights id +([0-9a-f]{64})", shell(tmp_path, swap))
    assert len(set(ids)) == 1
    assert len(ids) == 2
    python(tmp_path, attention, "import warnings", "warnings.simplefilter('ignore')", save)  # there is one process
    ids = re.findall(r"weights id +([0-9a-f]{64})", shell(tmp_path, parts))
    assert len(set(ids)) == 1
    assert len(ids) == 2
    assert "cast        3 tensors from F64" in shell(tmp_path, pack)
    assert re.fullmatch(r"outbox/step-000001000-[0-9a-f]{12}.safetensors\n", python(tmp_path, attention, publish))
    python(tmp_path, LLAMA)
    assert "generation  0: llama" in shell(tmp_path, llama)
    (tmp_path / "samples.py").write_text(samples)
    assert "[batch, 8]" in shell(tmp_path, given)
    (tmp_path / "recipe.py").write_text(recipe)
    assert "[batch, 32]" in shell(tmp_path, "weightswap export recipe.py:build -o fixed.artifact")
    said = shell(tmp_path, "weightswap pack llama llama.artifact -o v5.safetensors --recipe hf:llama")
    assert "weights id" in said
