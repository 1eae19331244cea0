"""`weightswap desired`: show and change the weights that a service should serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, NoReturn

import typer

from weightswap_runtime.desired.document import SHOWN, DesiredState, DesiredWeights, Hold
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.sources.location import printable
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, print_table, say

desired_command = typer.Typer(add_completion=False)
Change = Callable[[int], DesiredState]


@desired_command.command()
def desired(
    place: Annotated[str, typer.Argument(help="The directory that holds desired.json, or its URL.")],
    weights: Annotated[str | None, typer.Option("--set", help="Desire this weight file, a path or URL.")] = None,
    rollback_to: Annotated[
        str | None, typer.Option(help="Desire earlier weights, by a prefix of their id or as `last`, and hold.")
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Hold, so that nothing is promoted.")] = False,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="Do not hold after a rollback.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Release a hold.")] = False,
    revision: Annotated[int | None, typer.Option(help="The revision to replace; required for changes.")] = None,
    by: Annotated[str, typer.Option(help="Who makes the change.")] = "",
    why: Annotated[str, typer.Option(help="The reason for the change.")] = "",
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Allow a file that was packed for another graph.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show or change which weights a service should serve.

    A change names the revision that it replaces (--revision), so that nobody undoes a change they have not seen. If
    another revision was written meanwhile, nothing changes and the exit status is 1.
    """
    with errors_as_exit(as_json):
        opened = DesiredPlace(place)
        changes: list[Change] = []
        if weights is not None:
            changes.append(
                lambda seen: opened.set(weights, revision=seen, by=by, why=why, allow_other_graph=allow_other_graph)
            )
        if rollback_to is not None:
            to = None if rollback_to == "last" else rollback_to
            changes.append(lambda seen: opened.rollback(to=to, revision=seen, by=by, why=why, hold=not no_hold))
        if hold:
            changes.append(lambda seen: opened.hold(revision=seen, by=by, why=why))
        if release:
            changes.append(lambda seen: opened.release(revision=seen))
        if changes and revision is None:
            _require_revision(opened, as_json)
        state = _apply(opened, changes, revision)
        if as_json:
            print_json({"place": opened.where, **state.as_dict()})
        else:
            _print(opened, state)


def _apply(place: DesiredPlace, changes: list[Change], revision: int | None) -> DesiredState:
    if len(changes) > 1:
        raise typer.BadParameter("--set, --rollback-to, --hold and --release are separate changes: give only one")
    return changes[0](revision) if changes and revision is not None else place.read()


def _require_revision(place: DesiredPlace, as_json: bool) -> NoReturn:
    """Show the current state, and raise BadParameter with its revision."""
    state = place.read()
    if not as_json:
        _print(place, state)
    raise typer.BadParameter(f"give --revision {state.revision} if this is what you want to change")


def _print(place: DesiredPlace, state: DesiredState) -> None:
    say(f"place       {place.where}")
    say(f"revision    {state.revision}")
    if state.weights is None:
        say("desired     nothing yet")
    else:
        say(f"desired     {printable(state.weights.source)}")
        say(f"weights id  {state.weights.weights_id}{labels_text(state.weights.labels)}")
        say(f"since       {since_text(state.weights)}")
    if state.hold is not None:
        say(f"on hold     {since_text(state.hold)}")
    for title, entries in (("history", state.history), ("withdrawn", state.withdrawn)):
        if entries:
            print_table(title, ["weights id", "source", "since", "by", "why"], [*map(_row, reversed(entries))])


def _row(weights: DesiredWeights) -> list[str]:
    source = printable(weights.source)
    return [weights.weights_id[:SHOWN], source, time_text(weights.since), weights.by, weights.why]


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels as text to append to a weights id; empty if there are none."""
    text = ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return f"  ({text})" if text else ""


def since_text(entry: DesiredWeights | Hold) -> str:
    """Return since when, by whom and why, as text."""
    return f"{time_text(entry.since)}{f' by {entry.by}' if entry.by else ''}{f': {entry.why}' if entry.why else ''}"


def time_text(seconds: float) -> str:
    """Return a time in seconds since the epoch as text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
