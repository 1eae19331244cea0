"""A server on the engine `onnx` needs numpy and onnxruntime: it loads, runs, swaps and rolls back without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.support.setups import different
from tests.support.varied import RichFiles, X
from tests.zoo import own
from weightswap_exporter import compile_engines, export

PATTERN = "[cfm]*"
SERVER = f"""
import sys
import numpy as np
for name in ("torch", "onnx", "onnxscript", "safetensors"):
    sys.modules[name] = None
from weightswap_runtime import MissingExtra, load

folder, residency, chosen = sys.argv[1:]
full = [f"{{folder}}/full{{index}}.safetensors" for index in range(3)]
x = np.load(f"{{folder}}/x.npy")
model = load(f"{{folder}}/rich.artifact", full[0], engine=chosen, residency=residency, keep_previous="host")
assert model.engine == "onnx"
context = model.new_context()
counts = [model.count(x, context=context) for _ in range(2)]
answers = {{"loaded": model(x), "counted": counts[0], "counted again": counts[1]}}
model.swap(full[1])
answers["swapped"] = model(x)
answers["state starts again"] = model.count(x)
model.swap(f"{{folder}}/d12.safetensors")
answers["delta"] = model(x)
model.swap(full[0], only={PATTERN!r})
answers["part"] = model(x)
model.rollback()
answers["rolled back"] = model(x)
model.swap(f"{{folder}}/plain0.safetensors")
answers["plain names and ties"] = model(x)
staged = model.stage(full[1])
answers["staged"] = staged(x)
staged.discard()
answers["discarded"] = model(x)
try:
    model.swap(f"{{folder}}/checkpoint2.safetensors")
except MissingExtra as error:
    assert "weights have to be computed" in str(error), error
    assert "torch" in str(error), error
else:
    raise AssertionError("a transform ran without torch")
answers["refused"] = model(x)
assert not any(name == "torch" or name.startswith("torch.") for name, module in sys.modules.items() if module)
np.savez(f"{{folder}}/answers-{{residency}}-{{chosen}}.npz", **answers)
"""
EXPECTED = {  # the set that the answers belong to
    "loaded": 0,
    "swapped": 1,
    "delta": 2,
    "rolled back": 2,
    "plain names and ties": 0,
    "staged": 1,
    "discarded": 0,
    "refused": 0,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RichFiles:
    folder = tmp_path_factory.mktemp("rich")
    files = RichFiles(folder, 3)
    compile_engines(files.artifact, ["onnx"])
    np.save(folder / "x.npy", X.numpy())
    save_plain(files, folder / "plain0.safetensors")
    return files


def save_plain(files: RichFiles, path: Path) -> None:
    """Write runtime names, tied tensors under each of theirs, without weightswap's metadata."""
    tensors = files.tensors(0)
    names = {name: weight.name for weight in files.artifact.manifest.weights for name in weight.names}
    safetensors.torch.save_file({name: tensors[row].detach().contiguous().clone() for name, row in names.items()}, path)


@pytest.mark.parametrize("chosen", ["onnx", "auto"])
@pytest.mark.sampled(1)
def test_a_server_without_torch(files: RichFiles, residency: str, chosen: str) -> None:
    command = [sys.executable, "-W", "error", "-c", SERVER, str(files.folder), residency, chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    answers = np.load(files.folder / f"answers-{residency}-{chosen}.npz")
    for name, index in EXPECTED.items():
        expected = files.eager(files.whole(index)).numpy()
        np.testing.assert_allclose(answers[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    part = files.eager(files.mixed(files.whole(2), PATTERN, 0)).numpy()
    np.testing.assert_allclose(answers["part"], part, rtol=1e-5, atol=1e-5)
    bias = files.models[0].mix.bias.detach().numpy()
    for name, calls in (("counted", 1), ("counted again", 2)):
        np.testing.assert_allclose(answers[name], bias + calls, rtol=1e-6)
    np.testing.assert_allclose(answers["state starts again"], files.models[1].mix.bias.detach().numpy() + 1, rtol=1e-6)


RENAMED = """
import sys
import numpy as np
sys.modules["torch"] = None
from weightswap_runtime import load

folder = sys.argv[1]
model = load(f"{folder}/fusion.artifact", engine="onnx")
for index in (0, 1):
    receipt = model.swap(f"{folder}/checkpoint{index}.safetensors")
    np.save(f"{folder}/answer{index}.npy", model(np.ones((2, 6), np.float32)))
"""


@torch.no_grad()
@pytest.mark.slow
def test_checkpoints_with_other_names_need_no_torch(tmp_path: Path) -> None:
    models = [different(own.Fused, seed) for seed in range(2)]
    export(models[0], (torch.ones(2, 6),), out=tmp_path / "fusion.artifact", engines=["onnx"])
    for index, model in enumerate(models):
        state = model.state_dict()
        assert state.keys() != {name for name, _ in model.named_parameters()}
        safetensors.torch.save_file(state, tmp_path / f"checkpoint{index}.safetensors")
    done = subprocess.run([sys.executable, "-c", RENAMED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    for index, model in enumerate(models):
        expected = model(torch.ones(2, 6)).numpy()
        np.testing.assert_allclose(np.load(tmp_path / f"answer{index}.npy"), expected, rtol=1e-5, atol=1e-5)
