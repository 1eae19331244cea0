"""Connections to clusters and fleets, and the output of changes, for the commands of `weightswap fleet`."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_tools.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from ray.serve import Application

    from weightswap_fleet import Deadlines, Fleet, FleetReceipt

NameOption = Annotated[str, typer.Option("--name", "-n", help="The fleet's name.")]
ByOption = Annotated[str, typer.Option(help="Who makes the change.")]
WhyOption = Annotated[str, typer.Option(help="The reason for the change.")]
AddressOption = Annotated[
    str, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; `auto` is the one of this machine.")
]
PrepareOption = Annotated[
    float, typer.Option(min=0, help="Seconds after which a node that is not ready aborts the change.")
]
NAME = "weightswap"
PREPARE = 600.0
_CONNECT_TIMEOUT, _POLL_SECONDS = 5.0, 0.1
_ERROR = re.compile(r"^[A-Za-z_][\w.]*: ", re.MULTILINE)


@contextmanager
def connected(name: str, address: str) -> Iterator[Fleet]:
    """Connect to a fleet while the block runs. Raises as `cluster` does, and UnknownFleet."""
    with cluster(address):
        from weightswap_fleet import connect

        yield connect(name)


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs. Raises MissingExtra, and Unsupported if there is no cluster."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("a fleet", "ray") from error
    _check_address(address)
    try:
        ray.init(address, log_to_driver=False, logging_level="error", namespace="weightswap")
    except ConnectionError as error:
        raise Unsupported(f"no Ray cluster at {address}: start one (ray start --head), or give --address") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise Unsupported if nothing listens at the address; Ray itself would retry for minutes."""
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


def run_application(application: Application, name: str, route: str) -> None:
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
        time.sleep(_POLL_SECONDS)


def _reasons(message: str) -> list[str]:
    """Return the lines of the last error in a message of Serve, without its traceback."""
    *_, begin = [0, *(match.start() for match in _ERROR.finditer(message))]
    return [f"  {line.strip()}" for line in message[begin:].splitlines() if line.strip()]


def deadlines(prepare: float) -> Deadlines:
    """Return the deadlines of a change whose first phase may take this many seconds."""
    from weightswap_fleet import Deadlines

    return Deadlines(prepare=prepare)


def say_fleet_receipt(receipt: FleetReceipt, as_json: bool) -> None:
    """Print the receipt of a change of a whole fleet."""
    if as_json:
        return print_json(receipt.as_dict())
    before = receipt.previous_weights_id
    unchanged = " (already desired)" if receipt.kind == "none" else ""
    say(f"{receipt.kind:<12}{receipt.source}{unchanged}")
    say(f"weights id  {receipt.weights_id}")
    say(f"before      {before or 'nothing'}")
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
    return None
