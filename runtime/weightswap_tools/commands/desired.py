"""`weightswap desired`: what a service should serve, shown and changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated

import typer

from weightswap_runtime.desired.document import SHOWN, DesiredState, DesiredWeights, Hold
from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.sources.location import printable
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, print_table, say

desired_command = typer.Typer(add_completion=False)
Change = Callable[[int], DesiredState]


@desired_command.command()
def desired(
    place: Annotated[str, typer.Argument(help="The directory of a desired.json, or its folder's URL.")],
    weights: Annotated[str | None, typer.Option("--set", help="Desire this weight file, or its URL.")] = None,
    rollback_to: Annotated[
        str | None,
        typer.Option(help="Desire earlier weights, by the beginning of their id, and hold; `last`: those before."),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Let nothing be promoted.")] = False,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="Do not hold after a rollback.")] = False,
    release: Annotated[bool, typer.Option("--release", help="End a hold.")] = False,
    revision: Annotated[int | None, typer.Option(help="The revision that you have seen; needed to change.")] = None,
    by: Annotated[str, typer.Option(help="Who asks.")] = "",
    why: Annotated[str, typer.Option(help="The reason, for those who come after.")] = "",
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Set a file that was packed for another graph.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which weights a service should serve, or say which.

    A change names the revision that it follows on (--revision), so that nobody undoes what he has not seen; if somebody
    has written meanwhile, nothing is changed, with status 1.
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
            _refuse_unseen(opened, as_json)
        state = _changed(opened, changes, revision)
        if as_json:
            print_json({"place": opened.where, **state.as_dict()})
        else:
            _print(opened, state)


def _changed(place: DesiredPlace, changes: list[Change], revision: int | None) -> DesiredState:
    if len(changes) > 1:
        raise typer.BadParameter("--set, --rollback-to, --hold and --release are changes of their own: give one")
    return changes[0](revision) if changes and revision is not None else place.read()


def _refuse_unseen(place: DesiredPlace, as_json: bool) -> None:
    """Show what would be changed, instead."""
    found = place.read()
    if not as_json:
        _print(place, found)
    raise typer.BadParameter(f"say --revision {found.revision}, if this is what you want to change")


def _print(place: DesiredPlace, state: DesiredState) -> None:
    say(f"place       {place.where}")
    say(f"revision    {state.revision}")
    if state.weights is None:
        say("desired     nothing yet")
    else:
        say(f"desired     {printable(state.weights.source)}")
        say(f"weights id  {state.weights.weights_id}{labels_said(state.weights.labels)}")
        say(f"since       {since_said(state.weights)}")
    if state.hold is not None:
        say(f"on hold     {since_said(state.hold)}")
    for title, found in (("history", state.history), ("withdrawn", state.withdrawn)):
        if found:
            print_table(title, ["weights id", "source", "since", "by", "why"], [_row(each) for each in reversed(found)])


def _row(weights: DesiredWeights) -> list[str]:
    source = printable(weights.source)
    return [weights.weights_id[:SHOWN], source, time_said(weights.since), weights.by, weights.why]


def labels_said(labels: Mapping[str, str]) -> str:
    """Labels behind a weights id; nothing where there are none."""
    text = ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return f"  ({text})" if text else ""


def since_said(what: DesiredWeights | Hold) -> str:
    """Since when, by whom and why."""
    return f"{time_said(what.since)}{f' by {what.by}' if what.by else ''}{f': {what.why}' if what.why else ''}"


def time_said(seconds: float) -> str:
    """A time in seconds since the epoch, for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
