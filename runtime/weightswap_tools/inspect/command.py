"""`weightswap inspect`: what an artifact, a weight file, a checkpoint, a delta or a goldens file is."""

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
        str, typer.Argument(help="An artifact's folder, what swap takes, what pack takes, or a goldens file.")
    ],
    tree: Annotated[bool, typer.Option("--tree", help="Print the modules with the sizes of their tensors.")] = False,
    level: LevelOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an artifact, a weight file or a checkpoint is: ids, methods, tensors.

    An artifact's digests are checked; of other files no values are read, and nothing in a pickle runs. With --html the
    report is all that is made, unless --tree or --json is there, too.
    """
    if tree and as_json:
        raise typer.BadParameter("--tree and --json are two answers; give one of them")
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
