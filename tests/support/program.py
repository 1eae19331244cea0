"""The program `weightswap`, called in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from weightswap_tools.program import app


def run(*arguments: object, status: int = 0, width: int | None = None) -> Result:
    """Return what a command says, whose exit status is checked; width: of its terminal, in columns."""
    done = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": width and str(width)})
    assert done.exit_code == status, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def said(*arguments: object, status: int = 0, width: int | None = None) -> str:
    return run(*arguments, status=status, width=width).output


def document(*arguments: object, status: int = 0) -> Any:
    """Return the document that a command prints with `--json`."""
    return json.loads(run(*arguments, "--json", status=status).stdout)
