"""Runs the benchmarks, prints a table, writes `bench.json`. No time makes it fail; a wrong output does.

To add a group: a module in `groups/` with `rows(settings)`, which yields `report.Row`s, and its name in GROUPS.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import machine
from plot import plot_ratios
from report import Row, document, table
from rich.console import Console
from settings import Settings
from subjects import WrongOutput

ALL = ("swap", "update", "call", "export", "engines")
GROUPS = (*ALL, "open", "aoti", "onnx", "elsewhere", "cuda")  # parts of `engines`, and what needs a GPU
WIDTH = 200  # columns of a table that goes to no terminal


def main() -> int:
    """Returns 0, or 1 when an output differs from the eager model's."""
    options = _parser().parse_args()
    settings = Settings(options.size_mb, options.rounds, options.billions)
    facts, others = machine.facts(), machine.Others()
    try:
        groups = {name: _run(name, settings) for name in options.groups or ALL}
    except WrongOutput as error:
        print(f"wrong output: {error}", file=sys.stderr)
        return 1
    facts["percent_used_by_others"] = others.percent()
    made = document(facts, asdict(settings), groups)
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(made, indent=2) + "\n"
    (options.out / "bench.json").write_text(text)
    for name in ("engines", "cuda"):
        if name in groups:
            plot_ratios(groups[name], options.out / f"{name}.svg")
    if options.json:
        print(text, end="")
    else:
        _print(facts, groups)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Benchmarks, with peers in the same run.")
    names = f"{', '.join(GROUPS)} ({', '.join(ALL)})"
    parser.add_argument("groups", nargs="*", type=_group, metavar="GROUP", help=names)
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="folder for the report (%(default)s)")
    parser.add_argument("--size-mb", type=_positive, default=800, help="weights of the large model (%(default)s)")
    parser.add_argument("--rounds", type=_positive, default=10, help="of each subject with its peers (%(default)s)")
    parser.add_argument("--billions", type=float, default=8.0, help="of parameters, exported at most (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    return parser


def _group(text: str) -> str:
    # not argparse's `choices`: Python 3.11 refuses an empty list with them
    if text not in GROUPS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(GROUPS)}")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _run(name: str, settings: Settings) -> list[Row]:
    """A group's rows, with the latest one on the terminal meanwhile."""
    rows: list[Row] = []
    with Console(stderr=True).status(name) as status:
        for row in import_module(f"groups.{name}").rows(settings):
            status.update(f"{name}: {row.what}")
            rows.append(row)
    return rows


def _print(facts: dict[str, str | int | float], groups: dict[str, list[Row]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), markup=False, soft_wrap=True)
    for name, rows in groups.items():
        console.print(table(name, rows))


if __name__ == "__main__":
    sys.exit(main())
