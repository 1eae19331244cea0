"""`weightswap fleet`: its commands, each of which connects to Ray, asks the fleet's coordinator, and disconnects."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightswap_runtime.errors import MissingExtra, StageClosed, Unsupported, percent, plural
from weightswap_runtime.following.desired_state import SHOWN, DesiredState
from weightswap_runtime.following.desired_store import known_weights
from weightswap_runtime.sources.location import printable
from weightswap_tools.terminal import (
    AllowNonfiniteOption,
    JsonOption,
    RequireSignatureOption,
    errors_as_exit,
    print_json,
    print_table,
    say,
    status_line,
)

from .push import AbortIfOption, PromoteIfOption, ShadowOption, ShareOption, WaitOption, print_measurements
from .weights import ByOption, WhyOption, print_earlier, since_text

if TYPE_CHECKING:
    from ray.serve import Application

    from weightswap_fleet import Deadlines, Fleet, FleetReceipt, NodeStatus, TrialReport


NameOption = Annotated[str, typer.Option("--name", "-n", help="The fleet's name.")]
AddressOption = Annotated[
    str, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; `auto` is the one of this machine.")
]
PrepareOption = Annotated[
    float, typer.Option(min=0, help="Seconds after which a node that is not ready aborts the change.")
]
_NAME = "weightswap"
_PREPARE = 600.0  # seconds for all nodes to stage
_CONNECT_TIMEOUT = 5.0  # seconds
_AUTH_MODE = "RAY_AUTH_MODE"
_TOKEN = "give the token of the cluster's head in ~/.ray/auth_token or RAY_AUTH_TOKEN, as on all its machines"
_DEPLOY_POLL_SECONDS, _CANARY_POLL_SECONDS = 0.1, 0.5
_ERROR = re.compile(r"^[A-Za-z_][\w.]*: ", re.MULTILINE)  # the last line of a traceback: its class and message
fleet_command = typer.Typer(add_completion=False, help="Deploy on Ray, and change the weights of all nodes together.")


@fleet_command.command()
def canary(
    weights: Annotated[
        str | None, typer.Argument(help="A packed weight file, as for swap; without it, show the current trial.")
    ] = None,
    name: NameOption = _NAME,
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
    prepare_seconds: PrepareOption = _PREPARE,
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
        deadlines = _deadlines(prepare_seconds)
        begun = None if weights is None else fleet.canary(weights, by=by, why=why, deadlines=deadlines, **options)
        trial = _wait_for_end(fleet, begun or fleet.trial) if wait else fleet.trial
        if as_json:
            print_json({"trial": trial.as_dict() if trial is not None else None})
        else:
            _print_trial(trial)
        if wait and (trial is None or trial.outcome != "promoted"):
            raise typer.Exit(1)


def _shares(steps: str | None) -> tuple[float, ...] | None:
    if steps is None:
        return None
    try:
        return tuple(float(step) for step in steps.split(","))
    except ValueError:
        raise typer.BadParameter(f"--steps {steps}: expected shares, such as 0.1,0.5,1") from None


def _deadlines(prepare: float) -> Deadlines:
    from weightswap_fleet import Deadlines

    return Deadlines(prepare=prepare)


@fleet_command.command()
def promote(
    name: NameOption = _NAME,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = _PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Commit the weights on trial on all nodes together. If one node cannot, none does, and the trial continues."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        say_fleet_receipt(fleet.promote(by=by, why=why, deadlines=_deadlines(prepare_seconds)), as_json)


@fleet_command.command()
def abort(
    name: NameOption = _NAME,
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
            _print_trial(trial)


@fleet_command.command()
def deploy(
    artifact: Annotated[str, typer.Argument(help="The artifact, at a path that all nodes can read.")],
    weights: Annotated[str | None, typer.Option(help="The first weights, if nothing is desired yet.")] = None,
    follow: Annotated[
        str | None, typer.Option(help="The store of the desired state; by default the directory of the weights.")
    ] = None,
    name: NameOption = _NAME,
    replicas: Annotated[int, typer.Option(min=1, help="The number of replicas on all nodes together.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Let Ray Serve scale up to this many replicas under load.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name in requests; by default the artifact's.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum rows to batch into one call.")] = 1,
    route: Annotated[str, typer.Option(help="The route prefix at Ray Serve's proxies.")] = "/",
    require_signature: RequireSignatureOption = None,
    allow_nonfinite: AllowNonfiniteOption = None,
    relay: Annotated[
        bool, typer.Option("--relay/--no-relay", help="Read URLs on one node and relay them, or on each node.")
    ] = True,
    ranks: Annotated[
        int, typer.Option(min=1, help="The processes of each replica that have the model together, as exported.")
    ] = 1,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Deploy an artifact as a Ray Serve application, or redeploy it with other options and the same weights."""
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        if max_replicas < replicas:
            raise typer.BadParameter(
                f"--max-replicas {max_replicas}: expected at least --replicas, which is {replicas}"
            )
        scaling = {"autoscaling_config": {"min_replicas": replicas, "max_replicas": max_replicas}}
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
            ranks=ranks,
            **scaling,
        )
        _run_application(application, name, route)
        fleet = connect(name)
        _show(fleet, as_json)
        if weights is not None and fleet.desired.weights_id != known_weights(weights).weights_id:
            say("--weights are not served: others are already desired; `weightswap fleet swap` changes that", err=True)


@fleet_command.command()
def status(name: NameOption = _NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Show the desired weights and those that each node serves. The exit status is 1 unless all replicas serve them."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        if not _show(fleet, as_json):
            raise typer.Exit(1)


@fleet_command.command()
def page(
    name: NameOption = _NAME,
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
    name: NameOption = _NAME,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = _PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Swap weights on all nodes together: all stage and verify them first, and if one cannot, none commits."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        say_fleet_receipt(fleet.swap(weights, by=by, why=why, deadlines=_deadlines(prepare_seconds)), as_json)


@fleet_command.command()
def rollback(
    to: Annotated[
        str | None, typer.Argument(help="A prefix of a weights id; by default the previously desired weights.")
    ] = None,
    name: NameOption = _NAME,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="Do not hold afterwards.")] = False,
    by: ByOption = "",
    why: WhyOption = "",
    prepare_seconds: PrepareOption = _PREPARE,
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Serve earlier weights on all nodes, and hold them until `release`."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        limits = _deadlines(prepare_seconds)
        say_fleet_receipt(fleet.rollback(to, by=by, why=why, hold=not no_hold, deadlines=limits), as_json)


@fleet_command.command()
def hold(
    name: NameOption = _NAME,
    by: ByOption = "",
    why: WhyOption = "",
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Hold the desired weights: nothing is promoted until `release`."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        _print_desired(fleet.hold(by=by, why=why), as_json)


@fleet_command.command()
def release(name: NameOption = _NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Release a hold."""
    with errors_as_exit(as_json), connected(name, address) as fleet:
        _print_desired(fleet.release(), as_json)


@fleet_command.command()
def remove(name: NameOption = _NAME, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Remove a fleet: its replicas, its agents and their memory. The desired state stays."""
    with errors_as_exit(as_json), cluster(address):
        from weightswap_fleet import Fleet

        Fleet(name).remove()  # works for a fleet that never came up, too
        if as_json:
            print_json({"fleet": name})
        else:
            say(f"removed     {name}")


# Connections, and waiting.


@contextmanager
def connected(name: str, address: str) -> Iterator[Fleet]:
    """Connect to a fleet while the block runs. Raises as `cluster` does, and UnknownFleet."""
    with cluster(address):
        from weightswap_fleet import connect

        yield connect(name)


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs.

    Raises MissingExtra, and Unsupported if there is no cluster, or if it requires a token that this process lacks.
    """
    try:
        import ray
        from ray.exceptions import AuthenticationError
    except ImportError as error:
        raise MissingExtra("a fleet", "ray") from error
    _check_address(address)
    try:
        ray.init(address, log_to_driver=False, logging_level="error", namespace="weightswap")
    except AuthenticationError as error:
        raise Unsupported(f"RAY_AUTH_MODE={os.environ.get(_AUTH_MODE)}: this process has no token; {_TOKEN}") from error
    except ConnectionError as error:
        raise Unsupported(
            f"no Ray cluster at {address} takes this process: start one (ray start --head), or give --address. If it "
            f"runs, it may require another token: {_TOKEN}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise Unsupported if nothing listens at the address, or if it requires a token and none would be sent.

    Ray itself would retry for minutes without a server, and for 20 seconds without a token.
    """
    if address in ("", "local"):
        raise Unsupported(
            f"--address {address!r}: would start a cluster that ends with this command; give HOST:PORT or auto"
        )
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise Unsupported(
            f"no Ray cluster at {address} ({error}): start one there (ray start --head), or give another --address"
        ) from error
    if os.environ.get(_AUTH_MODE, "").lower() in ("", "disabled") and _requires_token(f"{host}:{port}"):
        raise Unsupported(
            f"{address}: this Ray cluster requires a token, which Ray sends to an address only if told to: set "
            f"{_AUTH_MODE}=token, and {_TOKEN}"
        )


def _requires_token(address: str) -> bool:
    """Return whether a Ray cluster refuses a call without a token. False if that cannot be told, as with TLS."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=_CONNECT_TIMEOUT)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def _run_application(application: Application, name: str, route: str) -> None:
    """Deploy an application and wait until it runs, printing why Ray Serve is not ready. Raises FleetError."""
    from ray import serve

    from weightswap_fleet import FleetError

    serve.run_many([serve.RunTarget(application, name=name, route_prefix=route)], wait_for_applications_running=False)
    reasons: list[str] = []
    while (status := serve.status().applications[name]).status != "RUNNING":
        if status.status == "DEPLOY_FAILED":
            raise FleetError(f"{name}: Ray Serve could not deploy it", *(reasons or _reasons(status.message)))
        for deployment in status.deployments.values():
            if deployment.message and (lines := _reasons(deployment.message)) != reasons:
                reasons = lines
                for line in (f"{name}: Ray Serve is not ready:", *reasons):
                    say(line, err=True)
        time.sleep(_DEPLOY_POLL_SECONDS)


def _reasons(message: str) -> list[str]:
    """Return the lines of the last error in a message of Serve, without its traceback."""
    *_, begin = [0, *(match.start() for match in _ERROR.finditer(message))]
    return [f"  {line.strip()}" for line in message[begin:].splitlines() if line.strip()]


def _wait_for_end(fleet: Fleet, trial: TrialReport | None) -> TrialReport | None:
    """Wait until a trial has ended, and return its report. Raises StageClosed without one, or if another has begun."""
    if trial is None:
        raise StageClosed(f"{fleet.name}: nothing is on trial")
    now, started = fleet.trial, (trial.weights_id, trial.since)
    with status_line(f"{fleet.name}: canary") as update:
        while now is not None and not now.outcome and (now.weights_id, now.since) == started:
            update(f"{fleet.name}: canary, {now.values['requests'] or 0:.0f} requests")
            time.sleep(_CANARY_POLL_SECONDS)
            now = fleet.trial
    if now is not None and (now.weights_id, now.since) != started:
        raise StageClosed(
            f"{fleet.name}: the trial of {trial.weights_id[:SHOWN]} has ended, and another one has begun since; "
            "whether it was promoted says the history of the desired state: `weightswap fleet status`"
        )
    return now


# What is printed.


def say_fleet_receipt(receipt: FleetReceipt, as_json: bool) -> None:
    """Print the receipt of a change of a whole fleet."""
    if as_json:
        print_json(receipt.as_dict())
        return
    say(f"{receipt.kind:<12}{receipt.source}{' (already desired)' if receipt.kind == 'none' else ''}")
    say(f"weights id  {receipt.weights_id}")
    say(f"before      {receipt.previous_weights_id or 'nothing'}")
    say(f"revision    {receipt.revision}")
    say(
        f"took        {receipt.seconds_staged:.2f} s until all were ready, {receipt.seconds_committed:.2f} s until all "
        f"served; {receipt.skew * 1e3:.1f} ms between the first and the last"
    )
    rows = [
        [node, "in memory" if report.resident else f"{report.seconds_staged:.2f} s", receipt.late.get(node, "serves")]
        for node, report in sorted(receipt.nodes.items())
    ]
    rows += [[node, "", why] for node, why in sorted(receipt.late.items()) if node not in receipt.nodes]
    print_table("Nodes", ["node", "staged in", "state"], rows)


def _print_trial(trial: TrialReport | None) -> None:
    """Print the current trial, or the outcome of the last one."""
    if trial is None:
        return
    plan = trial.plan
    say(f"canary      {trial.source}{f' by {trial.by}' if trial.by else ''}{f': {trial.why}' if trial.why else ''}")
    say(f"weights id  {trial.weights_id}")
    if trial.outcome:
        say(f"outcome     {trial.outcome}{f': {trial.reason}' if trial.reason else ''}")
    else:
        shares = [f"{percent(part)} of {node}" for node, part in sorted(trial.shares.items())]
        say(f"answers     {', '.join(shares)}{', and shadow' if plan.shadow else ''}")
        if not plan.shadow and not any(trial.shares.values()):
            say("            only requests with X-Weightswap-Canary: 1 reach it; --share or --steps send it others")
    for title, rule in (("promote if", plan.promote_if), ("abort if", plan.abort_if)):
        if rule:
            held = f" (held for {trial.promote_held:.0f} s)" if title == "promote if" and not trial.outcome else ""
            say(f"{title:<12}{rule}{held}")
    print_measurements(trial.values)


def _print_desired(state: DesiredState, as_json: bool) -> None:
    if as_json:
        print_json(state.as_dict())
        return
    say(f"revision    {state.revision}")
    if state.weights is not None:
        say(f"desired     {printable(state.weights.source)}")
        say(f"weights id  {state.weights.weights_id}")
        say(f"since       {since_text(state.weights)}")
    if state.hold is not None:
        say(f"on hold     since {since_text(state.hold)}")


def _show(fleet: Fleet, as_json: bool) -> bool:
    """Print the state of a fleet. Returns whether all replicas, and all nodes, serve the desired weights."""
    state, nodes, trial = fleet.desired, fleet.nodes, fleet.trial
    agreeing = [node for node in nodes.values() if node.weights_id == state.weights_id]
    serving, known = (sum(len(node.replicas) for node in of) for of in (agreeing, nodes.values()))
    replicas = max(known, fleet.replicas)  # those that have not started are unknown to their nodes
    agree = len(agreeing) == len(nodes) and 0 < serving == replicas
    if as_json:
        from weightswap_fleet.fleet_page import standing

        count = {"serving": serving, "of": replicas}
        print_json(standing(fleet.name, state, nodes, trial) | {"agrees": agree, "replicas": count})
        return agree
    say(f"fleet       {fleet.name}")
    say(f"serve it    {serving} of {plural(replicas, 'replica')}")
    _print_desired(state, as_json)
    columns = ["node", "weights", "revision", "replicas", "state"]
    print_table("Nodes", columns, [_node_row(node, state.weights_id) for _, node in sorted(nodes.items())])
    refusals: dict[str, list[str]] = {}  # weights id -> by which nodes it was refused, and why
    for name, node in sorted(nodes.items()):
        for weights_id, why in node.refused.items():
            refusals.setdefault(weights_id, []).append(f"by {name}: {_one_line(why)}")
    print_earlier(state, {weights_id: "; ".join(texts) for weights_id, texts in refusals.items()})
    _print_trial(trial)
    return agree


def _one_line(error: str) -> str:
    return "; ".join(line.strip().removeprefix("- ") for line in error.splitlines())


def _node_row(node: NodeStatus, desired_id: str | None) -> list[str]:
    state = _one_line(node.error) or ("serves" if node.weights_id == desired_id else "behind")
    if node.preparing:
        state += f", preparing {node.preparing[:SHOWN]}"
    if node.trying:
        state += f", trying {node.trying[:SHOWN]}"
    served = (node.weights_id or ("nothing" if node.agent else "?"))[:SHOWN]
    return [node.node, served, str(node.revision), str(len(node.replicas)), state]
