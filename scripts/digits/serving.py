"""Server process: answers requests, and takes each weight file that is put into its inbox, and what trainers send.

It imports the runtime, torch and numpy: neither the model's source code nor the exporter. Commands come on standard
input, one word a line: `rollback`, `stop`. The end of the input stops it, too. With `--operated`, the model is also
served over HTTP, with a page for its operator, and serving continues after the first `stop`.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from answers import write_shard
from clients import MOST_IMAGES, Clients
from events import emit

from weightswap_runtime import Event, Model, SwapError, load

FORBIDDEN = ("network", "dataset", "build", "training", "weightswap_exporter", "sklearn")
POLL_SECONDS = 0.02
SHARD_SECONDS = 0.25
REPORT_SECONDS = 10.0  # from a commit to the call of its listener, at most
REPORTED = ("generation", "weights_id", "labels", "seconds_staged", "seconds_paused")


class Inbox:
    """Folder of files that are numbered in order: `003-<any name>.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0

    def _find(self) -> Path | None:
        return next(self._folder.glob(f"{self._next:03d}-*.safetensors"), None)

    @property
    def has_next(self) -> bool:
        """True if the next file has arrived."""
        return self._find() is not None

    def take(self) -> Path | None:
        """Return the next file if it has arrived. Files get such a name only when they are complete."""
        path = self._find()
        if path is not None:
            self._next += 1
        return path


class Server:
    """Swaps of files, commands and shards in one thread; the clients have their own, and so has what is received."""

    def __init__(self, model: Model, inbox: Inbox, clients: Clients, probe: torch.Tensor, shards: Path) -> None:
        self._model = model
        self._inbox = inbox
        self._clients = clients
        self._probe = probe
        self._shards = shards
        self._count = 0
        self._answers = 0
        self._flushed = time.monotonic()
        self._reports: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._reported = -1  # the last generation
        self._observed = self._observe()
        model.listen(self._notice)

    def run(self, commands: SimpleQueue[str]) -> int:
        """Serve until told to stop; return the number of answers."""
        while (command := _next(commands)) != "stop":
            if command == "rollback":
                self._model.rollback()
            elif path := self._inbox.take():
                with suppress(SwapError):  # which is reported
                    self._model.swap(path)
            while not self._reports.empty():
                self._report()
            if time.monotonic() > self._flushed + SHARD_SECONDS:
                self._flush()
        if self._model.generation is not None:
            self._clients.stop()
        self._flush()
        return self._answers

    def _notice(self, event: Event) -> None:
        """Queue a report of a commit or refusal, in the thread of the swap: no other swap comes between."""
        if event.receipt is not None:
            self._observed = self._observe()
            self._reports.put((event.kind, {name: getattr(event.receipt, name) for name in REPORTED}))
        elif event.error is not None:
            fields = {
                "file": Path(event.source).name,
                "error": type(event.error).__name__,
                "message": str(event.error),
                "generation": self._model.generation,
                "weights_id": self._model.weights_id,
                "unchanged": self._observe() == self._observed,
            }
            self._reports.put(("refused", fields))

    def _report(self) -> None:
        kind, fields = self._reports.get(timeout=REPORT_SECONDS)
        emit(kind, **fields)
        if kind != "refused":
            self._reported = fields["generation"]
            if self._reported == 0:
                self._clients.start()

    def _observe(self) -> tuple[int | None, str | None, bytes]:
        """Return what clients can observe: the generation, the weights id, the exact bits of an output."""
        if self._model.generation is None:
            return None, None, b""
        output: bytes = self._model(self._probe).numpy().tobytes()
        return self._model.generation, self._model.weights_id, output

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if answers := self._clients.take():
            while self._reported < max(answer.generation for answer in answers):
                self._report()
            path = self._shards / f"{self._count:05d}.npz"
            write_shard(path, answers)
            self._count += 1
            self._answers += len(answers)
            emit("answers", file=path.name)


def _next(commands: SimpleQueue[str]) -> str | None:
    try:
        return commands.get(timeout=POLL_SECONDS)
    except Empty:
        return None


def listen(commands: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line.strip())
    commands.put("stop")  # the parent has ended


def loaded(names: tuple[str, ...]) -> list[str]:
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
    parser.add_argument("--receive", help="the socket on which weights are received, unix:PATH")
    parser.add_argument("--operated", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    commands: SimpleQueue[str] = SimpleQueue()
    Thread(target=listen, args=(commands,), daemon=True).start()
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
        if options.receive:
            model.receive(options.receive)
        emit("ready", graph_id=model.graph_id, page=page)
        answers = server.run(commands)
        emit("done", answers=answers, forbidden_imports=loaded(FORBIDDEN))
        if options.operated:
            commands.get()


if __name__ == "__main__":
    main()
