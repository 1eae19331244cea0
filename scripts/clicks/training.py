"""Trainer process: it learns from events as they come, and publishes what has changed every few seconds.

Prints one JSON document a line: the artifact when it is there, then each publication. The end of its input stops it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from threading import Thread

import torch
from events import NUMBERS, SIZES, Clicks
from torch import nn
from torch.export import Dim

from weightswap_exporter import Publication, RowTracker, export, publish

WIDTH = 16
BATCH = 512
MOST_EVENTS = 4096  # of a request


class Ranker(nn.Module):
    """A table for each category, and layers on top; the first column of a table counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH, sparse=True) for size in SIZES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.01)
        self.top = nn.Sequential(nn.Linear(NUMBERS + len(SIZES) * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """numbers: [events, NUMBERS]. ids: [events, len(SIZES)]. Returns the logit of a click, [events]."""
        rows = torch.stack([table(ids[:, index]) for index, table in enumerate(self.tables)], 1)
        return self.top(torch.cat([numbers, rows.flatten(1)], 1))[:, 0] + rows[:, :, 0].sum(1)


class Trainer:
    """A model in training, and the publications that are being written."""

    def __init__(self, seed: int) -> None:
        self.model = Ranker()
        self._clicks = Clicks(seed)
        self._sparse = torch.optim.SparseAdam(list(self.model.tables.parameters()), lr=0.02)
        self._dense = torch.optim.Adam(self.model.top.parameters(), lr=1e-3)
        self.tracker = RowTracker(self.model, self._sparse, self._dense)
        self.steps = 0
        self._pending: list[tuple[str, float, Publication]] = []

    def train(self, now: float) -> None:
        """Take a step with events of this moment."""
        events = self._clicks.draw(BATCH, now)
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(events.numbers, events.ids), events.clicks)
        for optimizer in (self._sparse, self._dense):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (self._sparse, self._dense):
            optimizer.step()
        self.steps += 1

    def publish(self, folder: Path, artifact: Path, rows: RowTracker | None) -> None:
        """Publish the model as it is, with a tracker the rows that have changed: no other full file than the first."""
        publication = publish(self.model, folder, artifact, step=self.steps, rows=rows, full_every=10_000)
        self._pending.append((folder.name, time.time(), publication))

    def report(self, *, wait: bool = False) -> None:
        """Print the publications that are written."""
        while self._pending and (wait or self._pending[0][2].done):
            folder, at, publication = self._pending.pop(0)
            packed = publication.wait()
            say(folder=folder, at=at, weights_id=packed.weights_id, nbytes=packed.nbytes, file=str(packed.path))


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _export(model: nn.Module, out: Path) -> None:
    events, rows = Clicks(0).draw(2, 0.0), {0: Dim("batch", max=MOST_EVENTS)}
    export(model, (events.numbers, events.ids), out=out, dynamic_shapes={"numbers": rows, "ids": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the artifact, and of the folders for row deltas and full files")
    parser.add_argument("--zero", type=float, required=True, help="moment at which the demo began")
    parser.add_argument("--warm-up", type=float, required=True, help="seconds of training before the first file")
    parser.add_argument("--rows-every", type=float, required=True, help="seconds between row deltas")
    parser.add_argument("--full-every", type=float, required=True, help="seconds between full files")
    options = parser.parse_args()
    stopped = Thread(target=sys.stdin.read, daemon=True)
    stopped.start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer, artifact = Trainer(seed=1), options.folder / "ctr.artifact"
    _export(trainer.model, artifact)
    next_rows, next_full = time.time() + options.warm_up, None
    while stopped.is_alive():
        now = time.time()
        if now >= next_rows:
            trainer.publish(options.folder / "rows", artifact, trainer.tracker)
            next_full = next_full or now + options.full_every
            next_rows = now + options.rows_every
        if next_full is not None and now >= next_full:
            trainer.publish(options.folder / "full", artifact, None)
            next_full += options.full_every
        trainer.train(now - options.zero)
        trainer.report()
    trainer.report(wait=True)


if __name__ == "__main__":
    main()
