"""`weightswap swap --html`: a timeline of commits, even if the last file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import run
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import load
from weightswap_tools.commands.swap import swaps_report
from weightswap_tools.reports.blocks import Note, Table, Timeline


def test_each_commit_has_its_phases_one_after_the_other(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(1))
    model.swap(weight_file(2))
    model.rollback()
    report = swaps_report(model, model.history)
    timeline, table = report.sections[1].blocks
    assert isinstance(timeline, Timeline)
    assert isinstance(table, Table)
    spans = timeline.lanes[0].spans
    assert [span.kind for span in spans] == ["staged", "verified", "paused"] * 3
    assert spans[0].start == pytest.approx(0, abs=1e-3)
    for receipt, phases in zip(model.history, (spans[0:3], spans[3:6], spans[6:9]), strict=True):
        lengths = receipt.seconds_staged, receipt.seconds_verified, receipt.seconds_paused
        assert [span.end - span.start for span in phases] == pytest.approx(lengths, abs=1e-6)
        assert phases[0].end == phases[1].start
    assert [row[:3] for row in table.rows] == [
        (0, str(weight_file(1)), "full"),
        (1, str(weight_file(2)), "full"),
        (2, "rollback", "rollback"),
    ]
    assert (report.verdict, report.good) == ("3 commits", True)


def test_before_the_first_commit_there_is_nothing_to_draw(tiny: TinyArtifact) -> None:
    report = swaps_report(load(tiny.path), [])
    assert report.sections[1].blocks == (Note("nothing was committed"),)


def test_the_report_is_written_even_if_the_last_file_is_refused(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    for files, status, says in (([weight_file(2)], 0, "2 commits"), ([broken], 1, "WeightFileError")):
        page = tmp_path / "report.html"
        run("swap", tiny.path, weight_file(1), *files, "--html", page, status=status)
        assert says in page.read_text()
        page.unlink()
