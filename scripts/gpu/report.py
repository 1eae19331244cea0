"""The report of a run so far, and an archive with everything. Both are replaced, never half written."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from running import LEFT_OUT, NOT_REACHED, Result

ARCHIVE = "all.tar.gz"
MOST_NAMED = 100


def write(out: Path, results: Sequence[Result]) -> None:
    """Write `report.md`, and the archive of the folder and of the steps' output."""
    temporary = out / ".report.md"
    temporary.write_text(_text(out, results))
    temporary.replace(out / "report.md")
    _pack(out, [path for result in results for path in (result.log, result.outcomes_file) if path.exists()])


def _text(out: Path, results: Sequence[Result]) -> str:
    parts = ["# A run on a GPU", _steps(results)]
    for title, names in (("Failed", _failed(results)), ("Begun and not ended", _running(results))):
        if names:
            parts += [f"## {title}", "\n".join(f"- `{name}`" for name in names[:MOST_NAMED])]
    if facts := _json(out / "facts.json"):
        parts += ["## The machine", _table(("", ""), [(name, str(value)) for name, value in facts.items()])]
    if benchmarks := _json(out / "bench.json"):
        heads = ("what", "median", "p99", "unit", "goal", "met", "peer", "peer's median", "ratio")
        parts += ["## Beside peers", _table(heads, [_benchmark(row) for row in benchmarks["rows"]])]
    if ceilings := _json(out / "ceilings.json"):
        rows = [(row["what"], f"{row['value']:.4g}", row["unit"]) for row in ceilings]
        parts += ["## What the machine can do", _table(("what", "figure", "unit"), rows)]
    for result in results:
        if tail := result.tail():
            parts += [f"## {result.step.name}: {_state(result)}", f"```\n{tail}\n```"]
    return "\n\n".join(parts) + "\n"


def _steps(results: Sequence[Result]) -> str:
    rows, sums = [], [0, 0, 0, 0]
    for result in results:
        counts = [len(names) for names in result.outcomes[:4]]
        sums = [one + other for one, other in zip(sums, counts, strict=True)]
        known = any(counts)
        cells = [str(count) if known else "" for count in counts]
        if result.step.tests and not known and result.state not in (LEFT_OUT, "skipped"):
            cells[3] = "all"
        seconds = f"{result.seconds:.0f}" if result.seconds else ""
        detail = ", ".join(filter(None, [result.detail, _in(result.outcomes.running)]))
        rows.append((result.step.name, _state(result), *cells, seconds, detail))
    rows.append(("", "", *map(str, sums), "", ""))
    heads = ("step", "result", "tests passed", "failed", "skipped", NOT_REACHED, "seconds", "")
    return _table(heads, rows)


def _in(names: Sequence[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"in {names[0]}{others}" if names else ""


def _state(result: Result) -> str:
    return result.state if result.is_right else f"**{result.state}**"


def _failed(results: Sequence[Result]) -> list[str]:
    return [name for result in results for name in result.outcomes.failed]


def _running(results: Sequence[Result]) -> list[str]:
    """Return the tests that still run, or were ended with their step."""
    return [name for result in results for name in result.outcomes.running]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _benchmark(row: Mapping[str, Any]) -> list[str]:
    goal = "{figure} {sense} {limit:g}".format(**row["goal"]) if row["goal"] else ""
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    median, p99, peer, ratio = (
        "" if row[name] is None else f"{row[name]:.4g}" for name in ("median", "p99", "peer_median", "ratio")
    )
    return [row["what"], median, p99, row["unit"], goal, met, row["peer"] or "", peer, ratio]


def _pack(out: Path, logs: Sequence[Path]) -> None:
    temporary = out / f".{ARCHIVE}"
    with tarfile.open(temporary, "w:gz", compresslevel=1) as archive:
        for path in sorted(out.iterdir()):
            if path.is_file() and path.name != ARCHIVE and not path.name.startswith("."):
                archive.add(path, path.name)
        for path in logs:
            archive.add(path, f"steps/{path.name}")
    temporary.replace(out / ARCHIVE)
