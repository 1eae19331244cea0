"""Documents of graphs that were altered: nothing runs but operators, and what is refused is told."""

from __future__ import annotations

import io
import json
import logging
import random
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.graphs import CPU, Document, Whole, compiled, documented, numbers, parts
from weightswap_exporter import export
from weightswap_runtime import ArtifactError
from weightswap_runtime.graphs import opening
from weightswap_runtime.graphs.compiling import DamagedGraph
from weightswap_runtime.graphs.operators import ForeignFunction, MissingOperator
from weightswap_runtime.graphs.schema import UnknownPart, read_program


class Opened(NamedTuple):
    """What `open_graph` asks of an artifact."""

    raw: bytes
    path: Path = Path("x.artifact")
    manifest: Any = SimpleNamespace(producer=SimpleNamespace(torch="2.0"))

    def read(self, name: str) -> bytes:
        return self.raw


def changed(raw: bytes, change: Callable[[Document], object]) -> Opened:
    """The archive with its document changed."""
    written = io.BytesIO()
    document = documented(raw)
    change(document)
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            content = json.dumps(document).encode() if name.endswith("models/model.json") else source.read(name)
            target.writestr(name, content)
    return Opened(written.getvalue())


def nodes(document: Document) -> list[Document]:
    found: list[Document] = document["graph_module"]["graph"]["nodes"]
    return found


PLANTED = "__import__('os').mkdir('executed')"


FOREIGN = [
    "torch.os.mkdir",
    "torch.load",
    "torch.ops.load_library",
    "torch.ops.aten.__class__.mro",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.add.__init__",
    "torch.ops.__class__.__init__.__globals__",
    "torch.ops.higher_order.__class__",
    "torch.ops.higher_order.print",
    "math.__loader__.load_module",
    "_operator.attrgetter",
    "builtins.exec",
    "exec",
    "",
    PLANTED,
    f"torch.ops.aten.add.Tensor); {PLANTED}; (",
    "#weightswap",
]


@pytest.fixture
def _nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("target", FOREIGN)
def test_nothing_but_operators_is_called(target: str, small: Path) -> None:
    def plant(document: Document) -> None:
        nodes(document)[-1] |= {
            "target": target,
            "inputs": [{"name": "", "arg": {"as_string": "executed"}, "kind": 1}],
        }

    with pytest.raises(ArtifactError):
        opening.open_graph(changed((small / "graphs/forward.pt2").read_bytes(), plant), "x.pt2", CPU)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_nothing_runs")
def test_names_and_texts_never_become_source(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    names = {place[key] for place, key in parts(documented(raw)) if key in ("name", "as_name")}

    def plant(document: Document) -> None:
        for place, key in parts(document["graph_module"]["graph"]):
            if key in ("name", "as_name") and place[key] in names and "arg" not in place:
                place[key] = f"{place[key]}={PLANTED}\n{PLANTED}"
            if key == "as_string":
                place[key] = f"'+{PLANTED}+'"

    ours = opening.open_graph(changed(raw, plant), "x.pt2", CPU)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        ours.call(numbers(4, 3))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch may not be able to write such a graph")
@torch.no_grad()
def test_what_is_not_known_is_left_to_torch_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sin() + 1)(x)

    artifact = export(Whole(rows), (numbers(4, 3),), out=tmp_path / "rows.artifact")
    with caplog.at_level(logging.INFO, "weightswap.graphs"):
        opened = opening.open_graph(artifact, "graphs/forward.pt2", CPU)
    assert "has the function 'torch._functorch.predispatch" in caplog.text
    assert "so torch.export.load opens it, which takes longer" in caplog.text
    assert (opened.inputs, opened.outputs, opened.past_autograd) == (1, 1, False)
    assert torch.equal(opened.call(numbers(4, 3))[0], rows(numbers(4, 3)))


def test_another_major_version_of_the_schema_is_left_to_torch(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    with pytest.raises(UnknownPart, match="schema version 9"):
        read_program(changed(raw, lambda document: document["schema_version"].update(major=9)).raw)


ODD = [None, True, -1, 2**70, 1e400, "", "x", PLANTED, [], {}, [[]], {"as_none": True}, {"as_tensor": {"name": "x"}}]


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("seed", range(10))
def test_mutated_documents_are_refused_by_name_or_run_nothing(seed: int, small: Path) -> None:
    chance = random.Random(seed)
    raw = (small / "graphs/forward.pt2").read_bytes()

    def mutate(document: Document) -> None:
        for _ in range(chance.randrange(1, 4)):
            place, key = chance.choice(list(parts(document["graph_module"]["graph"])))
            other, source = chance.choice(list(parts(document["graph_module"]["graph"])))
            place[key] = chance.choice([*ODD, json.loads(json.dumps(other[source]))])

    refused = 0
    for _ in range(100):
        try:
            found = compiled(changed(raw, mutate).raw)
        except (UnknownPart, MissingOperator, ForeignFunction, *opening.DAMAGED):
            refused += 1
            continue
        with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            found.call(*[numbers(4, 3)] * found.inputs)
    assert 0 < refused < 100


def test_an_artifact_that_contradicts_itself_is_refused_with_a_reason(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    for change, says in (
        (lambda document: nodes(document).reverse(), "is used before it is defined"),
        (lambda document: nodes(document).append(nodes(document)[0]), "is defined twice"),
        (lambda document: nodes(document)[0].pop("target"), "missing required field `target`"),
        (lambda document: document.pop("graph_module"), "missing required field `graph_module`"),
    ):
        with pytest.raises(ArtifactError, match=says):
            opening.open_graph(changed(raw, change), "x.pt2", CPU)  # type: ignore[arg-type]
    with pytest.raises(DamagedGraph):
        compiled(changed(raw, lambda document: nodes(document).reverse()).raw)
