"""`weightswap fleet`: deploy on a Ray cluster, and change the weights of all nodes together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightswap_runtime.desired.document import SHOWN, DesiredState
from weightswap_runtime.desired.place import known_weights
from weightswap_runtime.sources.location import printable
from weightswap_tools.terminal import JsonOption, errors_as_exit, print_json, print_table, say

from .desired import print_earlier, since_text
from .fleet_canary import abort, canary, print_trial, promote
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

fleet_command = typer.Typer(add_completion=False, help="Deploy on Ray, and change the weights of all nodes together.")
for _command in (canary, promote, abort):
    fleet_command.command()(_command)


@fleet_command.command()
def deploy(
    artifact: Annotated[str, typer.Argument(help="The artifact, at a path that all nodes can read.")],
    weights: Annotated[str | None, typer.Option(help="The first weights, if nothing is desired yet.")] = None,
    follow: Annotated[
        str | None, typer.Option(help="The place of the desired state; by default the directory of the weights.")
    ] = None,
    name: NameOption = NAME,
    replicas: Annotated[int, typer.Option(min=1, help="The number of replicas on all nodes together.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Let Ray Serve scale up to this many replicas under load.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name in requests; by default the artifact's.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum rows to batch into one call.")] = 1,
    route: Annotated[str, typer.Option(help="The route prefix at Ray Serve's proxies.")] = "/",
    require_signature: Annotated[
        list[str] | None,
        typer.Option(help="A public key (PEM); weights that none of the keys has signed are refused; repeatable."),
    ] = None,
    allow_nonfinite: Annotated[
        list[str] | None, typer.Option(help="Allow NaN and infinities in weights of this name; `*` allows all.")
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay/--no-relay", help="Read URLs on one node and relay them, or on each node.")
    ] = True,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Deploy an artifact as a Ray Serve application, or redeploy it with other options and the same weights."""
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
            say("--weights are not served: others are already desired; `weightswap fleet swap` changes that", err=True)


@fleet_command.command()
def status(name: NameOption = NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Show the desired weights and those that each node serves. The exit status is 1 if they differ."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        if not _show(fleet, as_json):
            raise typer.Exit(1)


@fleet_command.command()
def page(
    name: NameOption = NAME,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of the page; 0 picks a free one.")] = 8008,
    host: Annotated[str, typer.Option(help="The address to listen on; the page needs no login.")] = "127.0.0.1",
    address: AddressOption = "auto",
) -> None:
    """Serve a page that shows which weights each replica serves, until interrupted."""
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
    """Swap weights on all nodes together: all stage and verify them first, and if one cannot, none commits."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        say_fleet_receipt(fleet.swap(weights, by=by, why=why, deadlines=deadlines(prepare_seconds)), as_json)


@fleet_command.command()
def rollback(
    to: Annotated[
        str | None, typer.Argument(help="A prefix of a weights id; by default the previously desired weights.")
    ] = None,
    name: NameOption = NAME,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="Do not hold afterwards.")] = False,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Serve earlier weights on all nodes, and hold them until `release`."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        limits = deadlines(prepare_seconds)
        say_fleet_receipt(fleet.rollback(to, by=by, why=why, hold=not no_hold, deadlines=limits), as_json)


@fleet_command.command()
def hold(
    name: NameOption = NAME,
    by: ByOption = "",
    why: WhyOption = "",
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Hold the desired weights: nothing is promoted until `release`."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        _print_desired(fleet.hold(by=by, why=why), as_json)


@fleet_command.command()
def release(name: NameOption = NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Release a hold."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        _print_desired(fleet.release(), as_json)


@fleet_command.command()
def remove(name: NameOption = NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Remove a fleet: its replicas, its keepers and their memory. The desired state stays."""
    with errors_as_exit(as_json), cluster(address):
        from weightswap_fleet import Fleet

        Fleet(name).remove()  # works for a fleet that never came up, too
        if as_json:
            print_json({"fleet": name})
        else:
            say(f"removed     {name}")


def _scaling(replicas: int, most: int | None) -> dict[str, Any]:
    if most is None:
        return {"num_replicas": replicas}
    if most < replicas:
        raise typer.BadParameter(f"--max-replicas {most}: expected at least --replicas, which is {replicas}")
    return {"autoscaling_config": {"min_replicas": replicas, "max_replicas": most}}


def _print_desired(state: DesiredState, as_json: bool) -> None:
    if as_json:
        return print_json(state.as_dict())
    say(f"revision    {state.revision}")
    if state.weights is not None:
        say(f"desired     {printable(state.weights.source)}")
        say(f"weights id  {state.weights.weights_id}")
        say(f"since       {since_text(state.weights)}")
    if state.hold is not None:
        say(f"on hold     since {since_text(state.hold)}")
    return None


def _show(fleet: Fleet, as_json: bool) -> bool:
    """Print the state of a fleet. Returns whether all nodes serve the desired weights."""
    state, nodes, trial = fleet.desired, fleet.nodes, fleet.trial
    agree = all(node.weights_id == state.weights_id for node in nodes.values())
    if as_json:
        from weightswap_fleet.fleet_page import standing

        print_json(standing(fleet.name, state, nodes, trial))
        return agree
    say(f"fleet       {fleet.name}")
    _print_desired(state, as_json)
    columns = ["node", "weights", "revision", "replicas", "state"]
    print_table("Nodes", columns, [_row(node, state.weights_id) for _, node in sorted(nodes.items())])
    print_earlier(state, _refusals(nodes))
    print_trial(trial)
    return agree


def _refusals(nodes: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return by which nodes weights were refused, and why, by weights id."""
    texts: dict[str, list[str]] = {}
    for name, node in sorted(nodes.items()):
        for weights_id, why in node.refused.items():
            texts.setdefault(weights_id, []).append(f"by {name}: {_one_line(why)}")
    return {weights_id: "; ".join(each) for weights_id, each in texts.items()}


def _one_line(error: str) -> str:
    return "; ".join(line.strip().removeprefix("- ") for line in error.splitlines())


def _row(node: NodeStatus, desired_id: str | None) -> list[str]:
    state = _one_line(node.error) or ("serves" if node.weights_id == desired_id else "behind")
    if node.preparing:
        state += f", preparing {node.preparing[:SHOWN]}"
    if node.trying:
        state += f", trying {node.trying[:SHOWN]}"
    served = (node.weights_id or ("nothing" if node.keeper else "?"))[:SHOWN]
    return [node.node, served, str(node.revision), str(len(node.replicas)), state]
