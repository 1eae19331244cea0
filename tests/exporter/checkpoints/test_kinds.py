"""Checkpoints of quantised models: every form of them gives the same weights, and one of another kind is refused."""

from __future__ import annotations

import re
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
from tests.support.checkpoints import refuses, weights_id
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
    expected = weights_id(model, artifact, tmp_path)
    packed = pack(FORMS[form](model, tmp_path), artifact, out=tmp_path / "v1.safetensors")
    assert packed.weights_id == expected != weights_id(quantised(KIND, 2), artifact, tmp_path)
    assert weights_id(packed.path, artifact, tmp_path) == expected


def test_a_trainer_publishes_parts(artifact: Artifact, tmp_path: Path) -> None:
    model = quantised(KIND, 1)
    published = publish(model, tmp_path / "out", artifact, step=1).wait(120)
    assert published.weights_id == weights_id(model, artifact, tmp_path)
    with pytest.raises(WeightsMismatch):
        publish(quantised("int8"), tmp_path / "out", artifact, step=2).wait(120)


GRAPHS = r"0.weight: the graph has Int8Tensor\(block_size=\[1, 32\], dtype=float32, act_quant_kwargs=Quant.+\), "


INT8 = r"the checkpoint has Int8Tensor\(block_size=\[1, 32\], dtype=float32, act_quant_kwargs=None"
FLOAT8 = r"the checkpoint has Float8Tensor\(block_size=\[1, 32\], mm_config=None"


@pytest.mark.parametrize(
    ("kind", "form", "says"),
    [
        *(
            (kind, form, says)
            for kind, says in (("int8", INT8), ("float8", FLOAT8))
            for form in ("a state dict", "torch.save")
        ),
        ("int8", "torchao's safetensors", r"the checkpoint has Int8Tensor\(act_quant_kwargs=None"),
    ],
)
def test_another_kind_is_refused_with_both(kind: str, form: str, says: str, artifact: Artifact, tmp_path: Path) -> None:
    message = refuses(WeightsMismatch, "0.weight", FORMS[form](quantised(kind), tmp_path), artifact, tmp_path)
    assert re.search(GRAPHS + says, message)


def test_floats_are_refused_for_a_quantised_graph(artifact: Artifact, tmp_path: Path) -> None:
    message = refuses(WeightsMismatch, "2 problems", floats(0), artifact, tmp_path)
    assert re.search(GRAPHS + "the checkpoint has a plain tensor", message)


def test_quantised_weights_are_refused_for_a_float_graph(tmp_path: Path) -> None:
    plain = export(floats(0), (X,), out=tmp_path / "plain.artifact")
    assert not (plain.path / "parts.json").exists()
    says = "0.weight: the graph has a plain tensor, the checkpoint has Int8Tensor"
    refuses(WeightsMismatch, says, quantised(KIND), plain, tmp_path)


def test_goldens_of_another_kind_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    recorded = {"model": quantised("int8"), "goldens": [(X,)]}
    message = refuses(ParityError, "0.weight", quantised(KIND).state_dict(), artifact, tmp_path, **recorded)
    assert re.search(GRAPHS + r"the model has Int8Tensor\(block_size=\[1, 32\], dtype=float32, act", message)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    distributed.save(quantised(KIND).state_dict(), checkpoint_id=tmp_path / "folder", no_dist=True)
    says = "the chunk of 0.weight at byte 0 must have one storage"
    refuses(CheckpointError, says, tmp_path / "folder", artifact, tmp_path)


@pytest.mark.parametrize(
    "text", ["{", '{"_tensor_data_names": 3}', '{"_type": "A", "_data": {"_type": "B", "_data": 1}}', '{"a":' * 99999]
)
def test_metadata_that_torchao_does_not_write_are_refused(text: str, artifact: Artifact, tmp_path: Path) -> None:
    path = torchao_file(quantised(KIND), tmp_path, **{"0.weight": text})
    refuses(CheckpointError, "saved.safetensors: the metadata of 0.weight is not torchao's", path, artifact, tmp_path)


@pytest.mark.parametrize(("value", "says"), [(3, "its parts are not tensors"), (None, "AttributeError: ")])
def test_a_damaged_tensor_is_refused(value: Any, says: str, artifact: Artifact, tmp_path: Path) -> None:
    state = quantised(KIND).state_dict()
    if value is None:
        del state["0.weight"].qdata
    else:
        state["0.weight"].qdata = value
    says = f"0.weight: is a Int8Tensor that cannot be taken apart: {says}"
    assert "qdata" in refuses(CheckpointError, says, state, artifact, tmp_path) or value


def test_an_artifact_whose_kinds_are_damaged_is_refused(tmp_path: Path) -> None:
    artifact = export(quantised(KIND), (X,), out=tmp_path / "a.artifact")
    (artifact.path / "parts.json").write_text("{}")
    refuses(ArtifactError, "parts.json: altered since the export", quantised(KIND), artifact, tmp_path)


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
