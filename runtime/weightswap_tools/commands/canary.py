"""`weightswap canary`: try weights on some requests of a running server before all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from weightswap_runtime.errors import Unsupported
from weightswap_tools.admin_client import AdminClient, read_token
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, print_table, say, status_line

from .push import ModelOption, TokenOption, UrlArgument, WhyOption, only_model, source_of, upload

canary_command = typer.Typer(add_completion=False)
ShareOption = Annotated[float | None, typer.Option(help="The share of requests that the canary answers, 0 to 1.")]
ShadowOption = Annotated[bool, typer.Option("--shadow", help="Call it beside the served weights, and compare outputs.")]
PromoteIfOption = Annotated[str, typer.Option(help="A rule, such as `errors < 0.001 and p99_ratio < 1.1 for 5 min`.")]
AbortIfOption = Annotated[str | None, typer.Option(help="When to abort; by default on errors and NaN.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until it ends; exit with 1 unless it was promoted.")]
_POLL_SECONDS = 0.3
_MEASUREMENTS = (
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
        str | None, typer.Argument(help="Weights to upload and stage first, as for push; by default the staged ones.")
    ] = None,
    model: ModelOption = None,
    token_file: TokenOption = None,
    share: ShareOption = None,
    shadow: ShadowOption = False,
    tolerance: Annotated[float, typer.Option(help="Relative difference above which outputs differ.")] = 0.01,
    promote_if: PromoteIfOption = "",
    abort_if: AbortIfOption = None,
    promote: Annotated[bool, typer.Option("--promote", help="Commit it now.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Discard it now.")] = False,
    wait: WaitOption = False,
    point: Annotated[bool, typer.Option("--point", help="Send only the path or URL of WEIGHTS.")] = False,
    why: WhyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show a server's canary, start one (--share, --shadow), promote it or abort it.

    Without any of these options, the command shows the measurements. The canary always answers requests with the header
    `X-Weightswap-Canary: 1`, even if its share is 0.
    """
    if promote and abort:
        raise typer.BadParameter("--promote and --abort: give only one")
    starts = share is not None or shadow or weights is not None
    if (promote_if or abort_if is not None) and not starts:
        raise typer.BadParameter("--promote-if and --abort-if apply to a new canary: give --share or --shadow, too")
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        path, status = f"/admin/models/{name}", None
        if promote or abort:
            client.post(f"{path}/{'commit' if promote else 'discard'}", {"why": why})
        elif starts:
            request: dict[str, Any] = {"share": share or 0.0, "shadow": shadow, "tolerance": tolerance, "why": why}
            request |= {"promote_if": promote_if} | ({"abort_if": abort_if} if abort_if is not None else {})
            if weights is not None:
                request |= {"source": source_of(weights)} if point else upload(client, weights)
            status = client.post(f"{path}/canary", request)["status"]
        promoted = _wait_for_end(client, path, status or client.get(path)) if wait else True
        _show(client.get(path), as_json)
        if not promoted:
            say(f"not promoted: {_why_not(client.get(f'{path}/history')['refusals'])}", err=True)
            raise typer.Exit(1)


def _why_not(refusals: list[dict[str, Any]]) -> str:
    reasons = [refusal["error"] for refusal in refusals if refusal["event"] == "canary aborted"]
    return reasons[-1] if reasons else "it was discarded"


def _wait_for_end(client: AdminClient, path: str, status: dict[str, Any]) -> bool:
    """Wait until the canary ends. Returns whether its weights are served then."""
    if status["canary"] is None:
        raise Unsupported(f"{status['name']}: no canary to wait for")
    weights_id = status["canary"]["weights_id"]
    with status_line(f"{status['name']}: canary") as update:
        while (now := client.get(path))["canary"] is not None:
            update(f"{status['name']}: canary, {now['canary']['values']['requests']:.0f} requests")
            time.sleep(_POLL_SECONDS)
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
    print_measurements(trial["values"])


def print_measurements(values: Mapping[str, float | None]) -> None:
    """Print the measurements of the canary and of the served weights, which rules refer to."""
    rows = [[title, _number(values.get(one)), _number(values.get(other))] for title, one, other in _MEASUREMENTS]
    print_table("", ["", "canary", "served"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
