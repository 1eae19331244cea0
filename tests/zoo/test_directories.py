"""`weightswap export hf:DIR` of a directory with nothing but config.json; later its weights are swapped in."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from typer.testing import CliRunner

from tests.support.setups import equal
from tests.zoo.entries import BY_NAME, SEQUENCES, Kwargs, hf, randomised, save_pretrained
from weightswap_exporter import export
from weightswap_exporter.commands.build import export_command, pack_command
from weightswap_exporter.commands.hf_directory import directory_recipe
from weightswap_runtime import Model, load

LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("clip", "mixtral", "t5", "whisper", "wav2vec2")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bert", "llama-tied", "vit", *LONG])
def test_a_configuration_is_enough_to_export_and_its_weights_swap_in_later(name: str, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    eager = randomised(entry, 5)
    served, said = export_then_swap(eager, tmp_path)
    assert said == []
    for sizes in entry.sizes:
        assert agree(served, eager, entry.inputs(*sizes))


@pytest.mark.slow
def test_the_dtype_is_that_of_the_configuration(tmp_path: Path) -> None:
    trained = randomised(BY_NAME["llama"], 5).to(
        torch.bfloat16
    )  # its rotary tables too, which from_pretrained does not
    served, _ = export_then_swap(trained, tmp_path)
    assert {weight.dtype for weight in served.artifact.manifest.weights} == {"BF16"}
    mapped = type(trained).from_pretrained(tmp_path / "model")
    eager = deepcopy(mapped)  # out of the file's mapping, where tensors lie at odd addresses and give other last bits
    assert agree(served, eager, BY_NAME["llama"].inputs(3, 12))


@pytest.mark.slow
def test_sizes_that_cannot_vary_are_fixed_and_named(tmp_path: Path) -> None:
    eager = randomised(BY_NAME["mamba"], 5)
    served, said = export_then_swap(eager, tmp_path)
    assert len(said) == 1
    assert "cannot keep every size of this model dynamic; fixed at those of the sample inputs: length" in said[0]
    assert "input_ids [2, 16]" in said[0]
    for batch in (1, 3):
        assert agree(served, eager, {"input_ids": torch.randint(0, 99, (batch, 16))})


@pytest.mark.slow
def test_weights_that_no_file_holds_are_packed_with_the_directory(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(1)
    eager = hf("MarianMTModel", "MarianConfig", **SEQUENCES, **sizes, **heads, vocab_size=99)().eval()
    directory, out = write_config(eager, tmp_path / "model"), tmp_path / "model.artifact"
    (warning,) = export_directory(directory, out)
    assert warning.startswith("no checkpoint key provides the weight(s) model.encoder.embed_positions.weight")
    save_pretrained(eager, directory)
    packed = tmp_path / "v1.safetensors"
    arguments = [str(directory), str(out), "-o", str(packed), "--recipe", f"hf:{directory}"]
    done = CliRunner().invoke(pack_command, arguments)
    assert done.exit_code == 0, done.output
    assert agree(load(out, packed), eager, BY_NAME["t5"].inputs(3, 9, 4))


def test_a_directory_that_cannot_be_used_is_bad_usage(tmp_path: Path) -> None:
    done = CliRunner().invoke(export_command, [f"hf:{tmp_path}", "-o", str(tmp_path / "a.artifact")])
    assert done.exit_code == 2
    assert f"{tmp_path}: has no config.json" in done.stderr


@pytest.mark.slow
def test_a_recipe_may_choose_other_sizes(tmp_path: Path) -> None:
    eager = randomised(BY_NAME["mamba"], 5)
    arguments = directory_recipe(write_config(eager, tmp_path / "model"), length=5)
    arguments["dynamic_shapes"] = {"input_ids": {0: Dim("batch")}}
    served = load(export(**arguments, out=tmp_path / "model.artifact"))
    served.swap(save_pretrained(eager, tmp_path / "model"))
    assert agree(served, eager, {"input_ids": torch.randint(0, 99, (3, 5))})


@pytest.mark.slow
def test_a_large_model_is_exported_without_its_memory(tmp_path: Path) -> None:
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    wide |= {"num_hidden_layers": 20, "vocab_size": 32000, "dtype": "bfloat16", "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(wide | {"architectures": ["LlamaForCausalLM"]}))
    arguments = ["export", f"hf:{tmp_path}", "-o", str(tmp_path / "a.artifact")]
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True)
    assert load(tmp_path / "a.artifact").artifact.manifest.total_bytes > 9e9
    assert int(done.stdout.split()[-2]) < 2_000_000, "kilobytes"


PEAK = """
from pathlib import Path
from weightswap_tools.program import main

try:
    main()
finally:
    # getrusage() would count what the parent had, too
    print(*[line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")])
"""


def export_then_swap(model: Any, folder: Path) -> tuple[Model, list[str]]:
    """Export the model's configuration by the command line, then serve its weights; also the command's warnings."""
    directory, out = write_config(model, folder / "model"), folder / "model.artifact"
    said = export_directory(directory, out)
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    model.save_pretrained(directory)
    served = load(out)
    served.swap(directory)
    return served, said


def export_directory(directory: Path, out: Path) -> list[str]:
    """Export by the command line; its warnings."""
    done = CliRunner().invoke(export_command, [f"hf:{directory}", "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    said: list[str] = json.loads(done.stdout)["warnings"]
    return said


def write_config(model: Any, directory: Path) -> Path:
    """What of a model's directory is there before it is trained; with the cache on, as is usual."""
    directory.mkdir()
    named = {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    document = model.config.to_dict() | named | {"use_cache": True}
    (directory / "config.json").write_text(json.dumps(document))
    return directory


@torch.no_grad()
def agree(served: Model, eager: Any, inputs: Kwargs) -> bool:
    return equal(served(**inputs), eager(**inputs))
