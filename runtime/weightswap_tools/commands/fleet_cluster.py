"""What the commands of `weightswap fleet` have in common: which fleet, on which cluster, and what a change says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_tools.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from weightswap_fleet import Fleet, FleetReceipt

NameOption = Annotated[str, typer.Option("--name", "-n", help="The fleet's name.")]
ByOption = Annotated[str, typer.Option(help="Who asks.")]
WhyOption = Annotated[str, typer.Option(help="The reason, for those who come after.")]
AddressOption = Annotated[
    str, typer.Option(envvar="RAY_ADDRESS", help="Of the Ray cluster; `auto` is that of this machine.")
]
NAME = "weightswap"


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
    try:
        ray.init(address, log_to_driver=False, logging_level="error", namespace="weightswap")
    except ConnectionError as error:
        raise Unsupported(f"no Ray cluster at {address}: start one (ray start --head), or say --address") from error
    try:
        yield
    finally:
        ray.shutdown()


def say_receipt(receipt: FleetReceipt, as_json: bool) -> None:
    """Print a change of a whole fleet."""
    if as_json:
        return print_json(receipt.as_dict())
    before = receipt.previous_weights_id
    say(f"{receipt.kind:<12}{receipt.source}")
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
