"""`weightswap fleet`: deploy on a Ray cluster, look, and change the weights of all nodes together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightswap_runtime.desired.document import SHOWN, DesiredState
from weightswap_runtime.desired.place import known_weights
from weightswap_runtime.sources.location import printable
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, print_table, say

from .desired import since_said
from .fleet_canary import abort, canary, promote, say_trial
from .fleet_cluster import (
    NAME,
    PREPARE,
    AddressOption,
    ByOption,
    NameOption,
    PrepareOption,
    WhyOption,
    cluster,
    connected,
    deadlines,
    run_application,
    say_fleet_receipt,
)

if TYPE_CHECKING:
    from weightswap_fleet import Fleet, NodeStatus

fleet_command = typer.Typer(add_completion=False, help="Many machines that change their weights together, on Ray.")
for _command in (canary, promote, abort):
    fleet_command.command()(_command)


@fleet_command.command()
def deploy(
    artifact: Annotated[str, typer.Argument(help="The artifact, at a path that all nodes see.")],
    weights: Annotated[str | None, typer.Option(help="Weights to begin with, where nothing is desired yet.")] = None,
    follow: Annotated[
        str | None, typer.Option(help="The place of the desired state; else the directory of the weights.")
    ] = None,
    name: NameOption = NAME,
    replicas: Annotated[int, typer.Option(min=1, help="How many replicas there are, over all nodes.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Let Ray Serve have more replicas under load, up to so many.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="What requests call it; else the artifact's name.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows of requests that may go as one call.")] = 1,
    route: Annotated[str, typer.Option(help="The prefix of its pages at Ray Serve's proxies.")] = "/",
    require_signature: Annotated[
        list[str] | None,
        typer.Option(help="A public key; weights that it has not signed are refused; repeatable."),
    ] = None,
    allow_nonfinite: Annotated[
        list[str] | None, typer.Option(help="Let NaN and infinities into weights of this name; `*` is all.")
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay/--no-relay", help="One node reads a URL and gives it to the others, or each reads.")
    ] = True,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Deploy an artifact as an application of Ray Serve, or again with other options; the weights stay."""
    scaling = _scaling(replicas, max_replicas)
    with errors_as_exit(as_json), cluster(address):
        from weightswap_fleet import connect, deployment

        application = deployment(
            artifact,
            weights,
            follow=follow,
            name=name,
            model=model,
            batch=max_batch,
            require_signature=require_signature,
            allow_nonfinite=allow_nonfinite or False,
            relay=relay,
            **scaling,
        )
        run_application(application, name, route)
        fleet = connect(name)
        _show(fleet, as_json)
        if weights is not None and fleet.desired.weights_id != known_weights(weights).weights_id:
            say(
                "--weights are not served: the place desired others already; `weightswap fleet swap` changes that",
                err=True,
            )


@fleet_command.command()
def status(name: NameOption = NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Show what is desired, and which weights each node serves; with status 1 where they differ."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        if not _show(fleet, as_json):
            raise typer.Exit(1)


@fleet_command.command()
def page(
    name: NameOption = NAME,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where the page is; 0 for any that is free.")] = 8008,
    host: Annotated[str, typer.Option(help="Where it listens; whoever reaches that sees the page.")] = "127.0.0.1",
    address: AddressOption = "auto",
) -> None:
    """Serve a page that shows which weights each replica serves, until it is interrupted."""
    with errors_as_exit(False), connected(name, address) as fleet:
        from weightswap_fleet.fleet_page import serve_page

        serve_page(fleet, host, port, lambda where: say(f"page        {where}"))


@fleet_command.command()
def swap(
    weights: Annotated[str, typer.Argument(help="A packed weight file, at a path or URL that all nodes can read.")],
    name: NameOption = NAME,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Let all nodes serve other weights together: all stage and verify them first, and if one cannot, none does."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        say_fleet_receipt(fleet.swap(weights, by=by, why=why, deadlines=deadlines(prepare_seconds)), as_json)


@fleet_command.command()
def rollback(
    to: Annotated[
        str | None, typer.Argument(help="The beginning of a weights id; else what was desired before.")
    ] = None,
    name: NameOption = NAME,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="Do not hold afterwards.")] = False,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Let all nodes serve earlier weights again, and take nothing new until `release`."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        given = deadlines(prepare_seconds)
        say_fleet_receipt(fleet.rollback(to, by=by, why=why, hold=not no_hold, deadlines=given), as_json)


@fleet_command.command()
def hold(
    name: NameOption = NAME,
    by: ByOption = "",
    why: WhyOption = "",
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Let nothing be promoted until `release`."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        _say_desired(fleet.hold(by=by, why=why), as_json)


@fleet_command.command()
def release(name: NameOption = NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """End a hold."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        _say_desired(fleet.release(), as_json)


@fleet_command.command()
def remove(name: NameOption = NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """End a fleet: its replicas, its keepers and their memory. What is desired stays as it is."""
    with errors_as_exit(as_json), cluster(address):
        from weightswap_fleet import Fleet

        Fleet(name).remove()  # also one that never came up
        if as_json:
            print_json({"fleet": name})
        else:
            say(f"removed     {name}")


def _scaling(replicas: int, most: int | None) -> dict[str, Any]:
    if most is None:
        return {"num_replicas": replicas}
    if most < replicas:
        raise typer.BadParameter(f"--max-replicas {most}: expected at least --replicas, which are {replicas}")
    return {"autoscaling_config": {"min_replicas": replicas, "max_replicas": most}}


def _say_desired(state: DesiredState, as_json: bool) -> None:
    if as_json:
        return print_json(state.as_dict())
    say(f"revision    {state.revision}")
    if state.weights is not None:
        say(f"desired     {printable(state.weights.source)}")
        say(f"weights id  {state.weights.weights_id}")
        say(f"since       {since_said(state.weights)}")
    if state.hold is not None:
        say(f"on hold     since {since_said(state.hold)}")
    return None


def _show(fleet: Fleet, as_json: bool) -> bool:
    """Say how it stands. Whether all nodes serve what is desired."""
    state, nodes, trial = fleet.desired, fleet.nodes, fleet.trial
    agree = all(each.weights_id == state.weights_id for each in nodes.values())
    if as_json:
        from weightswap_fleet.fleet_page import standing

        print_json(standing(fleet.name, state, nodes, trial))
        return agree
    say(f"fleet       {fleet.name}")
    _say_desired(state, as_json)
    columns = ["node", "weights", "revision", "replicas", "state"]
    print_table("Nodes", columns, [_row(each, state.weights_id) for _, each in sorted(nodes.items())])
    say_trial(trial)
    return agree


def _row(node: NodeStatus, wanted: str | None) -> list[str]:
    state = "; ".join(line.strip().removeprefix("- ") for line in node.error.splitlines()) or (
        "serves" if node.weights_id == wanted else "behind"
    )
    if node.preparing:
        state += f", prepares {node.preparing[:SHOWN]}"
    if node.trying:
        state += f", tries {node.trying[:SHOWN]}"
    served = (node.weights_id or ("nothing" if node.keeper else "?"))[:SHOWN]
    return [node.node, served, str(node.revision), str(len(node.replicas)), state]
