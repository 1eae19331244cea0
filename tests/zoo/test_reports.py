"""The zoo as people see it: graphs by module against torch, and the report of each artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.tools.inspect.test_graph_outline import calls_of
from tests.zoo.conftest import Exported
from weightswap_tools.inspect.command import inspect_command
from weightswap_tools.inspect.graph import outline


@pytest.mark.sampled(3)
def test_a_graph_by_module_is_the_graph(exported: Exported) -> None:
    artifact = exported.hollow
    program = torch.export.load(artifact.path / artifact.manifest.methods["forward"].graph)
    expected = calls_of(program.graph, program.graph_module)
    found = outline(artifact, artifact.manifest.methods["forward"])
    ours = {(path, operator): n for path, module in found.items() for operator, n in module.calls.items()}
    assert sum(ours.values()) == sum(expected.values())
    aten = {key: n for key, n in expected.items() if key[1].startswith("aten.") and "sym_size" not in key[1]}
    assert {key: ours.get(key) for key in aten} == aten


@pytest.mark.sampled(1)
def test_every_artifact_has_a_report(exported: Exported, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = CliRunner().invoke(inspect_command, [str(exported.hollow.path), "--html", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    for row in exported.hollow.manifest.weights:
        assert row.name in text
    assert exported.hollow.graph_id in text
