"""The report of every command, made from real files, in a browser: no console messages, and every chart is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.exporter.parity.models import IDS, SHAPES, tied
from tests.tools.reports.conftest import Open
from weightswap_exporter import export, pack
from weightswap_exporter.commands.verify import verification_report
from weightswap_exporter.parity.verification import verify
from weightswap_runtime import load
from weightswap_tools.commands.swap import swaps_report
from weightswap_tools.diff import compare_weights
from weightswap_tools.diff.show import weights_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact and two weight files, of which the second has a NaN."""
    path = tmp_path_factory.mktemp("pages")
    artifact = export(tied(), (IDS,), out=path / "a", dynamic_shapes=SHAPES)
    pack(tied(), artifact, out=path / "v1.safetensors", goldens=[(IDS,)])
    state = {name: value * 1.01 for name, value in tied().state_dict().items()}
    state["blocks.1.out.bias"][0] = torch.nan
    pack(state, artifact, out=path / "v2.safetensors")
    return path


def headings(page: Any) -> list[str]:
    return [heading.inner_text() for heading in page.locator("h2").all()]


def test_a_verification_that_fails(folder: Path, open_report: Open) -> None:
    model = tied()
    model.blocks[1].scale = 0.75
    found = verify(folder / "a", folder / "v1.safetensors", {"model": model, "args": (IDS,)})
    page = open_report(verification_report(found))
    assert headings(page) == [
        "What was verified",
        "Where torch diverges",
        "Problems",
        "Calls, against eager",
        "Recorded calls",
        "Swap",
    ]
    assert page.locator("svg").count() == 2  # outputs by engine, modules
    assert page.get_by_text("blocks.1 (Block)", exact=True).is_visible()
    assert page.get_by_text(f"{len(found.problems)} problems", exact=True).is_visible()


def test_swaps_over_time(folder: Path, open_report: Open) -> None:
    model = load(folder / "a", folder / "v1.safetensors")
    model.swap(folder / "v2.safetensors", verify="off")
    model.rollback()
    page = open_report(swaps_report(model, model.history))
    assert headings(page) == ["Model", "Swaps"]
    assert page.locator("svg").count() == 1
    assert page.get_by_text("3 commits", exact=True).is_visible()


def test_a_diff_of_files_that_have_other_tensors(tmp_path: Path, open_report: Open) -> None:
    before = {"layers.0.w": torch.ones(2), "layers.0.gone": torch.ones(3), "layers.1.w": torch.zeros(2)}
    after = {"layers.0.w": torch.ones(2) * 2, "layers.1.w": torch.ones(2), "layers.1.more": torch.ones(4)}
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    diff = compare_weights(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    page = open_report(weights_report(diff, {}), viewport={"width": 480, "height": 900})
    assert page.locator(".mark-key").all_text_contents() == ["\u2212removed", "+added", "∞infinite"]
    signs = page.locator("figure").first.locator("svg text").all_text_contents()
    assert {"\u2212", "+", "∞"} <= set(signs)
    page.get_by_text("The same as a table").first.press("Enter")
    page.locator("figure").first.locator("tbody").wait_for()
    cells = page.locator("figure").first.locator("tbody tr").all_text_contents()
    assert cells == ["layers.0removed1", "layers.1infiniteadded"]


@pytest.mark.parametrize(
    ("command", "arguments", "charts"),
    [
        ("inspect", ["a"], 1),
        ("inspect", ["v1.safetensors"], 1),
        ("diff", ["v1.safetensors", "v2.safetensors"], 2),
        pytest.param(
            "bench",
            ["a", "v1.safetensors", "--seconds", "0.05", "--batch", "1", "--engine", "torch"],
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_reports_of_other_commands(command: str, arguments: list[str], charts: int, folder: Path, browser: Any) -> None:
    from weightswap_tools.program import app

    paths = [str(folder / text) if (folder / text).exists() else text for text in arguments]
    made = folder / f"{command}.html"
    result = CliRunner().invoke(app, [command, *paths, "--html", str(made)])
    assert result.exit_code == 0, result.output
    complaints: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(made.as_uri())
    page.wait_for_selector("html[data-ready]")
    assert complaints == []
    assert page.locator("svg").count() >= charts
    assert page.locator("h2").count() >= 2
    page.close()
