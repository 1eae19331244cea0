"""`weightswap inspect`: show an artifact, a weight file, a checkpoint, a delta or a goldens file."""

from __future__ import annotations

from typing import Annotated

import typer

from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import (
    HtmlOption,
    JsonOption,
    LevelOption,
    errors_as_exit,
    print_json,
    say,
    table_console,
)

from .document import document_of
from .page import report_of
from .subject import open_subject
from .text import print_text
from .tree import print_tree

inspect_command = typer.Typer(add_completion=False)


@inspect_command.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="An artifact, a weight file, a checkpoint, a delta or a goldens file, or its URL.")
    ],
    tree: Annotated[bool, typer.Option("--tree", help="Print a tree of the modules with their sizes.")] = False,
    level: LevelOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the ids, methods and tensors of an artifact, a weight file or a checkpoint.

    An artifact's digests are checked. Of other files, no values are read, and no code in a pickle is run. With --html,
    only the report is written, unless --tree or --json is given, too.
    """
    if tree and as_json:
        raise typer.BadParameter("--tree and --json: give only one")
    with errors_as_exit(as_json), open_subject(path, level) as subject:
        if html:
            write_report(html, report_of(subject))
        if as_json:
            print_json(document_of(subject))
        elif tree:
            print_tree(subject, table_console())
        elif html:
            say(f"report     {html}")
        else:
            print_text(subject)
