"""`verify()` and `weightswap verify`: goldens, parity and the swap itself."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import save_model

from tests.exporter.parity.models import IDS, SHAPES, tied
from tests.support.program import said
from weightswap_exporter import export, pack
from weightswap_exporter.goldens import GoldenCall, GoldensRequest, record
from weightswap_exporter.modules.tensors import ModelView
from weightswap_exporter.parity import verification, verify
from weightswap_runtime import (
    Artifact,
    BaseMismatch,
    CheckpointError,
    Model,
    SwapReceipt,
    Unsupported,
    WeightFileError,
    read_weights,
    write_delta,
)

RECIPE = """
from tests.exporter.parity.models import IDS, SHAPES, tied

def build():
    return {"model": tied(), "args": (IDS,), "dynamic_shapes": SHAPES}

def fails():
    raise ValueError("no model today")
"""
CASES = [(IDS,)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact, packed weights with goldens, others, and a checkpoint."""
    path = tmp_path_factory.mktemp("verify")
    artifact = export(tied(), (IDS,), out=path / "a", dynamic_shapes=SHAPES, engines=["onnx"])
    pack(tied(), artifact, out=path / "v1.safetensors", goldens=CASES)
    pack(tied(1), artifact, out=path / "v2.safetensors")
    torch.save(tied().state_dict(), path / "checkpoint.pt")
    (path / "recipes.py").write_text(RECIPE)
    linear = torch.nn.Linear(2, 2)
    pack(linear, export(linear, (torch.ones(1, 2),), out=path / "b"), out=path / "other.safetensors")
    return path


def recipe() -> dict[str, Any]:
    """Return a model with other weights than the files, which it then gets."""
    return {"model": tied(7), "args": (IDS,)}


@pytest.mark.parametrize("weights", ["v1.safetensors", "checkpoint.pt"])
def test_everything_is_verified(weights: str, folder: Path) -> None:
    told: list[str] = []
    found = verify(folder / "a", folder / weights, recipe(), on_step=told.append)
    assert found.same, found.problems
    recorded = "goldens" if weights == "v1.safetensors" else "none"
    assert [(check.engine, check.verified) for check in found.goldens] == [("torch", recorded), ("onnx", recorded)]
    assert found.parity is not None
    assert (found.parity.reference, found.parity.other_values) == ("eager", ())
    cases = [case.case for case in found.parity.engines[0].cases]
    assert cases[0] == "case 0"
    assert ("golden 0" in cases) == (weights == "v1.safetensors")
    swaps = [(check.engine, check.residency) for check in found.swaps]
    assert swaps == [(engine, kind) for engine in ("torch", "onnx") for kind in ("double", "single")]
    empty = sum("=0" in case for case in cases)
    assert empty
    assert {check.engine: check.calls for check in found.swaps} == dict.fromkeys(("torch", "onnx"), len(cases) - empty)
    assert all(check.bytes_read > 0 for check in found.swaps)
    assert found.before == "random weights"
    assert "a swap on onnx, single residency" in told


def test_without_a_recipe_engines_are_compared_with_torch(folder: Path) -> None:
    found = verify(folder / "a", folder / "v1.safetensors", before=folder / "v2.safetensors")
    assert found.same
    assert found.parity is not None
    assert (found.parity.reference, [each.engine for each in found.parity.engines]) == ("torch", ["onnx"])
    assert found.before.endswith("v2.safetensors")


def test_checks_that_were_not_made_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MOST_BYTES", 100)
    found = verify(folder / "a", folder / "v1.safetensors", engines=["torch"])
    assert found.same
    assert found.swaps == ()
    assert [note.partition(":")[0] for note in found.notes] == ["the engines were not compared", "no swap was tried"]


def test_weights_that_do_not_reproduce_their_goldens(folder: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(folder / "a")
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    state["blocks.0.out.bias"][3] += 0.5
    packed = pack(state, artifact, out=tmp_path / "v.safetensors")
    calls = GoldensRequest([GoldenCall("forward", (IDS,), {})], None)
    recording = record(ModelView(tied()), calls, artifact.manifest, artifact.constants(), {"forward": "forward"})
    (tmp_path / "v.goldens.safetensors").write_bytes(recording.encode(packed.weights_id))
    found = verify(folder / "a", packed.path, engines=["torch"])
    assert not found.same
    assert found.problems[0].startswith("goldens, torch: case 0, forward, left")


@pytest.mark.usefixtures("_places")
def test_a_delta_is_verified_from_the_weights_that_it_starts_from(folder: Path) -> None:
    delta = write_delta(folder / "v2.safetensors", folder / "v1.safetensors", folder / "d.safetensors").path
    found = verify(folder / "a", delta, recipe(), before=folder / "v2.safetensors")
    assert found.same, found.problems
    assert [check.verified for check in found.goldens] == ["goldens", "goldens"]
    assert {check.bytes_read for check in found.swaps} == {sum(each.nbytes for each in read_weights(delta).values())}
    with pytest.raises(Unsupported, match="give the weights from which it starts"):
        verify(folder / "a", delta)
    with pytest.raises(BaseMismatch):
        verify(folder / "a", delta, before=folder / "v1.safetensors")


def test_a_swap_that_leaves_old_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault as if a commit had not reached the served session."""
    swap = Model.swap
    first: WeakKeyDictionary[Model, Any] = WeakKeyDictionary()

    def stale(self: Model, path: Any, **options: Any) -> SwapReceipt:
        return swap(self, first.setdefault(self, path), **options)

    monkeypatch.setattr(Model, "swap", stale)
    found = verify(folder / "a", folder / "v1.safetensors", engines=["torch"], before=folder / "v2.safetensors")
    assert not found.same
    assert {(check.residency, bool(check.problems)) for check in found.swaps} == {("double", True), ("single", True)}
    assert found.problems[0].startswith("swap, torch, double residency: after the swap, forward, golden 0, left[")


def test_a_rollback_that_gives_something_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "rollback", lambda self: None)
    found = verify(folder / "a", folder / "v1.safetensors", engines=["torch"])
    assert all(": after the rollback, " in problem for problem in found.problems)
    assert found.problems


def test_a_graph_that_is_not_the_models(folder: Path) -> None:
    model = tied()
    model.blocks[1].scale = 0.75
    found = verify(folder / "a", folder / "v1.safetensors", {"model": model, "args": (IDS,)}, engines=["torch"])
    assert not found.same
    assert found.parity is not None
    divergence = found.parity.engines[0].divergence
    assert divergence is not None
    assert divergence.module == "blocks.1"
    assert found.problems[0].startswith("parity, torch: forward, case 0, left: [")


def command(folder: Path, *arguments: object, status: int = 0) -> str:
    return said("verify", folder / str(arguments[0]), *arguments[1:], status=status)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    weights, report = str(folder / "v1.safetensors"), tmp_path / "report.html"
    built = f"{folder / 'recipes.py'}:build"
    text = command(folder, "a", weights, "--recipe", built, "--html", report)
    told = ("recorded calls", "reproduced", "calls, against eager", "bit for bit", "swap from random weights")
    for each in (*told, "of the largest value"):
        assert each in text
    assert "ULP" not in text  # of numbers near zero there are billions, within the tolerance
    assert re.search(r"^verified, in \d+\.\d s$", text, re.MULTILINE)
    page = report.read_text()
    assert "Calls, against eager" in page
    assert "blocks.0" not in page  # nothing diverges


@pytest.mark.slow
def test_a_mismatch_has_status_1_and_says_where(folder: Path, tmp_path: Path) -> None:
    weights, report = str(folder / "v1.safetensors"), tmp_path / "report.html"
    other = RECIPE.replace('"model": tied()', '"model": wrong()') + (
        "\ndef wrong():\n    model = tied()\n    model.blocks[1].scale = 0.75\n    return model\n"
    )
    (tmp_path / "wrong_recipe.py").write_text(other)
    arguments = ("a", weights, "--recipe", f"{tmp_path / 'wrong_recipe.py'}:build", "--engines", "torch,onnx")
    text = command(folder, *arguments, "--html", report, status=1)
    assert "torch, first divergence: blocks.1 (Block)\n  node mul_2, aten.mul.Tensor" in text
    assert "problem: parity, torch: forward, case 0, left: [" in text
    assert re.search(r"^not verified, \d+ problems", text, re.MULTILINE)
    assert "Where torch and onnx diverge" in report.read_text()
    told = json.loads(command(folder, *arguments[:-1], "torch", "--json", status=1))
    assert told["same"] is False
    assert told["verification"]["parity"]["engines"][0]["divergence"]["module"] == "blocks.1"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--recipe", "{}/recipes.py:fails"), 2, "raised ValueError: no model today"),
        (("--recipe", "{}/recipes.py:absent"), 2, "has no function 'absent'"),
        (("--recipe", ""), 2, "'' is not a recipe"),
        (("--engines", " ,"), 2, "--engines is empty"),
        (("--engine", "tensorrt"), 2, "engine 'tensorrt'"),
        (("--engine", "aoti"), 2, "was not compiled for the engine 'aoti'"),
        (("--tolerance", "1e-3"), 2, "expected RTOL,ATOL"),
        (("--tolerance", "1e-3,-1"), 2, "expected two finite numbers, 0 or more"),
        (("--from", "{}/absent.safetensors"), 1, "absent.safetensors: cannot be opened"),
    ],
)
def test_bad_requests(arguments: tuple[str, str], status: int, says: str, folder: Path) -> None:
    option, value = arguments
    text = command(folder, "a", folder / "v1.safetensors", option, value.format(folder), status=status)
    assert says in " ".join(text.replace("│", " ").split())


def test_goldens_of_other_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "v2.safetensors", tmp_path / "v.safetensors")
    shutil.copy(folder / "v1.goldens.safetensors", tmp_path / "v.goldens.safetensors")
    with pytest.raises(WeightFileError, match=r"recorded for the weights .*, but those beside it are"):
        verify(folder / "a", tmp_path / "v.safetensors")
    assert '"error": "WeightFileError"' in command(folder, "a", tmp_path / "v.safetensors", "--json", status=1)


OTHER = {"model": torch.nn.Linear(2, 2), "args": (IDS,)}
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("absent.safetensors", recipe(), WeightFileError, "absent.safetensors"),
    ("recipes.py", recipe(), CheckpointError, "recipes.py"),
    ("v1.safetensors", OTHER, CheckpointError, r"v1\.safetensors: does not fit this model"),
    ("other.safetensors", recipe(), CheckpointError, "not in the file"),
]


@pytest.mark.parametrize(("weights", "recipe", "error", "says"), REFUSED)
def test_weights_of_something_else_are_refused(
    weights: str, recipe: dict[str, Any], error: type[Exception], says: str, folder: Path
) -> None:
    with pytest.raises(error, match=says):
        verify(folder / "a", folder / weights, recipe)


def test_a_checkpoint_that_the_recipe_loads_and_others_before_it(folder: Path, tmp_path: Path) -> None:
    torch.save({"deep": {"net": tied().state_dict()}}, tmp_path / "deep.pt")
    torch.save(tied(1).state_dict(), tmp_path / "other.pt")

    def load_deep(model: torch.nn.Module, checkpoint: dict[str, Any]) -> None:
        model.load_state_dict(checkpoint["deep"]["net"])

    loaded, before = recipe() | {"load": load_deep}, tmp_path / "other.pt"
    found = verify(folder / "a", tmp_path / "deep.pt", loaded, before=before, engines=["torch"])
    assert found.same, found.problems


def test_a_file_that_the_model_refuses_and_a_server_takes(folder: Path, tmp_path: Path) -> None:
    """Without the second name of tied weights."""
    save_model(tied(), str(tmp_path / "model.safetensors"))
    assert verify(folder / "a", tmp_path / "model.safetensors", recipe(), engines=["torch"]).same
