"""report.md of the results so far, and one archive with everything. Both are replaced, never half written."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from running import Result

ARCHIVE = "all.tar.gz"


def write(out: Path, facts: Mapping[str, object], results: Sequence[Result]) -> None:
    _replace(out / "report.md", _text(out, facts, results).encode())
    _pack(out, [result.log for result in results if result.log.exists()])


def _text(out: Path, facts: Mapping[str, object], results: Sequence[Result]) -> str:
    parts = ["# A run on a GPU", _table(("", ""), [(name, str(value)) for name, value in facts.items()])]
    rows = [(each.step.name, _bold(each), f"{each.seconds:.0f}", each.detail) for each in results]
    parts += ["## Steps", _table(("step", "result", "seconds", ""), rows)]
    if ceilings := _ceilings(out / "ceilings.json"):
        parts += ["## What the machine can do", _table(("what", "figure", "unit"), ceilings)]
    if benchmarks := _benchmarks(out / "bench.json"):
        heads = ("what", "median", "p99", "unit", "goal", "met", "peer", "peer's median", "ratio")
        parts += ["## Beside peers", _table(heads, benchmarks)]
    if (out / "cuda.svg").exists():
        parts += ["![Ours beside its peers](cuda.svg)"]
    for result in results:
        if result.log.exists():
            parts += [f"## {result.step.name}: {_bold(result)}", f"```\n{result.tail()}\n```"]
    return "\n\n".join(parts) + "\n"


def _bold(result: Result) -> str:
    return result.state if result.passed else f"**{result.state}**"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ceilings(path: Path) -> list[tuple[str, str, str]]:
    if not path.exists():
        return []
    return [(row["what"], f"{row['value']:.4g}", row["unit"]) for row in json.loads(path.read_text())]


def _benchmarks(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    return [_benchmark(row) for row in json.loads(path.read_text())["rows"]]


def _benchmark(row: Mapping[str, Any]) -> list[str]:
    goal = "{figure} {sense} {limit:g}".format(**row["goal"]) if row["goal"] else ""
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    median, p99, peer, ratio = (
        "" if row[name] is None else f"{row[name]:.4g}" for name in ("median", "p99", "peer_median", "ratio")
    )
    return [row["what"], median, p99, row["unit"], goal, met, row["peer"] or "", peer, ratio]


def _pack(out: Path, logs: Sequence[Path]) -> None:
    temporary = out / f".{ARCHIVE}"
    with tarfile.open(temporary, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.is_file() and path.name != ARCHIVE and not path.name.startswith("."):
                archive.add(path, path.name)
        for path in logs:
            archive.add(path, f"steps/{path.name}")
    temporary.replace(out / ARCHIVE)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(content)
    temporary.replace(path)
