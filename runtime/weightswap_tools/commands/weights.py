"""`weightswap delta` and `weightswap desired`: weights as files, and which of them a service shall serve."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from weightswap_runtime.errors import NonFiniteWeights, NotPromoted, listed, plural
from weightswap_runtime.following.desired_state import SHOWN, DesiredState, DesiredWeights, Hold
from weightswap_runtime.following.desired_store import DesiredStore, known_weights
from weightswap_runtime.format.delta import Delta, write_delta
from weightswap_runtime.format.identity import Counts
from weightswap_runtime.format.merging import merge_deltas
from weightswap_runtime.sources.location import Url, as_location, is_url, printable
from weightswap_runtime.staging.sets import check_content
from weightswap_runtime.transfer.admin_client import AdminClient, AdminUnreachable, read_token
from weightswap_tools.terminal import (
    JsonOption,
    LabelOption,
    ModelOption,
    RevisionOption,
    TokenOption,
    errors_as_exit,
    human_bytes,
    parse_labels,
    parse_revision,
    print_json,
    print_table,
    progress_bar,
    say,
    status_line,
)

ByOption = Annotated[str, typer.Option(help="Who makes the change.")]
WhyOption = Annotated[str, typer.Option(help="The reason for the change.")]
delta_command = typer.Typer(add_completion=False)
desired_command = typer.Typer(add_completion=False)
_POLL_SECONDS = 0.3
_PATIENCE = 10.0  # seconds for a server's answer


@delta_command.command()
def delta(
    files: Annotated[
        list[str],
        typer.Argument(help="The weight file that the servers have, and the one that they are to serve next, or URLs."),
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The delta file to write; an existing file is replaced.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="FILES are deltas, each from what the one before leads to: make them one.")
    ] = False,
    label: LabelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the changes from one weight file to another, for servers that have the first.

    Both must be packed by weightswap. A server swaps a delta in like a weight file: the cost grows with the bytes that
    changed, and the result is verified to be exactly the second file's weights. With --merge, write one delta that does
    what several do one after another.
    """
    if not merge and len(files) != 2:
        raise typer.BadParameter(f"give two weight files, not {len(files)}; --merge makes one delta of several")
    labels = parse_labels(label)
    with errors_as_exit(as_json):
        with progress_bar("merging" if merge else "comparing") as progress:
            if merge:
                written = merge_deltas(files, out, labels=labels, progress=progress)
            else:
                base, new = files
                written = write_delta(base, new, out, labels=labels, progress=progress)
        if as_json:
            print_json(written)
            return
        say(f"delta file  {written.path}")
        say(f"from        {written.base}")
        say(f"to          {written.weights_id}")
        say(f"changes     {_share(written)}")
        say(f"in          {plural(len(written.changed), 'tensor')}")


def _share(written: Delta) -> str:
    size = human_bytes(written.nbytes)
    if written.total_bytes is None:
        return size
    share = 100 * written.nbytes / max(1, written.total_bytes)
    return f"{size} of {human_bytes(written.total_bytes)} ({share:.2f} %)"


@desired_command.command()
def desired(
    desired_store: Annotated[
        str, typer.Argument(metavar="STORE", help="The directory that holds desired.json, or its URL.")
    ],
    weights: Annotated[str | None, typer.Option("--set", help="Desire this weight file, a path or URL.")] = None,
    rollback_to: Annotated[
        str | None, typer.Option(help="Desire earlier weights, by a prefix of their id or as `last`, and hold.")
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Hold, so that nothing is promoted.")] = False,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="Do not hold after a rollback.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Release a hold.")] = False,
    compact: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Merge the deltas that lead to the desired weights into this file."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="With --compact: write a full set, not a delta.")] = False,
    revision: RevisionOption = None,
    by: ByOption = "",
    why: WhyOption = "",
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Allow a file that was packed for another graph.")
    ] = False,
    server: Annotated[
        list[str] | None,
        typer.Option(help="The admin plane of a server to ask whether it serves them; may be repeated.", metavar="URL"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until each --server serves the desired weights.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="The most seconds to --wait.")] = 60.0,
    model: ModelOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or change which weights a service should serve, and ask servers whether they do.

    A change names the revision that it replaces (--revision), so that nobody undoes a change they have not seen. If
    another revision was written meanwhile, nothing changes and the exit status is 1; so it is unless each --server
    serves the desired weights, at the latest after the --timeout of --wait.

    --compact changes no weights: only what a new process has to read for them, when they came as many deltas.

    Local files are read first: damaged ones are refused, NaN is refused by --rollback-to, and --set reports it and
    infinities. The weights are not tried, since this command has no graph; and behind a URL, only headers are read.
    """
    _check_options(wait and not server, full and compact is None)
    with errors_as_exit(as_json):
        opened = DesiredStore(desired_store)
        clients = [AdminClient(url, read_token(token_file)) for url in server or ()]
        based_on = parse_revision(revision, lambda: opened.read().revision)
        said: dict[str, Any] = {"revision": based_on, "by": by, "why": why}
        changes = (weights is not None, rollback_to is not None, hold, release, compact is not None)
        _check_changes(opened, sum(changes), based_on, as_json)
        if weights is not None:
            state = _set(opened, weights, allow_other_graph=allow_other_graph, **said)
        elif rollback_to is not None:
            state = _roll_back(opened, rollback_to, hold=not no_hold, **said)
        elif hold:
            state = opened.hold(**said)
        elif release:
            state = opened.release(revision=said["revision"])
        elif compact is not None:
            state = opened.compact(compact, revision=said["revision"], full=full)
        else:
            state = opened.read()
        asked = _ask_servers(clients, model, opened.where, state.weights_id, timeout if wait else 0.0)
        _print(opened, state, asked, as_json)
        if not all(each.agrees for each in asked):
            raise typer.Exit(1)


def _check_options(lacks_server: bool, lacks_compact: bool) -> None:
    if lacks_server:
        raise typer.BadParameter("--wait: give --server URL, the admin plane of each server that is to serve them")
    if lacks_compact:
        raise typer.BadParameter("--full: give --compact FILE, the file to write")


def _check_changes(desired_store: DesiredStore, count: int, revision: int | None, as_json: bool) -> None:
    """Raise BadParameter for several changes; and for one without a revision, after showing the current state."""
    if count and revision is None:
        state = desired_store.read()
        if not as_json:
            _print(desired_store, state)
        raise typer.BadParameter(f"give --revision {state.revision} if this is what you want to change")
    if count > 1:
        raise typer.BadParameter("give only one of --set, --rollback-to, --hold, --release and --compact")


def _set(desired_store: DesiredStore, weights: str, **options: Any) -> DesiredState:
    """Set the desired weights. NaN and infinities may be intended, so they are said, and not refused."""
    known, counts = known_weights(weights), _read(weights)
    state = desired_store.set(weights, known=known, **options)
    if counts:
        found = listed([f"{name}: {each}" for name, each in sorted(counts.items())])
        say(f"warning: {printable(weights)}: {found}; processes whose weights have none there refuse it", err=True)
    return state


def _roll_back(desired_store: DesiredStore, to: str, *, revision: int, **options: Any) -> DesiredState:
    """Roll back to weights that processes may serve. Raises NotPromoted, NonFiniteWeights, and what `_read` raises."""
    target = desired_store.rollback_target(None if to == "last" else to, revision=revision)
    where = printable(desired_store.locate(target))
    if any(each.weights_id == target.weights_id for each in desired_store.read().withdrawn):
        raise NotPromoted(
            f"{where}: its weights {target.weights_id[:SHOWN]} were withdrawn. Roll back to others, or desire these "
            "again with --set.",
            reason="superseded",
        )
    for base in target.bases or ():
        _read(desired_store.locate(base))
    counts = sorted(_read(desired_store.locate(target)).items())
    if nan := [f"{name}: {found.nan} NaN" for name, found in counts if found.nan]:
        raise NonFiniteWeights(where, nan, "Roll back to others. If these values are intended, desire them with --set.")
    return desired_store.rollback(to=target.weights_id, revision=revision, **options)


def _read(source: str | Path) -> Mapping[str, Counts]:
    """Read a local file, and return its numbers of NaN and infinities. Raises WeightFileError, DigestMismatch."""
    return {} if isinstance(as_location(source), Url) else check_content(source)


def _print(
    desired_store: DesiredStore, state: DesiredState, asked: Sequence[_Asked] = (), as_json: bool = False
) -> None:
    if as_json:
        servers = {"servers": [each._asdict() for each in asked]} if asked else {}
        print_json({"desired_store": desired_store.where, **state.as_dict(), **servers})
        return
    say(f"kept in     {desired_store.where}")
    say(f"revision    {state.revision}")
    if state.weights is None:
        say("desired     nothing yet")
    else:
        say(f"desired     {printable(state.weights.source)}")
        say(f"weights id  {state.weights.weights_id}{labels_text(state.weights.labels)}")
        if state.weights.bases:
            say(f"read first  {plural(len(state.weights.bases), 'file')}")
        say(f"since       {since_text(state.weights)}")
    if state.hold is not None:
        say(f"on hold     {since_text(state.hold)}")
    print_earlier(state, {})
    if asked:
        rows = [[each.server, each.model, (each.weights_id or "nothing")[:SHOWN], each.state] for each in asked]
        agreeing = sum(each.agrees for each in asked)
        say(f"serve it    {agreeing} of {len(asked)}")
        print_table("Servers", ["server", "model", "weights", "state"], rows)


def print_earlier(state: DesiredState, refused: Mapping[str, str]) -> None:
    """Print what was desired before, and what was withdrawn. refused: why processes refused weights, by their id."""
    for title, entries in (("history", state.history), ("withdrawn", state.withdrawn)):
        columns = ["weights id", "source", "since", "by", "why"]
        rows = [
            [each.weights_id[:SHOWN], printable(each.source), time_text(each.since), each.by, each.why]
            for each in reversed(entries)
        ]
        if any(each.weights_id in refused for each in entries):
            columns.append("refused")
            rows = [[*row, refused.get(of.weights_id, "")] for row, of in zip(rows, reversed(entries), strict=True)]
        if rows:
            print_table(title, columns, rows)


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


class _Asked(NamedTuple):
    """A model of a server that was asked."""

    server: str
    model: str  # empty if it is not known
    weights_id: str | None  # that it serves
    agrees: bool  # these are the desired ones
    state: str


def _ask_servers(
    clients: Sequence[AdminClient], model: str | None, desired_store: str, desired: str | None, timeout: float
) -> list[_Asked]:
    """Ask until each server serves the desired weights, or the timeout has passed; return what they said last.

    model: its name on all servers; None: the models that follow the desired store. Raises AdminRefused.
    """
    deadline = time.monotonic() + timeout
    with status_line("asking the servers") as update:
        while True:
            asked = [each for client in clients for each in _ask(client, model, desired_store, desired)]
            if all(each.agrees for each in asked) or time.monotonic() >= deadline:
                return asked
            update(f"{sum(each.agrees for each in asked)} of {len(asked)} serve the desired weights")
            time.sleep(_POLL_SECONDS)


def _ask(client: AdminClient, model: str | None, desired_store: str, desired: str | None) -> Iterator[_Asked]:
    """Yield a row for each model that is meant, or one row that says why there is none."""
    try:
        models = client.get("/admin/status", _PATIENCE)["models"]
    except AdminUnreachable as error:
        yield _Asked(client.where, model or "", None, False, str(error).removeprefix(f"{client.where}: "))
        return
    if model is None:
        meant = [
            each for each in models if each["following"] and _is_same(each["following"]["desired_store"], desired_store)
        ]
        what = f"no model follows {desired_store}; give --model if it is mounted elsewhere there"
    else:
        meant, what = [each for each in models if each["name"] == model], "has no such model"
    if not meant:
        yield _Asked(client.where, model or "", None, False, what)
    for each in meant:
        served = each["served"]["weights_id"] if each["served"] else None
        agrees = desired is not None and served == desired
        yield _Asked(client.where, each["name"], served, agrees, "serves" if agrees else _why_not(each, desired))


def _is_same(desired_store: str, other: str) -> bool:
    """Return whether two texts mean the same folder: local ones may differ in `..` and links."""
    if is_url(desired_store) or is_url(other):
        return desired_store == other
    return os.path.realpath(desired_store) == os.path.realpath(other)


def _why_not(model: dict[str, Any], desired: str | None) -> str:
    following = model["following"]
    if desired is None:
        return "nothing is desired"
    if following is None:
        return "follows no desired store"
    return " ".join(following["error"].split()) or f"not yet; has read revision {following['revision']}"
