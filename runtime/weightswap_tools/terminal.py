"""Output of commands: text or tables for people, one JSON document with --json, errors on standard error."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from weightswap_runtime.engines.choosing import EngineName
from weightswap_runtime.errors import MissingExtra, RecipeError, Unsupported, WeightswapError
from weightswap_runtime.messages import encode_json, visible
from weightswap_runtime.sources.atomic import check_reportable, is_file

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
LabelOption = Annotated[list[str] | None, typer.Option(help="A label name=text to store in the file; may be repeated.")]
OpLibraryOption = Annotated[
    list[str] | None,
    typer.Option("--op-library", help="A package or an .so file that registers operators; may be repeated."),
]


def _check_report_path(path: Path | None) -> Path | None:
    """Return the path of a report. Raises BadParameter, before any work is done, if it cannot be written."""
    if path is None:
        return None
    where = visible(str(path))
    try:
        check_reportable(path)
    except Unsupported as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise typer.BadParameter(f"{where} cannot be written: {error.strerror}") from error
    if is_file(path) and not _is_html(path):
        raise typer.BadParameter(f"{where} exists and is not a report, so it is not overwritten; choose another file")
    return path


def _is_html(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(64)
    return not beginning or beginning.lstrip().lower().startswith(b"<!doctype html")


HtmlOption = Annotated[
    Path | None,
    typer.Option(callback=_check_report_path, help="Write an HTML report here; an existing report is replaced."),
]
LevelOption = Annotated[
    str | None,
    typer.Option(help="The place of the weights in a pickled or distributed checkpoint: dotted keys, such as ema."),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(help="Ignore tensors whose names match, such as `*.position_ids` of an older model; may be repeated."),
]
DeviceOption = Annotated[str, typer.Option(help="The device that holds the model: cpu, cuda, cuda:1.")]
EngineOption = Annotated[EngineName, typer.Option(help="The engine for the graphs; auto takes the fastest available.")]
_CONTROLS = re.compile(rb"\x7f|\xc2[\x80-\x9f]")  # DEL and the C1 controls, which JSON leaves unescaped
_SHOWN_WARNINGS = (UserWarning, RuntimeWarning)
_USAGE_ERRORS = (MissingExtra, RecipeError, Unsupported)


def parse_labels(texts: list[str] | None) -> dict[str, str]:
    """Return the labels of repeated `--label name=text` options. Raises BadParameter."""
    return dict(map(_label, texts or ()))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"expected name=text, got {text!r}")
    return name, value


def say(line: str, err: bool = False) -> None:
    """Print one line on standard output or standard error, with terminal control characters escaped."""
    typer.echo(visible(line), err=err)


@contextmanager
def warnings_said() -> Iterator[list[str]]:
    """Print the warnings of a block on standard error when it ends. Yields a list that then holds their texts."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        for category in _SHOWN_WARNINGS:
            warnings.simplefilter("always", category)
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught if issubclass(warning.category, _SHOWN_WARNINGS)]
            for text in texts:
                say(f"warning: {text}", err=True)


def print_json(document: Any) -> None:
    """Print a document as indented JSON."""
    typer.echo(msgspec.json.format(printable_json(document), indent=2).decode())


def printable_json(document: Any) -> bytes:
    """Return a document as one line of JSON, with terminal control characters escaped."""
    return _CONTROLS.sub(lambda letter: b"\\u00%02x" % letter[0][-1], encode_json(document))


@contextmanager
def errors_as_exit(as_json: bool, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn a WeightswapError or OSError into a message and an exit status: 2 for a wrong request, else 1.

    as_json: also print a WeightswapError as a JSON document, together with the fields of `more`.
    """
    try:
        yield
    except WeightswapError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        if as_json:
            problems = getattr(error, "problems", ())
            document = {"error": type(error).__name__, "message": str(error), "problems": problems}
            print_json({**document, **(more or {})})
        raise typer.Exit(2 if isinstance(error, _USAGE_ERRORS) else 1) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


class _TableConsole(Console):
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this in its `except`; `program` handles the error as for other output


def table_console() -> Console:
    """Return a console for standard output: as wide as the terminal, or unwrapped elsewhere, so that nothing is cut."""
    return _TableConsole(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table on `table_console`, with terminal control characters escaped."""
    table = Table(title=escape(visible(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    table_console().print(table)


@contextmanager
def progress_bar(what: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; the yielded function takes the amount done and the total, bytes or items."""
    console = Console(stderr=True)
    measures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) if of_bytes else (MofNCompleteColumn(),)
    with Progress(
        "{task.description}", BarColumn(), *measures, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status_line(what: str) -> Iterator[Callable[[str], object]]:
    """Show a status line on a terminal; the yielded function replaces its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(visible(what))) as status:
        yield lambda text: status.update(escape(visible(text)))


def human_bytes(size: int) -> str:
    """Return a size as text, such as `1.2 MB`, in powers of a thousand."""
    value, units = float(size), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if round(value, 1) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
