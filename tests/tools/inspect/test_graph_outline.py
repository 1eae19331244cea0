"""Graphs by module, compared with torch.export's view of the same graphs; and hostile archives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.forged import replace_file, with_document
from tests.support.models import Counter as Counting
from tests.support.models import Everything
from tests.support.tiny import TinyArtifact
from weightswap_exporter import MethodSpec, export
from weightswap_runtime import ArtifactError
from weightswap_runtime.engines.graph_archive import UnknownPart
from weightswap_runtime.format.artifact import Artifact
from weightswap_tools.inspect.graph import Outline, outline

BATCH = {0: Dim("batch", max=9)}


class Twice(nn.Module):
    """One layer that is called twice, in a block that is called once, and a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = self.block[0](x).sin()
        y = self.block(y)
        return self.head(y), y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "twice": (Twice, (torch.rand(2, 4),)),
    "everything": (Everything, (torch.rand(2, 1, 8, 8),)),
    "counter": (Counting, (torch.rand(2, 3),)),
    "lstm": (lambda: nn.LSTM(3, 4, 2), (torch.rand(5, 2, 3),)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (torch.rand(5, 2, 8),)),
}


def outlined(folder: Path, model: nn.Module, args: tuple[torch.Tensor, ...], **more: Any) -> tuple[Artifact, Outline]:
    artifact = export(model.eval(), args, out=folder / "m.artifact", **more)
    return artifact, outline(artifact, artifact.manifest.methods["forward"])


def calls_of(graph: torch.fx.Graph, root: nn.Module, default: str = "") -> Counter[tuple[str, str]]:
    """Module and operator of every call, subgraphs included, according to torch."""
    found: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.op != "call_function" or "getitem" in str(node.target):
            continue
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0].partition("@")[0] if stack else default
        found[path, str(node.target)] += 1
        for argument in node.args:
            if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":
                inner = getattr(root, str(argument.target))
                found += calls_of(inner.graph, inner, path)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_those_of_torch(name: str, tmp_path: Path) -> None:
    build, args = MODELS[name]
    artifact, found = outlined(tmp_path, build(), args)
    program = torch.export.load(artifact.path / "graphs/forward.pt2")
    expected = calls_of(program.graph, program.graph_module)
    ours = Counter({(path, operator): n for path, module in found.items() for operator, n in module.calls.items()})
    assert sum(ours.values()) == sum(expected.values())
    aten = {key for key in expected if key[1].startswith("aten.")}
    assert {key: ours[key] for key in aten} == {key: expected[key] for key in aten}


def test_inputs_and_outputs_of_modules(tmp_path: Path) -> None:
    _, found = outlined(tmp_path, Twice(), (torch.rand(2, 4),), dynamic_shapes={"x": BATCH})
    head = found["head"]
    assert head.kind == "torch.nn.modules.linear.Linear"
    assert list(head.takes.values()) == [("F32[batch, 4]", ["block.1"])]
    assert list(head.gives.values()) == [("F32[batch, 2]", ["the caller"])]
    activation = found["block.1"]
    assert [others for _, others in activation.gives.values()] == [["head", "the caller"]]
    root = found[""]
    assert list(root.takes.values()) == [("F32[batch, 4]", ["the input x"])]
    assert sorted(kind for kind, _ in root.gives.values()) == ["F32[batch, 2]", "F32[batch, 4]"]


def test_a_weight_of_another_module_is_taken(tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("encode", (torch.arange(4),))}
    artifact = export(Everything().eval(), methods=methods, out=tmp_path / "m.artifact")
    found = outline(artifact, artifact.manifest.methods["forward"])
    flows = list(found["embed"].takes.values())
    assert ("F32[6, 6]", ["the weight head.weight"]) in flows
    assert [others for _, others in found["head"].takes.values()] == [["embed"]]


def test_values_of_an_inner_graph_have_types(tmp_path: Path) -> None:
    _, found = outlined(tmp_path, Twice(), (torch.rand(2, 4),))
    flows = [flow for module in found.values() for flow in (*module.takes.values(), *module.gives.values())]
    assert {kind for kind, _ in flows} == {"F32[2, 4]", "F32[2, 2]"}


GRAPH = "graphs/forward.pt2"


def with_graph(tiny: TinyArtifact, raw: bytes) -> Artifact:
    """The tiny artifact with another graph, and matching digests and ids."""
    replace_file(tiny.path, GRAPH, raw)
    return Artifact.open(tiny.path)


def rewritten(tiny: TinyArtifact, change: Callable[[dict[str, Any]], None]) -> Artifact:
    return with_graph(tiny, with_document((tiny.path / GRAPH).read_bytes(), change))


def graph_of(document: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = document["graph_module"]["graph"]
    return graph


@pytest.mark.parametrize(
    "change",
    {
        "no graph": lambda document: document.pop("graph_module"),
        "a call of nothing": lambda document: graph_of(document)["nodes"][0].pop("target"),
        "a stack of numbers": lambda document: graph_of(document)["nodes"][0].update(metadata={"nn_module_stack": 3}),
        "another number of inputs": lambda document: graph_of(document)["inputs"].pop(),
        "an input without a type": lambda document: graph_of(document).update(tensor_values={}),
    }.values(),
)
def test_damaged_graphs_are_refused(tiny: TinyArtifact, change: Callable[[dict[str, Any]], None]) -> None:
    artifact = rewritten(tiny, change)
    with pytest.raises(ArtifactError, match=r"graphs/forward\.pt2: cannot be read .*Export the artifact again"):
        outline(artifact, artifact.manifest.methods["forward"])


def test_files_that_are_no_archives_are_refused(tiny: TinyArtifact) -> None:
    artifact = with_graph(tiny, b"PK\x03\x04")
    with pytest.raises(ArtifactError, match=r"not an archive written by torch\.export"):
        outline(artifact, artifact.manifest.methods["forward"])


def test_an_unknown_argument_is_named(tiny: TinyArtifact) -> None:
    def change(document: dict[str, Any]) -> None:
        graph_of(document)["nodes"][0]["inputs"][0]["arg"] = {"as_quaternion": 1}

    artifact = rewritten(tiny, change)
    with pytest.raises(UnknownPart, match="as_quaternion"):
        outline(artifact, artifact.manifest.methods["forward"])


@pytest.mark.parametrize(
    "stack", ["", ";;;", ",", "no commas", "a,b", ",,", "k,\u202e<b>.x,C", "k," + "a." * 9000 + ",C"]
)
def test_any_stack_of_modules_is_text(tiny: TinyArtifact, stack: str) -> None:
    def change(document: dict[str, Any]) -> None:
        for node in graph_of(document)["nodes"]:
            node["metadata"] = {"nn_module_stack": stack}

    artifact = rewritten(tiny, change)
    found = outline(artifact, artifact.manifest.methods["forward"])
    assert operators(found) == operators(outline_of_nothing_changed(tiny))
    assert all(len(path.split(".")) <= 32 for path in found)


def operators(found: Outline) -> Counter[str]:
    return sum((module.calls for module in found.values()), Counter())


def outline_of_nothing_changed(tiny: TinyArtifact) -> Outline:
    artifact = Artifact.open(TinyArtifact(tiny.path.with_name("again.artifact")).path)
    return outline(artifact, artifact.manifest.methods["forward"])
