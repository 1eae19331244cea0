"""Comparisons of two artifacts: the differences of each part, the verdict, and that no torch is needed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from torch import nn

from tests.support.models import Does, doing
from tests.support.tiny import TinyArtifact
from weightswap_exporter import export
from weightswap_runtime import Artifact, ArtifactError
from weightswap_runtime.format.manifest import encode_manifest, with_graph_id
from weightswap_tools.diff import ArtifactsDiff, compare_artifacts


def net(width: int = 4, shift: float = 0.5, *, activation: nn.Module | None = None) -> nn.Module:
    """Return two layers, a constant, and a counter that calls change."""
    held = {"first": nn.Linear(3, width), "activation": activation or nn.ReLU(), "second": nn.Linear(width, 2)}
    shifts = nn.Buffer(torch.full((2,), shift), persistent=False)
    act = lambda m, x: doing(m.calls.add_(1), m.second(m.activation(m.first(x))) + m.shift)  # noqa: E731
    return Does(act, **held, shift=shifts, calls=nn.Buffer(torch.zeros(())))


def renamed() -> nn.Module:
    """Return a model whose checkpoints have another name for one weight."""
    model = net()
    model._register_state_dict_hook(lambda _, state, __, ___: state.update(w=state.pop("first.weight")))
    model.register_load_state_dict_pre_hook(lambda _, state, *__: state.update({"first.weight": state.pop("w")}))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "base": net,
    "wider": lambda: net(5),
    "gelu": lambda: net(activation=nn.GELU()),
    "shifted": lambda: net(shift=0.75),
    "renamed": renamed,
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        name: export(build().eval(), (torch.zeros(2, 3),), out=folder / f"{name}.artifact")
        for name, build in MODELS.items()
    }


def compare(artifacts: dict[str, Artifact], name: str) -> ArtifactsDiff:
    return compare_artifacts(artifacts["base"].path, artifacts[name].path)


@pytest.mark.slow
def test_an_artifact_and_itself(artifacts: dict[str, Artifact]) -> None:
    diff = compare(artifacts, "base")
    assert (diff.methods, diff.rows, diff.constants, diff.sources, diff.engines) == ((), (), (), (), {})
    assert (diff.level, diff.verdict) == ("same", "The same graph: weight files of one fit the other.")
    assert msgspec.structs.replace(diff, transforms_changed=True).level == "notice"


def test_other_shapes_do_not_fit(artifacts: dict[str, Artifact]) -> None:
    diff = compare(artifacts, "wider")
    assert not diff.fits
    assert diff.verdict == "Weight files of one do not fit the other: 6 problems."
    assert "old weights, new graph: first.weight: expected F32[5, 3], found F32[4, 3]" in diff.misfits
    assert "new weights, old graph: first.weight: expected F32[4, 3], found F32[5, 3]" in diff.misfits
    names = ("first.bias", "first.weight", "second.weight")
    assert [(row.kind, row.name) for row in diff.rows] == [("weights", name) for name in names]
    ((method,), before) = diff.methods, diff.rows[0].before
    assert (method.same_signature, method.same_graph, method.operators) == (True, False, ())
    assert before is not None
    assert (before.shape, diff.level) == ((4,), "alarm")


def test_operators_are_counted(artifacts: dict[str, Artifact]) -> None:
    diff = compare(artifacts, "gelu")
    counts = {found.name: (found.before, found.after) for found in diff.methods[0].operators}
    assert counts == {"aten.relu.default": (1, 0), "aten.gelu.default": (0, 1)}
    assert "with allow_other_graph=True" in diff.verdict
    assert (diff.fits, diff.level, diff.same_graph) == (True, "notice", False)


def test_values_of_constants(artifacts: dict[str, Artifact]) -> None:
    diff = compare(artifacts, "shifted")
    (constant,) = diff.constants
    assert (constant.name, constant.status) == ("shift", "changed")
    assert constant.change is not None
    assert constant.change.rel_change == 0.5
    assert diff.fits


def test_changed_sources_of_weights(artifacts: dict[str, Artifact]) -> None:
    diff = compare(artifacts, "renamed")
    (source,) = diff.sources
    assert (source.weight, source.before, source.after) == ("first.weight", ("first.weight",), ("w",))
    assert (diff.fits, diff.level) == (True, "notice")


def test_methods_signatures_and_engines(tiny: TinyArtifact, tmp_path: Path) -> None:
    other = TinyArtifact(tmp_path / "other.artifact")
    document = other.document()
    forward = document["methods"]["forward"]  # type: ignore[index]
    document["methods"]["encode"] = forward  # type: ignore[index]
    forward["signature"]["dims"]["batch"]["max"] = 4
    document["files"]["engines/aoti/x86/forward.pt2"] = "0" * 64  # type: ignore[index]
    write(other, document)
    diff = compare_artifacts(tiny.path, other.path)
    told = {method.name: (method.before is None, method.same_signature) for method in diff.methods}
    assert told == {"encode": (True, False), "forward": (False, False)}
    assert all(count.before == 0 for count in diff.methods[0].operators)
    assert diff.methods[1].operators == ()
    assert diff.methods[1].same_graph
    assert diff.engines == {"aoti x86": "added"}
    assert compare_artifacts(other.path, tiny.path).engines == {"aoti x86": "removed"}


def write(tiny: TinyArtifact, document: dict[str, object]) -> None:
    """A changed manifest with the matching graph id."""
    tiny.write_manifest(encode_manifest(with_graph_id(msgspec.convert(document, type(tiny.manifest)))))


def deep(depth: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("m/models/model.json", '{"a":' * depth + "1" + "}" * depth)
    return content.getvalue()


@pytest.mark.parametrize("graph", [b"no archive", deep(100_000)], ids=["no archive", "deep"])
def test_a_graph_that_cannot_be_read(graph: bytes, tiny: TinyArtifact, tmp_path: Path) -> None:
    other = TinyArtifact(tmp_path / "other.artifact")
    (other.path / "graphs/forward.pt2").write_bytes(graph)
    document = other.document()
    document["files"]["graphs/forward.pt2"] = blake3(graph).hexdigest()  # type: ignore[index]
    write(other, document)
    with pytest.raises(ArtifactError, match=r"other\.artifact/graphs/forward\.pt2: (not an archive|its graph cannot)"):
        compare_artifacts(tiny.path, other.path)


def test_files_that_were_altered(artifacts: dict[str, Artifact], tiny: TinyArtifact) -> None:
    path = tiny.path / "graphs/forward.pt2"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="altered since the export"):
        compare_artifacts(artifacts["base"].path, tiny.path)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from weightswap_tools.diff.command import diff_command
sys.argv = ["diff", *sys.argv[1:]]
diff_command()
"""


@pytest.mark.slow
def test_no_torch_is_needed(artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    page = tmp_path / "d.html"
    paths = [artifacts["base"].path, artifacts["gelu"].path]
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, *map(str, paths)]
    done = subprocess.run([*command, "--json", "--html", page], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["kind"], document["fits"]) == ("artifacts", True)
    assert "aten.gelu.default" in page.read_text()
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "verdict     Another graph, with the same weights" in text
    assert "aten.relu.default" in text
