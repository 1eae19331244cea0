"""Ranks of `scripts/demo --ranks`, started by torchrun: each has a part of the weights, and all answer together.

Rank 0 asks the questions, takes the commands and says what comes next: a call, a file, a rollback, or the end. It knows
neither the model's source code nor the exporter, like the server of the plain demo.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from answers import Answer, write_shard
from clients import MOST_IMAGES
from events import emit
from serving import FORBIDDEN, REPORTED, SHARD_SECONDS, Inbox, listen, loaded

from weightswap_runtime import Event, Model, Ranks, RanksRefused, load

CALL, SWAP, ROLL_BACK, STOP = range(4)  # what comes next; the second number is the seed of a call


class Rank:
    """One rank: what it does is told by rank 0."""

    def __init__(self, model: Model, images: torch.Tensor, inbox: Inbox) -> None:
        self.model, self._images, self._inbox = model, images, inbox

    def follow(self) -> None:
        """Do what rank 0 says, until the end."""
        while True:
            what, seed = self._told(0, 0)
            if what == STOP:
                return
            self._do(what, seed)

    def _told(self, what: int, seed: int) -> list[int]:
        """Return what rank 0 says next. On rank 0, the arguments are what it says."""
        told = torch.tensor([what, seed])
        dist.broadcast(told, 0)
        return told.tolist()  # type: ignore[no-any-return]

    def _do(self, what: int, seed: int) -> None:
        if what == CALL:
            self.ask(seed)
        elif what == ROLL_BACK:
            self.model.rollback()
        elif path := self._inbox.take():
            try:
                self.model.swap(path)
            except RanksRefused as error:
                self.refused(path, error)

    def ask(self, seed: int) -> tuple[np.ndarray, torch.Tensor]:
        """Call the model with the images of a seed; return which these are, and the answer."""
        random = np.random.default_rng(seed)
        indices = random.integers(len(self._images), size=random.integers(1, MOST_IMAGES + 1))
        return indices, self.model(self._images[torch.from_numpy(indices)])

    def refused(self, path: Path, error: RanksRefused) -> None:
        """Do nothing: rank 0 tells."""


class First(Rank):
    """Rank 0."""

    def __init__(self, model: Model, images: torch.Tensor, inbox: Inbox, shards: Path, interval: float) -> None:
        super().__init__(model, images, inbox)
        self._shards, self._interval = shards, interval
        self._answers: list[Answer] = []
        self._flushed, self._count, self._seed = time.monotonic(), 0, 0
        self.given = 0
        model.listen(self._notice)

    def lead(self, commands: SimpleQueue[str]) -> None:
        """Say what comes next, and do it, until told to stop."""
        while (command := _next(commands)) != "stop":
            started = time.monotonic()
            if command == "rollback":
                self._say(ROLL_BACK)
            elif self._inbox.has_next:
                self._say(SWAP)
            elif self.model.generation is not None:
                self._seed += 1
                self._say(CALL, self._seed)
            if time.monotonic() > self._flushed + SHARD_SECONDS:
                self._flush()
            time.sleep(max(0.0, started + self._interval - time.monotonic()))
        self._say(STOP)
        self._flush()

    def _say(self, what: int, seed: int = 0) -> None:
        self._told(what, seed)
        if what != STOP:
            self._do(what, seed)

    def ask(self, seed: int) -> tuple[np.ndarray, torch.Tensor]:
        started = time.monotonic()
        indices, logits = super().ask(seed)
        generation, weights_id = self.model.generation, self.model.weights_id
        assert generation is not None
        assert weights_id is not None
        seconds = time.monotonic() - started
        self._answers.append(Answer(started, seconds, generation, weights_id, indices, logits.numpy()))
        return indices, logits

    def refused(self, path: Path, error: RanksRefused) -> None:
        before = self.model.generation, self.model.weights_id
        last = self._answers[-1] if self._answers else None
        emit(
            "refused",
            file=path.name,
            error=type(error.__cause__ or error).__name__,
            message=next(iter(error.reasons.values())),
            generation=before[0],
            weights_id=before[1],
            unchanged=last is None or (last.generation, last.weights_id) == before,
        )

    def _notice(self, event: Event) -> None:
        if event.receipt is not None:
            self._flush()  # what was answered before is told before
            emit(event.kind, **{name: getattr(event.receipt, name) for name in REPORTED})

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._answers:
            path = self._shards / f"{self._count:05d}.npz"
            write_shard(path, self._answers)
            self._count += 1
            self.given += len(self._answers)
            self._answers = []
            emit("answers", file=path.name)


def _next(commands: SimpleQueue[str]) -> str | None:
    try:
        return commands.get_nowait()
    except Empty:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("inbox", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--residency", choices=("double", "single"), required=True)
    parser.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with np.load(options.images) as file:
        images = torch.from_numpy(file["images"])
    ranks = Ranks(dist.new_group(backend="gloo"))
    with load(options.artifact, ranks=ranks, residency=options.residency, keep_previous="host") as model:
        inbox = Inbox(options.inbox)
        if ranks.rank:
            Rank(model, images, inbox).follow()
        else:
            commands: SimpleQueue[str] = SimpleQueue()
            Thread(target=listen, args=(commands,), daemon=True).start()
            first = First(model, images, inbox, options.shards, 1 / options.rate)
            emit("ready", graph_id=model.graph_id, page=None)
            first.lead(commands)
            emit("done", answers=first.given, forbidden_imports=loaded(FORBIDDEN))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
