"""`weightswap inspect`: what an artifact, a weight file, a checkpoint, a delta or a goldens file is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightswap_tools.terminal import (
    HtmlOption,
    JsonOption,
    LevelOption,
    errors_as_exit,
    print_json,
    say,
    table_console,
)

from .subject import Subject, open_subject

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
            _write_page(subject, html)
        _print(subject, tree, as_json, html)


def _write_page(subject: Subject, path: Path) -> None:
    from weightswap_tools.reports.page import write_report

    from .page import report_of

    write_report(path, report_of(subject))


def _print(subject: Subject, tree: bool, as_json: bool, html: Path | None) -> None:
    if as_json:
        from .document import document_of

        print_json(document_of(subject))
    elif tree:
        from .tree import print_tree

        print_tree(subject, table_console())
    elif html:
        say(f"report     {html}")
    else:
        from .text import print_text

        print_text(subject)
