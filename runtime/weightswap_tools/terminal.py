"""How commands speak: text or a table for people, one JSON document with --json, errors on standard error."""

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
LabelOption = Annotated[list[str] | None, typer.Option(help="name=text, kept in the file; may be repeated.")]
OpLibraryOption = Annotated[
    list[str] | None,
    typer.Option("--op-library", help="A package, or an .so file, that registers operators; may be repeated."),
]


def _writable(path: Path | None) -> Path | None:
    """Refuse a report's path before the work that the report would be about."""
    if path is None:
        return None
    where = visible(str(path))
    try:
        check_reportable(path)
    except Unsupported as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise typer.BadParameter(f"{where} cannot be written: {error.strerror}") from error
    if is_file(path) and not _is_page(path):
        raise typer.BadParameter(f"{where} is there and is no report, and would be lost; name another file")
    return path


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(64)
    return not beginning or beginning.lstrip().lower().startswith(b"<!doctype html")


HtmlOption = Annotated[
    Path | None,
    typer.Option(callback=_writable, help="Write a report for browsers, in one file; a report there is replaced."),
]
LevelOption = Annotated[
    str | None,
    typer.Option(help="Where in a pickled or distributed checkpoint the weights are: keys joined with dots, as ema."),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Leave out tensors of this name, as `*.position_ids`, which an older model had; may be repeated."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model serves: cpu, cuda, cuda:1.")]
EngineOption = Annotated[EngineName, typer.Option(help="What runs the graphs; auto takes the fastest that there is.")]
_CONTROLS = re.compile(rb"\x7f|\xc2[\x80-\x9f]")  # DEL and C1, which JSON does not make anybody escape
_SAID = (UserWarning, RuntimeWarning)
_USAGE = (MissingExtra, RecipeError, Unsupported)


def parse_labels(texts: list[str] | None) -> dict[str, str]:
    """The labels of `--label name=text`, which may be repeated."""
    return dict(map(_label, texts or ()))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not name=text")
    return name, value


def say(line: str, err: bool = False) -> None:
    """One line for people, on standard output or standard error; what a terminal would obey is spelled out."""
    typer.echo(visible(line), err=err)


@contextmanager
def warnings_said() -> Iterator[list[str]]:
    """What the block warns of, as lines on standard error when it ends."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        for kind in _SAID:
            warnings.simplefilter("always", kind)
        try:
            yield said
        finally:
            said += [str(warning.message) for warning in caught if issubclass(warning.category, _SAID)]
            for message in said:
                say(f"warning: {message}", err=True)


def print_json(document: Any) -> None:
    """A document over several lines."""
    typer.echo(msgspec.json.format(printable_json(document), indent=2).decode())


def printable_json(document: Any) -> bytes:
    """One line, in which controls have escapes: a terminal would obey them."""
    return _CONTROLS.sub(lambda letter: b"\\u00%02x" % letter[0][-1], encode_json(document))


@contextmanager
def errors_as_exit(as_json: bool, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn an error of ours into a message and an exit status: 2 where the request was wrong, else 1.

    `more` is what the JSON document of an error says, too.
    """
    try:
        yield
    except WeightswapError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        if as_json:
            problems = getattr(error, "problems", ())
            document = {"error": type(error).__name__, "message": str(error), "problems": problems}
            print_json({**document, **(more or {})})
        raise typer.Exit(2 if isinstance(error, _USAGE) else 1) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


class _TableConsole(Console):
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - called where the error is handled; the program ends as it does elsewhere


def table_console() -> Console:
    """Standard output: as wide as the terminal; elsewhere as wide as is needed, so that nothing is cut."""
    return _TableConsole(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table as wide as `table_console` is; what a terminal would obey is spelled out."""
    table = Table(title=escape(visible(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    table_console().print(table)


@contextmanager
def progress_bar(what: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes, or other things, done of those in all, on a terminal only."""
    console = Console(stderr=True)
    measures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) if of_bytes else (MofNCompleteColumn(),)
    with Progress(
        "{task.description}", BarColumn(), *measures, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status_line(what: str) -> Iterator[Callable[[str], object]]:
    """A line that says what is being done, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(visible(what))) as status:
        yield lambda text: status.update(escape(visible(text)))


def human_bytes(size: int) -> str:
    """`1.2 MB`, in powers of a thousand."""
    value, units = float(size), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
