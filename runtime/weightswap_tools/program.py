"""The program `weightswap`. Its commands are entry points, imported only when they are called or listed."""

from __future__ import annotations

import os
import re
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

_GROUP = "weightswap.commands"
_LINE_BREAK = re.compile(r"(?<=\S)\n[ ]*(?=\S)")
_SIGPIPE_STATUS = 128 + 13  # what a shell reports for a program that SIGPIPE killed


class _Commands(TyperGroup):
    """Commands that installed distributions register in the entry point group `weightswap.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(entry_points(group=_GROUP).names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for point in entry_points(group=_GROUP, name=cmd_name):
            command = get_command(point.load())
            command.name = cmd_name
            _join_help_lines(command)
            return command
        commands: Any = dict.fromkeys(self.list_commands(ctx))
        self.commands = commands  # typer suggests one of these names
        return None

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _exit_on_broken_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _exit_on_broken_pipe():
            return super().invoke(ctx)


def _join_help_lines(command: Any) -> None:
    """Join the lines of each paragraph of a help text: typer does so only in the first, and wraps them all again."""
    command.help = _LINE_BREAK.sub(" ", command.help or "")
    for subcommand in getattr(command, "commands", {}).values():
        _join_help_lines(subcommand)


@contextmanager
def _exit_on_broken_pipe() -> Iterator[None]:
    """Exit quietly when the reader of standard output has closed the pipe, as `| head` does."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _redirect_to_null(1)
        raise typer.Exit(_SIGPIPE_STATUS) from None


app = typer.Typer(
    cls=_Commands,
    name="weightswap",
    help="Export a PyTorch graph once, without its weights; put any checkpoint behind it.",
    epilog="Exit status: 0 done, 1 the answer is no (a mismatch, a damaged file), 2 bad usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"weightswap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream; else the next opened file would take its descriptor."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


def main() -> None:
    """Run the program and exit the process. A closed standard stream behaves like /dev/null."""
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold bytes that are not text
    app()


__all__ = ["main"]
