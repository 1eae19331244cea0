"""Inputs without outputs, of artifacts that were exported from a skeleton: every set of weights is tried with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.goldens import IMAGE, goldens_of
from tests.support.models import Does, Everything
from tests.support.program import document, said
from tests.support.setups import different, loaded
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_exporter.parity import check_outputs
from weightswap_runtime import Artifact, GoldenMismatch, ParityError, WeightFileError, load
from weightswap_runtime.format.goldens import INPUTS_NAME, open_goldens
from weightswap_runtime.format.safetensors import METADATA_KEY

IDS = torch.tensor([[1, 2], [3, 0]])
METHODS = {"forward": MethodSpec("forward", (IMAGE,)), "encode": MethodSpec("encode", (IDS,))}
GOLDENS = {"forward": [(IMAGE,), (IMAGE * 2,)], "encode": [(IDS,)]}


def exported(out: Path, engines: tuple[str, ...] = ("torch",)) -> Artifact:
    with skeleton():
        model = Everything().eval()
    return export(model, methods=METHODS, out=out, goldens=GOLDENS, engines=engines)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return exported(tmp_path_factory.mktemp("inputs") / "m.artifact")


def packed(artifact: Artifact, folder: Path, seed: int = 1, **options: object) -> Path:
    model = different(Everything, seed)
    with torch.no_grad():
        for name, value in options.pop("values", {}).items():  # type: ignore[attr-defined]
            model.get_parameter(name).view(-1)[0] = value
    return pack(model, artifact, out=folder / f"v{seed}.safetensors", **options).path  # type: ignore[arg-type]


def test_the_file_has_inputs_alone_and_always_the_same_bytes(artifact: Artifact, tmp_path: Path) -> None:
    again = exported(tmp_path / "again.artifact")
    assert (again.path / INPUTS_NAME).read_bytes() == (artifact.path / INPUTS_NAME).read_bytes()
    assert (again.path / "manifest.json").read_bytes() == (artifact.path / "manifest.json").read_bytes()
    with skeleton():
        model = Everything().eval()
    assert export(model, methods=METHODS, out=tmp_path / "bare.artifact").graph_id == artifact.graph_id
    with safetensors.safe_open(artifact.path / INPUTS_NAME, "pt") as opened:
        document = msgspec.json.decode(opened.metadata()[METADATA_KEY])
        assert sorted(opened.keys()) == ["0.input.0", "1.input.0", "2.input.0"]
        assert torch.equal(opened.get_tensor("0.input.0"), IMAGE)
    assert document["format_version"] == 1
    assert [document[key] for key in ("weights_id", "environment", "tolerance")] == [None, None, None]
    assert [(case["method"], case["outputs"]) for case in document["cases"]] == [*[("forward", [])] * 2, ("encode", [])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_every_set_of_weights_is_tried(engine: str, residency: str, tmp_path: Path) -> None:
    artifact = exported(tmp_path / "m.artifact", ("torch", engine))
    model = load(artifact, packed(artifact, tmp_path), engine=engine, residency=residency)  # type: ignore[arg-type]
    assert model.history[-1].verified == "finite"
    worse = packed(artifact, tmp_path, 2, values={"conv.weight": 3e38})  # finite, but what is computed from it is not
    with pytest.raises(GoldenMismatch) as refused:
        model.swap(worse)
    assert INPUTS_NAME in str(refused.value)
    assert not any("encode" in problem for problem in refused.value.problems)
    assert model.swap(worse, verify="off").verified == "none"
    with pytest.raises(GoldenMismatch):
        model.swap(packed(artifact, tmp_path, 3, values={"embed.weight": math.nan}))


def test_goldens_of_a_file_count_first(artifact: Artifact, tmp_path: Path) -> None:
    model = different(Everything, 1)
    path = pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=GOLDENS).path
    served = load(artifact, path)
    assert served.history[-1].verified == "goldens"
    pack(different(Everything, 2), artifact, out=tmp_path / "v2.safetensors")
    (tmp_path / "v1.goldens.safetensors").rename(tmp_path / "v2.goldens.safetensors")
    with pytest.raises(WeightFileError):
        served.swap(tmp_path / "v2.safetensors")


def test_an_artifact_of_a_real_model_has_goldens(tmp_path: Path) -> None:
    artifact = export(different(Everything, 1), methods=METHODS, out=tmp_path / "m.artifact", goldens=GOLDENS)
    assert INPUTS_NAME not in artifact.manifest.files
    assert goldens_of(artifact).record.has_outputs


def test_inspect_shows_inputs_alone(artifact: Artifact, tmp_path: Path) -> None:
    def words(*arguments: object) -> str:
        return " ".join(said("inspect", *arguments, width=300).split())

    told, page = "every set of weights must give finite outputs", tmp_path / "page.html"
    assert f"inputs 2 of forward, 1 of encode; {told}" in words(artifact.path)
    words(artifact.path, "--html", page)
    assert told in page.read_text()
    alone = words(artifact.path / INPUTS_NAME)
    assert "weights id none: inputs alone" in alone
    assert "outputs were not recorded; they must be finite" in alone
    assert document("inspect", artifact.path)["goldens"]["weights_id"] is None


def test_inputs_alone_cannot_be_compared(artifact: Artifact) -> None:
    with pytest.raises(ParityError, match="has only inputs"):
        check_outputs(artifact.path / INPUTS_NAME, different(Everything, 1), artifact)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda document: document.update(weights_id="0" * 64), "weights id without an environment"),
        (lambda document: document["cases"][2].update(outputs=["2.input.0"]), "expected 0 outputs, found 1"),
    ],
)
def test_contradictory_files_are_refused(
    change: Callable[[dict], None], says: str, artifact: Artifact, tmp_path: Path
) -> None:
    path = artifact.path / INPUTS_NAME
    with safetensors.safe_open(path, "pt") as opened:
        document = msgspec.json.decode(opened.metadata()[METADATA_KEY])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(document)
    broken = tmp_path / "broken.safetensors"
    safetensors.torch.save_file(tensors, broken, {METADATA_KEY: msgspec.json.encode(document).decode()})
    with pytest.raises(WeightFileError, match=says):
        open_goldens(broken, artifact.manifest)


def test_a_model_without_outputs_that_are_tensors(tmp_path: Path) -> None:
    def sizes() -> nn.Module:
        act = lambda m, x: (x.argmax() + m.weight.sum().long(), 3, None)  # noqa: E731
        return Does(act, weight=nn.Parameter(torch.zeros(2))).eval()

    with skeleton():
        model = sizes()
    artifact = export(model, (torch.ones(2),), out=tmp_path / "m.artifact", goldens=[(torch.ones(2),)])
    assert loaded(artifact, tmp_path, sizes()).history[-1].verified == "finite"
