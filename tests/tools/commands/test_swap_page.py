"""`weightswap swap --html`: the phases of each commit, even if the last file is refused."""

from __future__ import annotations

from pathlib import Path

from tests.support.program import run
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import load
from weightswap_tools.commands.swap import swaps_report
from weightswap_tools.reports.blocks import LinePlot, Note, Table


def test_each_commit_has_its_phases(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(1))
    model.swap(weight_file(2))
    model.rollback()
    report = swaps_report(model, model.history)
    plot, table = report.sections[1].blocks
    assert isinstance(plot, LinePlot)
    assert isinstance(table, Table)
    assert [line.group for line in plot.lines] == ["staged", "verified", "paused"]
    for place, receipt in enumerate(model.history):
        seconds = receipt.seconds_staged, receipt.seconds_verified, receipt.seconds_paused
        assert [line.points[place] for line in plot.lines] == [(place, 1e3 * phase) for phase in seconds]
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
