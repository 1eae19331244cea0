"""Checkpoints of quantised models: every form of them gives the same weights, and one of another kind is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint as distributed

from tests.support import warm
from tests.support.packages import needs
from tests.support.quantised import BATCH, X, floats, quantised
from weightswap_exporter import export, pack, publish
from weightswap_runtime import Artifact, ArtifactError, CheckpointError, ParityError, WeightsMismatch

pytestmark = needs("torchao")
KIND = "int8 dynamic"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("quantised") / "a.artifact"
    return export(quantised(KIND), (X[:3],), out=out, dynamic_shapes=BATCH)


def torch_file(model: nn.Module, path: Path) -> Path:
    torch.save({"model": model.state_dict(), "step": 3}, path / "saved.pt")
    return path / "saved.pt"


def torchao_file(model: nn.Module, path: Path, **changed: str) -> Path:
    """As torchao writes it, and transformers' `save_pretrained`."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = {name: value.detach() for name, value in model.state_dict().items()}
    tensors, metadata = flatten_tensor_state_dict(state)
    safetensors.torch.save_file(tensors, path / "saved.safetensors", metadata | {"format": "pt"} | changed)
    return path / "saved.safetensors"


def distributed_folder(model: nn.Module, path: Path) -> Path:
    distributed.save(model.state_dict(), checkpoint_id=path / "folder", no_dist=True)
    return path / "folder"


FORMS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "a module": lambda model, path: model,
    "a state dict": lambda model, path: model.state_dict(),
    "with what wrappers add": lambda model, path: {f"module.{key}": v for key, v in model.state_dict().items()},
    "torch.save": torch_file,
    "torchao's safetensors": torchao_file,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_checkpoint_gives_the_same_weights(form: str, artifact: Artifact, tmp_path: Path) -> None:
    model = quantised(KIND, 1)
    expected = pack(model, artifact, out=tmp_path / "module.safetensors").weights_id
    found = pack(FORMS[form](model, tmp_path), artifact, out=tmp_path / "v1.safetensors").weights_id
    assert found == expected != pack(quantised(KIND, 2), artifact, out=tmp_path / "v2.safetensors").weights_id


def test_a_trainer_publishes_parts(artifact: Artifact, tmp_path: Path) -> None:
    model = quantised(KIND, 1)
    expected = pack(model, artifact, out=tmp_path / "module.safetensors").weights_id
    assert publish(model, tmp_path / "out", artifact, step=1).wait(60).weights_id == expected
    with pytest.raises(WeightsMismatch, match="the checkpoint has Int8Tensor"):
        publish(quantised("int8"), tmp_path / "out", artifact, step=2).wait(60)


def test_a_packed_file_is_packed_again(artifact: Artifact, tmp_path: Path) -> None:
    first = pack(quantised(KIND), artifact, out=tmp_path / "1.safetensors")
    assert pack(first.path, artifact, out=tmp_path / "2.safetensors").weights_id == first.weights_id


GRAPHS = r"0.weight: the graph has Int8Tensor\(block_size=\[1, 32\], dtype=float32, act_quant_kwargs=Quant.+\), "
OTHERS = {
    "int8": r"the checkpoint has Int8Tensor\(block_size=\[1, 32\], dtype=float32, act_quant_kwargs=None",
    "float8": r"the checkpoint has Float8Tensor\(block_size=\[1, 32\], mm_config=None",
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("form", ["a state dict", "torch.save"])
def test_another_kind_is_refused_with_both(kind: str, form: str, artifact: Artifact, tmp_path: Path) -> None:
    source = FORMS[form](quantised(kind), tmp_path)
    with pytest.raises(WeightsMismatch, match=GRAPHS + OTHERS[kind]):
        pack(source, artifact, out=tmp_path / "v1.safetensors")
    assert not (tmp_path / "v1.safetensors").exists()


def test_torchaos_file_of_another_kind_is_refused_with_both(artifact: Artifact, tmp_path: Path) -> None:
    path = torchao_file(quantised("int8"), tmp_path)
    with pytest.raises(WeightsMismatch, match=GRAPHS + r"the checkpoint has Int8Tensor\(act_quant_kwargs=None"):
        pack(path, artifact, out=tmp_path / "v1.safetensors")


def test_floats_are_refused_for_a_quantised_graph(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=GRAPHS + "the checkpoint has a plain tensor") as caught:
        pack(floats(0), artifact, out=tmp_path / "v1.safetensors")
    assert len(caught.value.problems) == 2


def test_quantised_weights_are_refused_for_a_float_graph(tmp_path: Path) -> None:
    plain = export(floats(0), (X,), out=tmp_path / "plain.artifact")
    assert not (plain.path / "parts.json").exists()
    with pytest.raises(WeightsMismatch, match=r"0.weight: the graph has a plain tensor, the checkpoint has Int8Tensor"):
        pack(quantised(KIND), plain, out=tmp_path / "v1.safetensors")


def test_goldens_of_another_kind_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    source = quantised(KIND).state_dict()
    with pytest.raises(
        ParityError, match=GRAPHS + r"the model has Int8Tensor\(block_size=\[1, 32\], dtype=float32, act"
    ):
        pack(source, artifact, model=quantised("int8"), goldens=[(X,)], out=tmp_path / "v1.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    folder = distributed_folder(quantised(KIND), tmp_path)
    with pytest.raises(CheckpointError, match=r"the chunk of 0.weight at byte 0 must have one storage"):
        pack(folder, artifact, out=tmp_path / "v1.safetensors")


@pytest.mark.parametrize(
    "text", ["{", '{"_tensor_data_names": 3}', '{"_type": "A", "_data": {"_type": "B", "_data": 1}}', '{"a":' * 99999]
)
def test_metadata_that_torchao_does_not_write_are_refused(text: str, artifact: Artifact, tmp_path: Path) -> None:
    path = torchao_file(quantised(KIND), tmp_path, **{"0.weight": text})
    with pytest.raises(CheckpointError, match=r"saved.safetensors: the metadata of 0.weight is not torchao's"):
        pack(path, artifact, out=tmp_path / "v1.safetensors")


@pytest.mark.parametrize(("value", "says"), [(3, "its parts are not tensors"), (None, "AttributeError: .*qdata")])
def test_a_damaged_tensor_is_refused(value: Any, says: str, artifact: Artifact, tmp_path: Path) -> None:
    state = quantised(KIND).state_dict()
    if value is None:
        del state["0.weight"].qdata
    else:
        state["0.weight"].qdata = value
    with pytest.raises(CheckpointError, match=rf"^0.weight: is a Int8Tensor that cannot be taken apart: {says}"):
        pack(state, artifact, out=tmp_path / "v1.safetensors")


def test_an_artifact_whose_kinds_are_damaged_is_refused(tmp_path: Path) -> None:
    artifact = export(quantised(KIND), (X,), out=tmp_path / "a.artifact")
    (artifact.path / "parts.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"parts.json: altered since the export"):
        pack(quantised(KIND), artifact, out=tmp_path / "v1.safetensors")


def test_a_file_of_torchao_is_opened_without_its_import_before(artifact: Artifact, tmp_path: Path) -> None:
    path = torch_file(quantised(KIND), tmp_path)
    code = f"""
import sys
from weightswap_exporter import pack
assert not any(name.startswith("torchao") for name in sys.modules)
if sys.argv[1:]:
    sys.modules["torchao"] = None
pack({str(path)!r}, {str(artifact.path)!r}, out={str(tmp_path / "v1.safetensors")!r})
"""
    subprocess.run([warm.python(), "-c", code], check=True, capture_output=True)
    found = subprocess.run([warm.python(), "-c", code, "without"], check=False, capture_output=True, text=True)
    assert "CheckpointError" in found.stderr
    assert "holds weights quantised by torchao, which cannot be imported" in found.stderr
