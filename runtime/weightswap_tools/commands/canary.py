"""`weightswap canary`: let weights answer some requests of a server that runs, before all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from weightswap_runtime.errors import Unsupported
from weightswap_tools.admin_client import AdminClient, read_token
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, print_table, say, status_line

from .push import ModelOption, TokenOption, UrlArgument, WhyOption, only_model, pointed, uploaded

canary_command = typer.Typer(add_completion=False)
ShareOption = Annotated[float | None, typer.Option(help="The share of requests that it answers, 0 to 1.")]
ShadowOption = Annotated[bool, typer.Option("--shadow", help="Call it beside the served weights, and compare.")]
PromoteIfOption = Annotated[str, typer.Option(help="A rule, as `errors < 0.001 and p99_ratio < 1.1 for 5 min`.")]
AbortIfOption = Annotated[str | None, typer.Option(help="A rule; without it, errors and NaN abort.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait for its end; status 1 where it was not promoted.")]
_LOOK = 0.3  # seconds between two looks
_SHOWN = (
    ("requests", "requests", "served_requests"),
    ("errors", "errors", "served_errors"),
    ("not finite", "nonfinite", "served_nonfinite"),
    ("p50 in s", "p50", "served_p50"),
    ("p99 in s", "p99", "served_p99"),
    ("compared", "compared", ""),
    ("differing", "differing", ""),
    ("largest difference", "max_abs", ""),
    ("relative", "max_rel", ""),
)


@canary_command.command()
def canary(
    url: UrlArgument,
    weights: Annotated[
        str | None, typer.Argument(help="What is uploaded and staged first, as for push; else what is staged.")
    ] = None,
    model: ModelOption = None,
    token_file: TokenOption = None,
    share: ShareOption = None,
    shadow: ShadowOption = False,
    tolerance: Annotated[float, typer.Option(help="The relative difference that makes answers differ.")] = 0.01,
    promote_if: PromoteIfOption = "",
    abort_if: AbortIfOption = None,
    promote: Annotated[bool, typer.Option("--promote", help="Commit it.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Give it up.")] = False,
    wait: WaitOption = False,
    point: Annotated[bool, typer.Option("--point", help="Send the path or URL of WEIGHTS alone.")] = False,
    why: WhyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the canary of a server, begin one (--share, --shadow), promote or abort it.

    Without a change it shows what is measured. Requests with `X-Weightswap-Canary: 1` are its own, also where its share
    is 0.
    """
    if promote and abort:
        raise typer.BadParameter("--promote and --abort: give one")
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        path, begun = f"/admin/models/{name}", None
        if promote or abort:
            client.post(f"{path}/{'commit' if promote else 'discard'}", {"why": why})
        elif share is not None or shadow or weights is not None:
            asked: dict[str, Any] = {"share": share or 0.0, "shadow": shadow, "tolerance": tolerance, "why": why}
            asked |= {"promote_if": promote_if} | ({"abort_if": abort_if} if abort_if is not None else {})
            if weights is not None:
                asked |= {"source": pointed(weights)} if point else uploaded(client, Path(weights))
            begun = client.post(f"{path}/canary", asked)["status"]
        promoted = _waited(client, path, begun or client.get(path)) if wait else True
        _show(client.get(path), as_json)
        if not promoted:
            say(f"not promoted: {_why_not(client.get(f'{path}/history')['refusals'])}", err=True)
            raise typer.Exit(1)


def _why_not(refusals: list[dict[str, Any]]) -> str:
    by_rule = [each["error"] for each in refusals if each["event"] == "canary aborted"]
    return by_rule[-1] if by_rule else "it was given up"


def _waited(client: AdminClient, path: str, status: dict[str, Any]) -> bool:
    """Wait for the end of a canary; whether its weights are served then."""
    if status["canary"] is None:
        raise Unsupported(f"{status['name']}: has no canary to wait for")
    weights_id = status["canary"]["weights_id"]
    with status_line(f"{status['name']}: canary") as tell:
        while (now := client.get(path))["canary"] is not None:
            tell(f"{status['name']}: canary, {now['canary']['values']['requests']:.0f} requests")
            time.sleep(_LOOK)
    return bool(now["served"]["weights_id"] == weights_id)


def _show(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    say(f"serves      {status['served']['weights_id']}")
    if (trial := status["canary"]) is None:
        return
    say(f"canary      {trial['weights_id']}, {100 * trial['share']:g} %{' and shadow' if trial['shadow'] else ''}")
    if trial["promote_if"]:
        say(f"promote if  {trial['promote_if']} (held for {trial['promote_held']:.0f} s)")
    say(f"abort if    {trial['abort_if']}")
    print_measured(trial["values"])


def print_measured(values: Mapping[str, float | None]) -> None:
    """What rules are about, of both sets of weights."""
    rows = [[title, _number(values.get(one)), _number(values.get(other))] for title, one, other in _SHOWN]
    print_table("", ["", "canary", "served"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
