"""Compiling an artifact for other engines, and ONNX models that point into weight files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.export import Dim

from tests.support.checkpoints import saved_shards
from tests.support.loading import Fused
from tests.support.models import Counter, Does, Everything
from tests.support.program import run, said
from weightswap_exporter import MethodSpec, compile_engines, export, export_onnx, exporting, pack, skeleton
from weightswap_exporter.engines import compiling
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    CaptureError,
    ExportError,
    UnknownName,
    Unsupported,
    WeightsMismatch,
    load,
)

SHAPES = {"x": {0: Dim("batch", max=8)}}


def tied() -> nn.Module:
    """Tied weights, one of which is kept in another order than row-major, and a constant."""
    layers = {name: nn.Linear(4, 4, bias=False) for name in ("one", "two")}
    layers["two"].weight = layers["one"].weight
    turned = nn.Parameter(torch.randn(3, 4).T)
    act = lambda m, x: torch.relu(m.two(m.one(x)) + m.plain) @ m.turned  # noqa: E731
    return Does(act, **layers, turned=turned, plain=torch.arange(4.0))


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return export(tied(), (torch.ones(2, 4),), out=tmp_path / "a", dynamic_shapes=SHAPES)


def outputs(path: Path, **inputs: torch.Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})


@torch.no_grad()
def gives(path: Path, model: nn.Module, x: torch.Tensor) -> bool:
    """Return whether ONNX Runtime computes of a graph what a model does."""
    return np.allclose(outputs(path, x=x)[0], model(x), rtol=1e-5, atol=1e-6)


def files(artifact: Artifact) -> dict[str, bytes]:
    return {name: (artifact.path / name).read_bytes() for name in artifact.manifest.files}


def test_compiling_adds_files_and_keeps_the_rest(artifact: Artifact) -> None:
    before = files(artifact)
    compiled = compile_engines(artifact.path, ["onnx", "torch"])
    after = files(compiled)
    assert after.keys() - before.keys() == {"engines/onnx/forward.onnx"}
    assert {name: after[name] for name in before} == before
    assert compiled.graph_id == artifact.graph_id
    compiled.verify()
    assert files(compile_engines(artifact, ["onnx"], trial=False)) == after


@pytest.mark.slow
def test_export_compiles_too_from_a_skeleton_and_to_the_same_bytes(tmp_path: Path) -> None:
    with skeleton():
        hollow = tied()
    for name, model in (("one", hollow), ("two", tied())):
        export(model, (torch.ones(2, 4),), out=tmp_path / name, dynamic_shapes=SHAPES, engines=["torch", "onnx"])
    one, two = (Artifact.open(tmp_path / name) for name in ("one", "two"))
    assert files(one) == files(two)
    assert "engines/onnx/forward.onnx" in one.manifest.files


def test_a_graph_that_cannot_be_compiled_leaves_nothing(tmp_path: Path) -> None:
    looked = Does(lambda m, x: torch.linalg.eigvals(x).real)
    with pytest.raises(CaptureError, match=r"method 'forward': .*ONNX has no aten\.linalg_eig\."):
        export(looked, (torch.eye(3),), out=tmp_path / "a", engines=["onnx"])
    assert list(tmp_path.iterdir()) == []
    plain = export(looked, (torch.eye(3),), out=tmp_path / "a")
    before = {path.name for path in plain.path.rglob("*")}
    with pytest.raises(CaptureError):
        compile_engines(plain, ["onnx"])
    assert {path.name for path in plain.path.rglob("*")} == before
    assert load(plain).engine == "torch"


def test_mutations_that_onnx_would_lose_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="changes the input 'x', which ONNX cannot express"):
        export(Does(lambda m, x: x.add_(1) * 2), (torch.ones(2),), out=tmp_path / "a", engines=["onnx"])


class Masked(nn.Module):
    """A model that passes the rows of a mask, which may be none, to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = x[mask][None].transpose(0, 1)
        if isinstance(self.layer, nn.Linear):
            return self.layer(rows[:, 0])
        return self.layer(*[rows] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))[0]


MASKED = (torch.randn(4, 8), torch.tensor([True, True, False, True]))
LAYERS = {"lstm": nn.LSTM(8, 8, batch_first=True), "gru": nn.GRU(8, 8, batch_first=True)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*LAYERS, "bmm"])
def test_operators_that_end_the_process_on_empty_inputs_are_refused(name: str, tmp_path: Path) -> None:
    model = Masked(LAYERS.get(name) or nn.MultiheadAttention(8, 2)).eval()
    with pytest.raises(CaptureError, match=rf"aten\.{name}\.\w+ has a size that depends on values.*Use the engine"):
        export(model, MASKED, out=tmp_path / "a", engines=["onnx"])


def test_rows_of_a_mask_are_compiled(tmp_path: Path) -> None:
    export(Masked(nn.Linear(8, 8)).eval(), MASKED, out=tmp_path / "a", engines=["onnx"])


def test_an_export_over_a_compiled_artifact_names_the_missing_engine(tmp_path: Path) -> None:
    out, linear = tmp_path / "a", nn.Linear(2, 2)
    export(linear, (torch.ones(1, 2),), out=out, engines=["onnx"])
    with pytest.warns(UserWarning, match="was compiled for onnx, and the new one is not; run weightswap compile"):
        export(linear, (torch.ones(1, 2),), out=out)
    export(linear, (torch.ones(1, 2),), out=out)  # warnings are errors


@pytest.mark.parametrize("engines", ["onnx", ["tensorrt"], ["onnx", 3], None, {"onnx"}])
def test_unknown_engines_are_refused(engines: Any, artifact: Artifact) -> None:
    with pytest.raises(Unsupported):
        compile_engines(artifact, engines)


def test_an_altered_graph_is_not_compiled(artifact: Artifact) -> None:
    (artifact.path / "graphs/forward.pt2").write_bytes(b"else")
    with pytest.raises(ArtifactError, match="altered since the export"):
        compile_engines(artifact, ["onnx"])


@pytest.mark.slow
def test_a_graph_points_into_a_weight_file(artifact: Artifact, tmp_path: Path) -> None:
    model = tied()
    x = torch.randn(5, 4)
    (tmp_path / "weights").mkdir()
    packed = pack(model, artifact, out=tmp_path / "weights" / "v1.safetensors").path
    for compiled in (artifact, compile_engines(artifact, ["onnx"], trial=False)):
        path = export_onnx(compiled, packed, out=tmp_path / "model.onnx")
        onnx.checker.check_model(path, full_check=True)
        assert path.stat().st_size < packed.stat().st_size + 4000
        assert gives(path, model, x)
    other = tied()
    pack(other, artifact, out=packed)
    assert gives(path, other, x)
    shutil.move(tmp_path / "weights", tmp_path / "b" / "weights")
    shutil.move(path, tmp_path / "b" / "model.onnx")
    assert gives(tmp_path / "b" / "model.onnx", other, x)


def test_shards_and_checkpoint_keys_are_pointed_into_too(artifact: Artifact, tmp_path: Path) -> None:
    model = tied()
    state = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
    (index,) = saved_shards(tmp_path / "shards", state, ".safetensors").glob("*.index.json")
    assert gives(export_onnx(artifact, index, out=tmp_path / "shards" / "model.onnx"), model, torch.randn(2, 4))


def test_state_stays_an_input(tmp_path: Path) -> None:
    model = Counter()
    methods = {"forward": MethodSpec("forward", (torch.ones(2, 3),)), "peek": MethodSpec("peek")}
    artifact = export(model, methods=methods, out=tmp_path / "a")
    packed = pack(model, artifact, out=tmp_path / "v.safetensors").path
    path = export_onnx(artifact, packed, out=tmp_path / "m.onnx", method="forward")
    x, steps, mean = torch.randn(2, 3), torch.tensor(4), torch.ones(3)
    y, *after = outputs(path, x=x, steps=steps, mean=mean)
    with torch.no_grad():
        model.steps.copy_(steps)
        model.mean.copy_(mean)
        np.testing.assert_allclose(y, model(x), rtol=1e-5, atol=1e-5)
    assert [int(value) for value in after if value.dtype == np.int64] == [5]
    with pytest.raises(UnknownName):
        export_onnx(artifact, packed, out=tmp_path / "n.onnx", method="encode")


@pytest.mark.slow
def test_weight_files_elsewhere_or_of_other_weights_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    packed = pack(tied(), artifact, out=tmp_path / "v.safetensors").path
    with pytest.raises(ExportError, match="must be in the folder of"):
        export_onnx(artifact, packed, out=tmp_path / "deeper" / "m.onnx")
    safetensors.torch.save_file({"one.weight": torch.zeros(4, 4)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsMismatch):
        export_onnx(artifact, tmp_path / "w.safetensors", out=tmp_path / "m.onnx")
    assert not list(tmp_path.rglob("*.onnx"))
    with pytest.raises(ExportError, match="is a folder"):
        export_onnx(artifact, packed, out=tmp_path)
    before = packed.read_bytes()
    with pytest.raises(ExportError, match="is the weight file itself"):
        export_onnx(artifact, packed, out=tmp_path / "a" / ".." / "v.safetensors")
    assert packed.read_bytes() == before


def test_weights_without_elements_are_written_into_the_model(tmp_path: Path) -> None:
    weights = {"nothing": nn.Parameter(torch.empty(0, 3)), "weight": nn.Parameter(torch.ones(3))}
    model, x = Does(lambda m, x: torch.cat([x * m.weight, m.nothing]), **weights), torch.full((2, 3), 2.0)
    artifact = export(model, (torch.ones(2, 3),), out=tmp_path / "a")
    packed = pack(model, artifact, out=tmp_path / "v.safetensors").path
    assert gives(export_onnx(artifact, packed, out=tmp_path / "m.onnx"), model, x)


@pytest.mark.slow
def test_weights_that_are_computed_have_to_be_packed(tmp_path: Path) -> None:
    model = Fused(4)
    artifact = export(model, (torch.ones(2, 4),), out=tmp_path / "a")
    safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "c.safetensors")
    with pytest.raises(WeightsMismatch):
        export_onnx(artifact, tmp_path / "c.safetensors", out=tmp_path / "m.onnx")
    packed = pack(model, artifact, out=tmp_path / "v.safetensors").path
    assert export_onnx(artifact, packed, out=tmp_path / "m.onnx").exists()


def test_a_model_with_everything_has_one_graph_for_each_method(tmp_path: Path) -> None:
    calls = {"forward": (torch.randn(2, 1, 5, 5),), "encode": (torch.tensor([0, 3]),)}
    methods = {name: MethodSpec(name, args) for name, args in calls.items()}
    artifact = export(Everything().eval(), methods=methods, out=tmp_path / "a", engines=["onnx"])
    assert sorted(path.name for path in (artifact.path / "engines/onnx").iterdir()) == ["encode.onnx", "forward.onnx"]


def test_progress_names_the_method_and_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("aoti", "onnx"):
        monkeypatch.setitem(compiling._MAKERS, engine, lambda artifact, method, device: (method + device, b""))
    monkeypatch.setattr(compiling, "try_engines", lambda *_: None)
    told: list[str] = []

    class TwoWays(nn.Module):
        encode = decode = lambda self, x: x + 1

    methods = {name: MethodSpec(name, (torch.ones(2),)) for name in ("encode", "decode")}
    artifact = export(TwoWays(), methods=methods, out=tmp_path / "a", on_step=told.append)
    assert told == ["capturing encode, decode"]
    told.clear()
    compile_engines(artifact, ["torch", "aoti", "onnx"], on_step=told.append)
    made = [f"{method} for the engine {engine}" for engine in ("aoti", "onnx") for method in methods]
    compiled = [f"compiling {what} ({number} of 4)" for number, what in enumerate(made, 1)]
    assert told == [*compiled, "trying what was compiled"]


def test_an_export_shows_its_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "try_engines", lambda *_: None)
    built = "import torch\n\ndef build():\n    return torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)\n"
    (tmp_path / "recipe.py").write_text(built)
    command = ("export", f"{tmp_path}/recipe.py:build", "-o", tmp_path / "a", "--engine", "onnx", "--engine", "torch")
    assert "compiling" not in said(*command)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "compiling forward for the engine onnx (1 of 1)" in run(*command, width=100).stderr
    told: list[str] = []
    export(nn.Linear(2, 2).eval(), (torch.ones(1, 2),), out=tmp_path / "b", on_step=told.append)
    assert told == ["capturing forward"]
