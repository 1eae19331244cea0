"""`weightswap fleet canary`, `promote` and `abort`: try weights on some requests of a fleet before all of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightswap_runtime.errors import StageClosed
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, say, status_line

from .canary import AbortIfOption, PromoteIfOption, ShadowOption, ShareOption, WaitOption, print_measurements
from .fleet_cluster import (
    NAME,
    PREPARE,
    AddressOption,
    ByOption,
    NameOption,
    PrepareOption,
    WhyOption,
    connected,
    deadlines,
    say_fleet_receipt,
)

if TYPE_CHECKING:
    from weightswap_fleet import Fleet, TrialReport

_POLL_SECONDS = 0.5


def canary(
    weights: Annotated[
        str | None, typer.Argument(help="A packed weight file, as for swap; without it, show the current trial.")
    ] = None,
    name: NameOption = NAME,
    share: ShareOption = None,
    of: Annotated[str, typer.Option(help="Share of each node's `requests`, or of the `nodes`.")] = "",
    steps: Annotated[str | None, typer.Option(help="Shares in turn, such as `0.01,0.1,0.5,1`.")] = None,
    step_seconds: Annotated[float | None, typer.Option(help="The duration of each step.")] = None,
    shadow: ShadowOption = False,
    tolerance: Annotated[float | None, typer.Option(help="Relative difference above which outputs differ.")] = None,
    promote_if: PromoteIfOption = "",
    abort_if: AbortIfOption = None,
    wait: WaitOption = False,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Try weights on some requests of all nodes (--share, --steps, --shadow), or show the current trial."""
    plan = {
        "share": share,
        "of": of or None,
        "steps": _shares(steps),
        "step_seconds": step_seconds,
        "shadow": shadow or None,
        "tolerance": tolerance,
        "promote_if": promote_if or None,
        "abort_if": abort_if,
    }
    options: dict[str, Any] = {field: value for field, value in plan.items() if value is not None}
    if options and weights is None:
        raise typer.BadParameter("give the weights to try")
    if step_seconds is not None and steps is None:
        raise typer.BadParameter("--step-seconds: give --steps, too")
    with errors_as_exit(as_json), connected(name, address) as fleet:
        if weights is not None:
            fleet.canary(weights, by=by, why=why, deadlines=deadlines(prepare_seconds), **options)
        trial = _wait_for_end(fleet) if wait else fleet.trial
        if as_json:
            print_json({"trial": trial.as_dict() if trial is not None else None})
        else:
            print_trial(trial)
        if wait and (trial is None or trial.outcome != "promoted"):
            raise typer.Exit(1)


def promote(
    name: NameOption = NAME,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Commit the weights on trial on all nodes together. If one node cannot, none does, and the trial continues."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        say_fleet_receipt(fleet.promote(by=by, why=why, deadlines=deadlines(prepare_seconds)), as_json)


def abort(
    name: NameOption = NAME,
    by: ByOption = "",
    why: WhyOption = "",
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """End the trial, and discard its weights."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        trial = fleet.abort(by=by, why=why)
        if as_json:
            print_json({"trial": trial.as_dict()})
        else:
            print_trial(trial)


def _shares(steps: str | None) -> tuple[float, ...] | None:
    if steps is None:
        return None
    try:
        return tuple(float(step) for step in steps.split(","))
    except ValueError:
        raise typer.BadParameter(f"--steps {steps}: expected shares, such as 0.1,0.5,1") from None


def _wait_for_end(fleet: Fleet) -> TrialReport | None:
    """Wait until the trial has ended, and return its report."""
    trial = fleet.trial
    if trial is None:
        raise StageClosed(f"{fleet.name}: nothing is on trial")
    with status_line(f"{fleet.name}: canary") as update:
        while trial is not None and not trial.outcome:
            update(f"{fleet.name}: canary, {trial.values['requests'] or 0:.0f} requests")
            time.sleep(_POLL_SECONDS)
            trial = fleet.trial
    return trial


def print_trial(trial: TrialReport | None) -> None:
    """Print the current trial, or the outcome of the last one."""
    if trial is None:
        return
    plan = trial.plan
    say(f"canary      {trial.source}{f' by {trial.by}' if trial.by else ''}")
    say(f"weights id  {trial.weights_id}")
    if trial.outcome:
        say(f"outcome     {trial.outcome}{f': {trial.reason}' if trial.reason else ''}")
    else:
        shares = [f"{100 * part:g} % of {node}" for node, part in sorted(trial.shares.items())]
        say(f"answers     {', '.join(shares)}{', and shadow' if plan.shadow else ''}")
        if not plan.shadow and not any(trial.shares.values()):
            say("            only requests with X-Weightswap-Canary: 1 reach it; --share or --steps send it others")
    for title, rule in (("promote if", plan.promote_if), ("abort if", plan.abort_if)):
        if rule:
            held = f" (held for {trial.promote_held:.0f} s)" if title == "promote if" and not trial.outcome else ""
            say(f"{title:<12}{rule}{held}")
    print_measurements(trial.values)
