"""Demo on a fleet: three replicas on three nodes take the checkpoints of a training together, under traffic.

With `--ranks` each replica is two processes, which have the model together.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from build import export_topology, flipped_copy, pack_checkpoint
from dataset import Digits, split_digits
from network import DigitsNet
from numpy.typing import NDArray
from ranks import PLAN, SIZE
from rich.console import Console
from rich.table import Table
from torch import nn
from training import LEARNING_RATE, save, train_epoch

from weightswap_exporter import Parallel
from weightswap_fleet import Fleet, FleetReceipt, FleetRefused, connect, deployment
from weightswap_runtime import Artifact

REPLICAS, CLIENTS, BATCH = 3, 2, 30
_NAME = "digits"


class Checkpoint(NamedTuple):
    """Weight file, and the answers of its epoch's eager model for the held-out images."""

    path: Path
    logits: NDArray[Any]


class Row(NamedTuple):
    what: str
    revision: int
    epoch: str
    receipt: FleetReceipt | None
    answers: int
    accuracy: float


def train(epochs: int, folder: Path, artifact: Artifact, held_out: Digits) -> dict[str, Checkpoint]:
    """Train, and return the checkpoints in order, by weights id; 0 is the untrained model."""
    torch.manual_seed(0)
    digits, _ = split_digits()
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    checkpoints = {}
    for epoch in range(epochs + 1):
        if epoch:
            train_epoch(model, optimizer, digits)
        checkpoint = folder / f"epoch-{epoch}.pt"
        save(model.state_dict(), checkpoint)
        packed = pack_checkpoint(checkpoint, artifact, folder / f"v{epoch}.safetensors", epoch)
        checkpoints[packed.weights_id] = Checkpoint(folder / f"v{epoch}.safetensors", _logits(model, held_out))
    return checkpoints


def _logits(model: nn.Module, held_out: Digits) -> NDArray[Any]:
    model.eval()
    with torch.no_grad():
        logits: NDArray[Any] = model(held_out.images).numpy()
    return logits


class Client(threading.Thread):
    """Client that asks for held-out digits continuously, and checks each answer against its eager model."""

    def __init__(self, fleet: Fleet, checkpoints: dict[str, Checkpoint], held_out: Digits, seed: int) -> None:
        super().__init__(name=f"client {seed}", daemon=True)
        self._client, self._checkpoints, self._held_out = fleet.client(), checkpoints, held_out
        self._dice = np.random.default_rng(seed)
        self._stopped = threading.Event()
        self.right: dict[int, list[float]] = {}  # by revision, the share of digits that were recognised
        self.wrong = self.backwards = self.failed = 0

    def run(self) -> None:
        seen = 0
        while not self._stopped.is_set():
            rows = self._dice.choice(len(self._held_out.labels), BATCH, replace=False)
            try:
                answer = self._client.infer({"images": self._held_out.images[rows].numpy()})
            except Exception as error:
                self.failed += 1
                print(f"a request failed: {error}", file=sys.stderr)
                continue
            logits = answer.outputs["output"]
            expected = self._checkpoints[answer.weights_id].logits[rows]
            self.wrong += not np.allclose(logits, expected, rtol=1e-4, atol=1e-4)
            self.backwards += answer.revision < seen
            seen = max(seen, answer.revision)
            share = float((logits.argmax(1) == self._held_out.labels[rows].numpy()).mean())
            self.right.setdefault(answer.revision, []).append(share)

    def end(self) -> None:
        """Stop, and wait for the last answer."""
        self._stopped.set()
        self.join()
        self._client.close()


class Story:
    def __init__(self, fleet: Fleet, checkpoints: dict[str, Checkpoint], clients: list[Client], pace: float) -> None:
        self._fleet, self._checkpoints, self._clients, self._pace = fleet, list(checkpoints.values()), clients, pace
        self._steps: list[tuple[str, int, str, FleetReceipt | None]] = []

    def play(self, folder: Path) -> list[Row]:
        """Swap in each checkpoint, offer a damaged one, and roll back."""
        self._note("deployed", self._fleet.desired.revision, "0", None)
        for epoch, checkpoint in enumerate(self._checkpoints[1:], 1):
            receipt = self._fleet.swap(checkpoint.path, by="trainer")
            self._note("swap", receipt.revision, str(epoch), receipt)
        last = len(self._checkpoints) - 1
        damaged = flipped_copy(self._checkpoints[-1].path, folder / "damaged.safetensors")
        try:
            self._fleet.swap(damaged, by="trainer")
        except FleetRefused as refused:
            self._note(f"refused by {len(refused.reasons)}", self._fleet.desired.revision, f"{last}, damaged", None)
        receipt = self._fleet.rollback(by="operator", why="to demonstrate it")
        self._note("rollback", receipt.revision, str(last - 1), receipt)
        return [self._row(*step) for step in self._steps]

    def _note(self, what: str, revision: int, epoch: str, receipt: FleetReceipt | None) -> None:
        self._steps.append((what, revision, epoch, receipt))
        time.sleep(self._pace)

    def _row(self, what: str, revision: int, epoch: str, receipt: FleetReceipt | None) -> Row:
        shares = [share for client in self._clients for share in client.right.get(revision, [])]
        return Row(what, revision, epoch, receipt, len(shares), float(np.mean(shares)) if shares else 0.0)


def _print(rows: list[Row]) -> None:
    table = Table(title="A fleet of three replicas on three nodes")
    for column in ("", "revision", "epoch", "ready after", "served after", "answers", "digits read correctly"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=not column)
    for row in rows:
        ready = f"{row.receipt.seconds_staged * 1e3:.0f} ms" if row.receipt else ""
        served = f"{row.receipt.seconds_committed * 1e3:.0f} ms" if row.receipt else ""
        shown = (f"{row.answers}", f"{row.accuracy:.1%}") if not row.what.startswith("refused") else ("", "")
        table.add_row(row.what, str(row.revision), row.epoch, ready, served, *shown)
    Console().print(table)


def _verdict(rows: list[Row], clients: list[Client]) -> list[str]:
    """Return what went wrong."""
    problems = {
        "wrong answers": sum(client.wrong for client in clients),
        "answers that went backwards": sum(client.backwards for client in clients),
        "requests that failed": sum(client.failed for client in clients),
        "versions that answered no requests": sum(not row.answers for row in rows),
        "nodes that were late": sum(len(row.receipt.late) for row in rows if row.receipt),
        "changes that missed a node": sum(len(row.receipt.nodes) != REPLICAS for row in rows if row.receipt),
    }
    failures = [f"{number} {what}" for what, number in problems.items() if number]
    return failures if any(row.what.startswith("refused") for row in rows) else [*failures, "damaged file accepted"]


@contextmanager
def _cluster(cpus: int) -> Iterator[None]:
    """Start a Ray node for each replica, with so many CPUs, all on this machine."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")  # it starts slowly on a busy machine
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    options = {"num_cpus": cpus, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(REPLICAS - 1):
            cluster.add_node(**options)
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        yield
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> int:
    """Run the demo. Exit status: 0 if every promise was kept, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/demo_fleet", description=__doc__)
    parser.add_argument("--epochs", type=int, default=4, help="epochs to train (4)")
    parser.add_argument("--pace", type=float, default=1.5, help="minimum seconds that each version serves (1.5)")
    parser.add_argument("--ranks", action="store_true", help=f"each replica is {SIZE} processes")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs: must be at least 2, or there is nothing to roll back to")
    began, ranks = time.monotonic(), SIZE if options.ranks else 1
    with tempfile.TemporaryDirectory(prefix="weightswap-fleet-") as name:
        folder = Path(name)
        artifact = export_topology(folder / "digits.artifact", Parallel(SIZE, PLAN) if options.ranks else None)
        _, held_out = split_digits()
        checkpoints = train(options.epochs, folder, artifact, held_out)
        first = next(iter(checkpoints.values())).path
        with _cluster(ranks):
            from ray import serve

            placed = {"num_replicas": REPLICAS, "ray_actor_options": {"num_cpus": 1}, "ranks": ranks}
            application = deployment(artifact.path, first, name=_NAME, **placed)
            serve.run(application, name=_NAME)
            fleet = connect(_NAME)
            clients = [Client(fleet, checkpoints, held_out, seed) for seed in range(CLIENTS)]
            for client in clients:
                client.start()
            rows = Story(fleet, checkpoints, clients, options.pace).play(folder)
            for client in clients:
                client.end()
            fleet.remove()
    _print(rows)
    problems = _verdict(rows, clients)
    answers = sum(len(shares) for client in clients for shares in client.right.values())
    wrong = sum(client.wrong for client in clients)
    verdict = f"FAILED: {', '.join(problems)}" if problems else "passed"
    print(f"{verdict}: {answers} answers checked, {wrong} wrong; {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
