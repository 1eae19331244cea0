"""The program `weightswap`. Its commands are entry points; one is imported only when it is called or listed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from weightswap_runtime._version import __version__

GROUP = "weightswap.commands"
_AS_BY_SIGPIPE = 128 + 13  # what a shell says of other programs whose reader has left


class Commands(TyperGroup):
    """The commands that the installed distributions offer under the entry point group `weightswap.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(entry_points(group=GROUP).names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for point in entry_points(group=GROUP, name=cmd_name):
            command = get_command(point.load())
            command.name = cmd_name
            return command
        return None

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _readers_may_leave():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _readers_may_leave():
            return super().invoke(ctx)


@contextmanager
def _readers_may_leave() -> Iterator[None]:
    """End the program where whoever reads its output has enough, as `| head` has."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _read_by_nobody(1)
        raise typer.Exit(_AS_BY_SIGPIPE) from None


app = typer.Typer(
    cls=Commands,
    name="weightswap",
    help="Export a PyTorch graph once, without its weights; put any checkpoint behind it.",
    epilog="Exit status: 0 done, 1 the answer is no (a mismatch, a damaged file), 2 bad usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightswap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def _read_by_nobody(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def _open_closed_streams() -> None:
    """Put a null device where a standard stream is closed: nothing else could be written, or it took the next file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            _read_by_nobody(number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def main() -> None:
    """The program; it ends the process. A closed standard stream is read and written as if it were /dev/null."""
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be bytes that are no text
    app()


__all__ = ["main"]
