"""Runs the benchmarks, prints a table, writes `bench.json` after each row. Only a wrong output makes it fail.

To add a group: a module in `groups/` with `rows(settings)`, which yields `report.Row`s, and its name in GROUPS.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import machine
from plot import plot_groups
from report import Row, document, line, table
from rich.console import Console
from settings import Settings
from subjects import WrongOutput

ALL = ("swap", "update", "call", "export", "engines")
NAMED = (
    "open",
    "aoti",
    "onnx",
    "elsewhere",
    "verify",
    "cuda",
    "constants",
    "diff",
    "rows",
    "memory",
    "ranks",
    "state",
    "variants",
    "generate",
    "serve",
    "fleet",
)  # parts of `engines`, and groups that run only on request
GROUPS = (*ALL, *NAMED)
WIDTH = 200  # columns of the table if there is no terminal


class Progress:
    """Measurements so far, also in `bench.json`."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.facts, self._others = machine.facts(), machine.Others()
        self.groups: dict[str, list[Row]] = {}
        self._settings = asdict(settings)
        self._path = folder / "bench.json"
        folder.mkdir(parents=True, exist_ok=True)

    def write(self) -> str:
        self.facts["percent_used_by_others"] = self._others.percent()
        text = json.dumps(document(self.facts, self._settings, self.groups), indent=2) + "\n"
        temporary = self._path.with_name(f".{self._path.name}")
        temporary.write_text(text)
        temporary.replace(self._path)
        return text

    def measure(self, name: str, settings: Settings) -> None:
        """Run a group and add its rows; after a wrong output it has none."""
        rows = self.groups[name] = []
        try:
            for row in _rows(name, settings):
                rows.append(row)
                self.write()
        except WrongOutput:
            rows.clear()
            raise


def main() -> int:
    """Run the benchmarks. Returns 0, 1 if an output differs from the eager model's, or 130 when interrupted."""
    options = _parser().parse_args()
    settings = Settings(options.size_mb, options.rounds, options.billions)
    progress = Progress(options.out, settings)
    try:
        for name in options.groups or ALL:
            progress.measure(name, settings)
    except WrongOutput as error:
        print(f"wrong output: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        text = progress.write()
        if options.json:
            print(text, end="")
        else:
            _print(progress.facts, progress.groups)
    plot_groups({name: progress.groups[name] for name in ("engines", "cuda") if name in progress.groups}, options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Benchmarks, with peers in the same run.")
    names = f"{', '.join(GROUPS)} ({', '.join(ALL)})"
    parser.add_argument("groups", nargs="*", type=_group, metavar="GROUP", help=names)
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="folder for the report (%(default)s)")
    parser.add_argument("--size-mb", type=_positive, default=800, help="size of the large model (%(default)s)")
    parser.add_argument("--rounds", type=_positive, default=10, help="rounds of each subject (%(default)s)")
    parser.add_argument("--billions", type=float, default=8.0, help="parameters of the largest export (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    return parser


def _group(text: str) -> str:
    # not argparse's `choices`: Python 3.11 refuses an empty list with them
    if text not in GROUPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(GROUPS)}")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _rows(name: str, settings: Settings) -> Iterator[Row]:
    """Return a group's rows as they come; a terminal shows the latest one, other outputs all of them."""
    console = Console(stderr=True, highlight=False)
    with console.status(name) as status:
        for row in import_module(f"groups.{name}").rows(settings):
            status.update(f"{name}: {row.what}")
            if not console.is_terminal:
                console.print(f"{name}: {line(row)}", markup=False, soft_wrap=True)
            yield row


def _print(facts: dict[str, str | int | float], groups: dict[str, list[Row]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), markup=False, soft_wrap=True)
    for name, rows in groups.items():
        console.print(table(name, rows))


if __name__ == "__main__":
    sys.exit(main())
