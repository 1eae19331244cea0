"""Model of a fleet larger than any that was measured: the time until all nodes have new weights, and of a commit.

`python scripts/benchmarks/fleet_model.py` prints it. The staging of one node (`scripts/bench swap`), the cost of a
message and the transfer between nodes (`scripts/bench fleet`) are measured; the rates of networks and buckets are
assumptions, which options change.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table


class Rates(NamedTuple):
    """Rates in GB/s.

    Of a node's network, each way; of a bucket for one reader, and for all; of staging with digests; of chunks from one
    node to another through Ray's object store, on an unlimited network.
    """

    network: float = 3.1  # 25 Gbit/s
    reader: float = 3.1
    bucket: float = 100.0
    staging: float = 8.0
    relay: float = 0.33


def from_bucket(nodes: int, gigabytes: float, rates: Rates) -> float:
    """Return the seconds until all nodes have read from a bucket that gives each the same share."""
    return gigabytes / min(rates.reader, rates.bucket / nodes, rates.network, rates.staging)


def through_tree(nodes: int, gigabytes: float, rates: Rates, fanout: int = 2, chunks: int = 200) -> float:
    """Return the seconds until all nodes have every chunk, if one reads the bucket and nodes relay chunks to children.

    Simulated chunk by chunk: a node sends whole chunks, the oldest first, to one child after another, over a network
    that does one thing at a time each way. Node 0 reads; the children of n are n * fanout + 1 and those after it.
    """
    size = gigabytes / chunks
    read = size / min(rates.reader, rates.bucket, rates.staging)
    passed = size / min(rates.network, rates.staging, rates.relay)
    has = [[(chunk + 1) * read for chunk in range(chunks)]]
    has += [[0.0] * chunks for _ in range(nodes - 1)]
    for node in range(nodes):  # parents come before their children
        free = 0.0
        for chunk in range(chunks):
            for child in _children(node, nodes, fanout):
                free = max(free, has[node][chunk]) + passed
                has[child][chunk] = free
    return max(each[-1] for each in has)


def _children(node: int, nodes: int, fanout: int) -> Iterator[int]:
    yield from range(node * fanout + 1, min(node * fanout + 1 + fanout, nodes))


def commit_skew(nodes: int, milliseconds: float) -> float:
    """Return the milliseconds between the first and the last node's commit, if one process sends each a message."""
    return (nodes - 1) * milliseconds


def table(gigabytes: float, rates: Rates, milliseconds: float) -> Table:
    grid = Table(box=box.MARKDOWN)
    for heading in (
        "machines",
        "each reads the bucket",
        "one reads, a tree of 2",
        "one reads, a chain",
        "commits apart",
    ):
        grid.add_column(heading, justify="right")
    for nodes in (1, 10, 100, 1000):
        times = (
            from_bucket(nodes, gigabytes, rates),
            through_tree(nodes, gigabytes, rates),
            through_tree(nodes, gigabytes, rates, fanout=1),
        )
        apart = f"{commit_skew(nodes, milliseconds):.0f} ms"
        grid.add_row(f"{nodes:,}", *(f"{seconds:,.0f} s" for seconds in times), apart)
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=100.0, help="of weights (%(default)s)")
    parser.add_argument("--message-ms", type=float, default=0.5, help="for a message to an agent (%(default)s)")
    for name, value in Rates()._asdict().items():
        parser.add_argument(f"--{name}", type=float, default=value, help="GB/s (%(default)s)")
    options = parser.parse_args()
    rates = Rates(options.network, options.reader, options.bucket, options.staging, options.relay)
    Console(width=120).print(table(options.gigabytes, rates, options.message_ms))


if __name__ == "__main__":
    main()
