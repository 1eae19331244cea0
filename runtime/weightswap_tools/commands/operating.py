"""`weightswap commit`, `discard`, `rollback`, `hold` and `release`: changes of a running server, by its admin plane."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weightswap_runtime.transfer.admin_client import AdminClient, read_token
from weightswap_tools.terminal import (
    JsonOption,
    ModelOption,
    RevisionOption,
    TokenOption,
    errors_as_exit,
    parse_revision,
)

from .push import UrlArgument, WhyOption, only_model, print_change, staging_progress

commit_command = typer.Typer(add_completion=False)
discard_command = typer.Typer(add_completion=False)
rollback_command = typer.Typer(add_completion=False)
hold_command = typer.Typer(add_completion=False)
release_command = typer.Typer(add_completion=False)


@commit_command.command()
def commit(
    url: UrlArgument,
    model: ModelOption = None,
    token_file: TokenOption = None,
    expect: Annotated[str | None, typer.Option(help="Refuse to commit other weights than those of this id.")] = None,
    why: WhyOption = "",
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Commit the weights that a server has staged (`weightswap push --stage`), and print the receipt."""
    fields = {"why": why, "expect": expect}
    _change("commit", url, model, token_file, as_json, fields, revision, commits=True)


@discard_command.command()
def discard(
    url: UrlArgument,
    model: ModelOption = None,
    token_file: TokenOption = None,
    why: WhyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Discard the weights that operators have staged on a server, or are staging."""
    _change("discard", url, model, token_file, as_json, {"why": why})


@rollback_command.command()
def rollback(
    url: UrlArgument,
    to: Annotated[
        str | None, typer.Argument(help="A prefix of a weights id of the history; by default the weights before.")
    ] = None,
    model: ModelOption = None,
    token_file: TokenOption = None,
    no_hold: Annotated[
        bool, typer.Option("--no-hold", help="Do not hold the followed desired store afterwards.")
    ] = False,
    why: WhyOption = "",
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve earlier weights. If the server follows a desired store, that desires them, on hold until `release`."""
    fields = {"why": why, "to": to, "hold": not no_hold}
    _change("rollback", url, model, token_file, as_json, fields, revision, commits=True)


@hold_command.command()
def hold(
    url: UrlArgument,
    model: ModelOption = None,
    token_file: TokenOption = None,
    why: WhyOption = "",
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold the desired store that a server follows: nothing is promoted until `release`."""
    _change("hold", url, model, token_file, as_json, {"why": why}, revision)


@release_command.command()
def release(
    url: UrlArgument,
    model: ModelOption = None,
    token_file: TokenOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Release a hold."""
    _change("release", url, model, token_file, as_json, {}, revision)


def _change(
    change: str,
    url: str,
    model: str | None,
    token_file: Path | None,
    as_json: bool,
    fields: dict[str, Any],
    revision: str | None = None,
    *,
    commits: bool = False,
) -> None:
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        path = f"/admin/models/{name}"

        def latest() -> int | None:
            """Return the revision that the server has read; None, by which a server means it, but not for a commit."""
            following = client.get(path)["following"] if change == "commit" else None
            return following["revision"] if following else None

        number = parse_revision(revision, latest)
        with staging_progress(client, name):
            response = client.post(f"{path}/{change}", fields | ({"revision": number} if number is not None else {}))
        print_change(response, as_json, commits=commits)
