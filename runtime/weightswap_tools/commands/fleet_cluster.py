"""The fleet and the cluster that commands of `weightswap fleet` mean, and what a change says."""

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
ByOption = Annotated[str, typer.Option(help="Who asks.")]
WhyOption = Annotated[str, typer.Option(help="The reason, for those who come after.")]
AddressOption = Annotated[
    str, typer.Option(envvar="RAY_ADDRESS", help="Of the Ray cluster; `auto` is that of this machine.")
]
PrepareOption = Annotated[
    float, typer.Option(min=0, help="Give it up where a node is not ready after so many seconds.")
]
NAME = "weightswap"
PREPARE = 600.0
_ANSWER, _POLL = 5.0, 0.1  # seconds
_ERROR = re.compile(r"^[A-Za-z_][\w.]*: ", re.MULTILINE)


@contextmanager
def connected(name: str, address: str) -> Iterator[Fleet]:
    """A block that is connected to the cluster of a fleet. Raises what `cluster` raises, and UnknownFleet."""
    with cluster(address):
        from weightswap_fleet import connect

        yield connect(name)


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """A block that is connected to a Ray cluster. Raises MissingExtra, and Unsupported where none is there."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("a fleet", "ray") from error
    _check_address(address)
    try:
        ray.init(address, log_to_driver=False, logging_level="error", namespace="weightswap")
    except ConnectionError as error:
        raise Unsupported(f"no Ray cluster at {address}: start one (ray start --head), or say --address") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise Unsupported where nothing listens; Ray itself would ask again and again, for minutes."""
    if address in ("", "local"):
        raise Unsupported(
            f"--address {address!r}: would be a cluster that ends with this command; say HOST:PORT or auto"
        )
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise Unsupported(
            f"no Ray cluster at {address} ({error}): start one there (ray start --head), or say another --address"
        ) from error


def run_application(application: Application, name: str, route: str) -> None:
    """Deploy, and wait until it runs; what Ray Serve waits for meanwhile is said. Raises FleetError where it fails."""
    from ray import serve

    from weightswap_fleet import FleetError

    serve.run_many([serve.RunTarget(application, name=name, route_prefix=route)], wait_for_applications_running=False)
    said: list[str] = []
    while (found := serve.status().applications[name]).status != "RUNNING":
        if found.status == "DEPLOY_FAILED":
            raise FleetError(f"{name}: Ray Serve could not deploy it", *(said or _reasons(found.message)))
        for each in found.deployments.values():
            if each.message and (why := _reasons(each.message)) != said:
                said = why
                for line in (f"{name}: Ray Serve is not ready:", *said):
                    say(line, err=True)
        time.sleep(_POLL)


def _reasons(message: str) -> list[str]:
    """The last error in what Serve says, without the traceback before it."""
    *_, begins = [0, *(found.start() for found in _ERROR.finditer(message))]
    return [f"  {line.strip()}" for line in message[begins:].splitlines() if line.strip()]


def deadlines(prepare: float) -> Deadlines:
    """Those of a change whose first phase may take so many seconds."""
    from weightswap_fleet import Deadlines

    return Deadlines(prepare=prepare)


def say_fleet_receipt(receipt: FleetReceipt, as_json: bool) -> None:
    """Print a change of a whole fleet."""
    if as_json:
        return print_json(receipt.as_dict())
    before = receipt.previous_weights_id
    unchanged = " (was desired already)" if receipt.kind == "none" else ""
    say(f"{receipt.kind:<12}{receipt.source}{unchanged}")
    say(f"weights id  {receipt.weights_id}")
    say(f"before      {before or 'nothing'}")
    say(f"revision    {receipt.revision}")
    say(
        f"took        {receipt.seconds_staged:.2f} s until all were ready, {receipt.seconds_committed:.2f} s until all "
        f"served; {receipt.skew * 1e3:.1f} ms between the first and the last"
    )
    rows = [
        [node, "in memory" if each.resident else f"{each.seconds_staged:.2f} s", receipt.late.get(node, "serves")]
        for node, each in sorted(receipt.nodes.items())
    ]
    rows += [[node, "", why] for node, why in sorted(receipt.late.items()) if node not in receipt.nodes]
    print_table("Nodes", ["node", "staged in", "state"], rows)
    return None
