"""`weightswap swap` and values that are not finite: printed, in reports, refused on request and while watching."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from tests.support.program import document, run
from tests.support.tiny import TinyArtifact, WriteWeights
from tests.support.watched import SOON, Directory, eventually
from weightswap_runtime import Event, load
from weightswap_tools.commands.swap import print_event, print_event_as_json


@pytest.fixture
def bad(tiny: TinyArtifact, tmp_path: Path) -> Path:
    values = tiny.values(1)
    values["weight"][1, 2] = math.nan
    return tiny.write(tmp_path / "bad.safetensors", values)


def shell(*arguments: object, status: int = 0) -> str:
    return run("swap", *arguments, status=status, width=200).stdout


def test_nonfinite_values_are_reported_and_refused(
    tiny: TinyArtifact, weight_file: WriteWeights, bad: Path, tmp_path: Path
) -> None:
    files = tiny.path, weight_file(0), bad
    assert "warning     weight is not finite: 1 NaN of 15 values\n" in shell(*files)
    (first, second) = document("swap", *files)["receipts"]
    assert (first["nonfinite"], second["nonfinite"]) == ({}, {"weight": {"nan": 1, "infinite": 0, "of": 15}})
    shell(*files, "--html", tmp_path / "page.html")
    assert "weight: 1 NaN of 15 values" in (tmp_path / "page.html").read_text()
    refused = document("swap", *files, "--refuse-nonfinite", status=1)
    assert refused["error"] == "NonFiniteWeights"
    assert refused["problems"] == ["weight: 1 NaN of 15 values"]
    shell(*files, "--allow-nonfinite", "bias", status=1)
    assert "warning     weight" in shell(*files, "--allow-nonfinite", "bias", "--allow-nonfinite", "w*")
    shell(*files, "--allow-nonfinite", "*")
    shell(*files, "--allow-nonfinite", "typo", status=2)


def test_a_watched_directory(
    tiny: TinyArtifact, directory: Directory, bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(tiny.path, directory.tiny.write(directory.path.parent / "v0.safetensors", tiny.values(0)))
    events: list[Event] = []
    with model.watch(directory.path, SOON, start="all", callback=events.append) as watcher:
        bad.rename(directory.path / "v1.safetensors")
        assert eventually(lambda: bool(watcher.skipped))
        directory.write(2)
        assert eventually(lambda: model.generation == 1)
    refused = next(event for event in events if event.kind == "skipped")
    print_event(refused)
    assert "NonFiniteWeights" in capsys.readouterr().out
    print_event_as_json(refused)
    assert json.loads(capsys.readouterr().out)["error"]["problems"] == ["weight: 1 NaN of 15 values"]
    with model.watch(directory.path, SOON, start="all", allow_nonfinite=True, callback=events.append):
        assert eventually(lambda: any(receipt.nonfinite for receipt in model.history))
    committed = next(event for event in events if event.kind == "committed" and event.nonfinite)
    print_event_as_json(committed)
    assert json.loads(capsys.readouterr().out)["nonfinite"] == {"weight": {"nan": 1, "infinite": 0, "of": 15}}


def test_nonfinite_values_are_logged(
    tiny: TinyArtifact, weight_file: WriteWeights, bad: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny.path, weight_file(0))
    with caplog.at_level(logging.WARNING, "weightswap"):
        model.swap(weight_file(2))
        assert not caplog.records
        model.swap(bad)
    assert [record.message.split(",")[-1] for record in caplog.records] == [" not finite: weight"] * 2
