"""The README's code runs as it stands, the build side in one process and the server in another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests import warm
from tests.compiled import needs_compiler

README = Path(__file__).parents[2] / "README.md"


def test_the_tour(tmp_path: Path) -> None:
    build, serve = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in (build + serve).splitlines()) <= 25
    said = []
    for code in (build, serve):
        command = [sys.executable, "-W", "error", "-c", code]
        said.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert re.fullmatch(r"1 \{'step': '2'\} \d+\.\d µs\ntorch.Size\(\[5, 10\]\) [0-9a-f]{64}\n", said[1])


def test_every_linked_page_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def shell(folder: Path, commands: str) -> str:
    program = f"{warm.python()} -c 'from weightswap_runtime.cli import main; main()'"
    script = f"set -e\n{commands.replace('weightswap ', program + ' ')}"
    done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(folder: Path, *parts: str) -> str:
    command = [warm.python(), "-c", "\n".join(parts)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


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


def test_the_page_on_checkpoints(tmp_path: Path) -> None:
    page = (README.parent / "docs" / "checkpoints.md").read_text()
    attention, serve, quantised, publish, recipe = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    swap, pack, llama = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    python(tmp_path, attention, CHECKPOINTS)
    assert python(tmp_path, serve) == "torch.Size([4, 8])\n"
    assert "computed from qkv" in shell(tmp_path, "weightswap inspect attention.artifact")
    python(tmp_path, quantised)
    ids = re.findall(r"weights id +([0-9a-f]{64})", shell(tmp_path, swap))
    assert len(set(ids)) == 1
    assert len(ids) == 2
    assert "cast        3 tensors from F64" in shell(tmp_path, pack)
    assert re.fullmatch(r"outbox/step-000001000-[0-9a-f]{12}.safetensors\n", python(tmp_path, attention, publish))
    python(tmp_path, LLAMA)
    assert "generation  0: llama" in shell(tmp_path, llama)
    (tmp_path / "recipe.py").write_text(recipe)
    assert "[batch, 32]" in shell(tmp_path, "weightswap export recipe.py:build -o fixed.artifact")
    said = shell(tmp_path, "weightswap pack llama llama.artifact -o v5.safetensors --recipe hf:llama")
    assert "weights id" in said


def prepare_recipe(folder: Path) -> str:
    """The recipe of the page on the command line, and its checkpoints and inputs; returns the page."""
    page = (README.parent / "docs" / "commands.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / "recipe.py").write_text(recipe)
    prepare = (
        "import numpy, recipe, torch; torch.save(recipe.Tagger().state_dict(), 'checkpoint.pt');"
        "torch.save(recipe.Tagger().state_dict(), 'other.pt');"
        "numpy.savez('inputs.npz', tokens=numpy.ones((3, 9), 'i8'), mask=numpy.ones((3, 9), 'f4'))"
    )
    python(folder, prepare)
    return page


def test_the_commands(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", prepare_recipe(tmp_path), re.DOTALL)
    said = shell(tmp_path, commands)
    assert "forward(tokens: I64[batch, length], mask: F32[batch, length])" in said
    assert (tmp_path / "outputs.safetensors").exists()


def test_the_page_on_inspecting(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", prepare_recipe(tmp_path), re.DOTALL)
    shell(tmp_path, "\n".join(re.findall(r".* export .*|.* pack checkpoint.*", commands)))
    page = (README.parent / "docs" / "inspect.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tree,) = re.findall(r"```\n(tagger.*?)```", page, re.DOTALL)
    said = shell(tmp_path, commands)
    assert tree in said
    assert "forward takes tokens (a tensor of 64-bit integers, batch × length) and " in said
    assert "level      the top\n" in said
    for name in ("v1.safetensors", "checkpoint.pt"):
        document = json.loads(shell(tmp_path, f"weightswap inspect {name} --json"))
        assert document.keys() <= set(re.findall(r"`(\w+)`", page)) | {"kind"}
    assert (tmp_path / "tagger.html").exists()
    document = json.loads(shell(tmp_path, "weightswap inspect tagger.artifact --json"))
    assert document.keys() <= set(re.findall(r"`(\w+)`", page)) | {"kind"}


TAGGER = """
import recipe, torch
from weightswap_exporter import export, pack
torch.manual_seed(0)
built = recipe.build()
model, artifact, (tokens, mask) = built["model"], "tagger.artifact", built["args"]
export(**built, out=artifact, engines=["onnx"])
pack(model, artifact, out="v1.safetensors")
pack(recipe.Tagger(), artifact, out="v2.safetensors")
"""


def test_the_page_on_parity(tmp_path: Path) -> None:
    prepare_recipe(tmp_path)
    page = (README.parent / "docs" / "parity.md").read_text()
    test, more, located = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert len([line for line in test.splitlines() if line]) <= 10
    assert "aten.embedding.default of embed.weight" in python(tmp_path, TAGGER, located)
    (tmp_path / "test_tagger.py").write_text(test + TAGGER + more)
    command = [warm.python(), "-m", "pytest", "-q", "--weightswap-update-goldens", "test_tagger.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout
    assert (tmp_path / "kept" / "tagger.goldens.safetensors").exists()
    said = shell(tmp_path, commands)
    assert said.count("verified, in") == 2
    assert '"same": true' in said
    assert (tmp_path / "report.html").exists()


@needs_compiler
def test_the_page_on_engines(tmp_path: Path) -> None:
    prepare_recipe(tmp_path)
    page = (README.parent / "docs" / "engines.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = shell(tmp_path, commands)
    assert "replaced  engines/onnx/forward.onnx" in said
    assert (tmp_path / "tagger.onnx").exists()
    shown = shell(tmp_path, "weightswap inspect tagger.artifact")
    assert re.search(r"^engines +torch, aoti cpu-\S+, onnx$", shown, re.MULTILINE)
    assert python(tmp_path, code) == "onnx (2, 7, 5)\n"


def test_the_page_on_operations(tmp_path: Path) -> None:
    page = (README.parent / "docs" / "operations.md").read_text()
    build, serve, watch = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert python(tmp_path, build) == "296 of 258600 bytes change\n"
    said = python(tmp_path, serve).splitlines()
    assert re.fullmatch(
        r"goldens \{'step': '2'\} \d+\.\d µs", next(line for line in said if line.startswith("goldens"))
    )
    kinds = [line.split(" ", 2)[:2] for line in said[-5:]]
    assert kinds == [["0", "full"], ["1", "full"], ["2", "rollback"], ["3", "delta"], ["4", "partial"]]
    assert said[-4].endswith("v2.safetensors deploy 42")
    seen = python(tmp_path, watch)
    assert f"committed for watch: {tmp_path}/outbox/v2.safetensors" in seen
    assert 'weightswap_swaps_total{kind="full",model="tagger",outcome="committed"} 1.0' in seen
    metrics = set(re.findall(r"`(weightswap_\w+)`", page))
    assert [name for name in metrics if name not in seen] == []


def test_every_error_is_explained() -> None:
    from weightswap_runtime import errors

    page = (README.parent / "docs" / "operations.md").read_text()
    refused = [name for name in errors.__all__ if issubclass(getattr(errors, name), errors.SwapError)]
    assert [name for name in refused if name != "SwapError" and f"`{name}`" not in page] == []
