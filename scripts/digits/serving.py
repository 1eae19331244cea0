"""Server process: answers requests, and takes each weight file that is put into its inbox.

It imports the runtime, torch and numpy: neither the model's source code nor the exporter. Commands come on standard
input, one word a line: `rollback`, `stop`. The end of the input stops it, too. With `--operated`, the model is also
served over HTTP, with a page for its operator, and serving continues after the first `stop`.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import torch
from answers import write_shard
from clients import MOST_IMAGES, Clients
from events import emit

from weightswap_runtime import Model, SwapError, SwapReceipt, load

FORBIDDEN = ("network", "dataset", "build", "training", "weightswap_exporter", "sklearn")
POLL_SECONDS = 0.02
SHARD_SECONDS = 0.25


class Inbox:
    """Folder of files that are numbered in order: `003-<any name>.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0

    def take(self) -> Path | None:
        """Return the next file if it has arrived. Files get such a name only when they are complete."""
        path = next(self._folder.glob(f"{self._next:03d}-*.safetensors"), None)
        if path is not None:
            self._next += 1
        return path


class Server:
    """Swaps, commands and shards in one thread; the clients have their own threads."""

    def __init__(self, model: Model, inbox: Inbox, clients: Clients, probe: torch.Tensor, shards: Path) -> None:
        self._model = model
        self._inbox = inbox
        self._clients = clients
        self._probe = probe
        self._shards = shards
        self._count = 0
        self._answers = 0
        self._flushed = time.monotonic()

    def run(self, commands: SimpleQueue[str]) -> int:
        """Serve until told to stop; return the number of answers."""
        while (command := _next(commands)) != "stop":
            if command == "rollback":
                _report("rolled back", self._model.rollback())
            elif path := self._inbox.take():
                self._swap(path)
            if time.monotonic() > self._flushed + SHARD_SECONDS:
                self._flush()
        if self._model.generation is not None:
            self._clients.stop()
        self._flush()
        return self._answers

    def _swap(self, path: Path) -> None:
        first = self._model.generation is None
        before = None if first else self._observe()
        try:
            receipt = self._model.swap(path)
        except SwapError as error:
            emit(
                "refused",
                file=path.name,
                error=type(error).__name__,
                message=str(error),
                generation=self._model.generation,
                weights_id=self._model.weights_id,
                unchanged=self._observe() == before,
            )
            return
        _report("committed", receipt)
        if first:
            self._clients.start()

    def _observe(self) -> tuple[int | None, str | None, bytes]:
        """Return what clients can observe: the generation, the weights id, the exact bits of an output."""
        output: bytes = self._model(self._probe).numpy().tobytes()
        return self._model.generation, self._model.weights_id, output

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if answers := self._clients.take():
            path = self._shards / f"{self._count:05d}.npz"
            write_shard(path, answers)
            self._count += 1
            self._answers += len(answers)
            emit("answers", file=path.name)


def _report(kind: str, receipt: SwapReceipt) -> None:
    emit(
        kind,
        generation=receipt.generation,
        weights_id=receipt.weights_id,
        labels=receipt.labels,
        seconds_staged=receipt.seconds_staged,
        seconds_paused=receipt.seconds_paused,
    )


def _next(commands: SimpleQueue[str]) -> str | None:
    try:
        return commands.get(timeout=POLL_SECONDS)
    except Empty:
        return None


def _listen(commands: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line.strip())
    commands.put("stop")  # the parent has ended


def _loaded(names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if name in sys.modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("inbox", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--residency", choices=("double", "single"), required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--operated", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    commands: SimpleQueue[str] = SimpleQueue()
    Thread(target=_listen, args=(commands,), daemon=True).start()
    # allows a rollback in either residency, and after a damaged file
    model = load(options.artifact, residency=options.residency, keep_previous="host")
    with np.load(options.images) as file:
        images = torch.from_numpy(file["images"])
    clients = Clients(model, images, count=options.clients, rate=options.rate)
    server = Server(model, Inbox(options.inbox), clients, images[:MOST_IMAGES], options.shards)
    with ExitStack() as stack:
        page = None
        if options.operated:
            from operating import operated

            page = stack.enter_context(operated(model, images[:1], Path.cwd()))._asdict()
        emit("ready", graph_id=model.graph_id, page=page)
        answers = server.run(commands)
        emit("done", answers=answers, forbidden_imports=_loaded(FORBIDDEN))
        if options.operated:
            commands.get()


if __name__ == "__main__":
    main()
