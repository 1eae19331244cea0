"""The command `weightswap`, in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from weightswap_tools.program import app


def run(*arguments: object, status: int = 0) -> Result:
    """Run a command, and check its exit status."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done
