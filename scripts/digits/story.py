"""Story of the demo, in the order of its events; this process exports, packs, delivers and checks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from answers import read_shard
from build import deliver, export_topology, flipped_copy, folder_bytes, pack_checkpoint, truncated_copy
from checking import Checker
from dataset import split_digits, write_images
from events import Event
from ledger import Generation, Ledger, Refusal, Sends
from processes import Children, DemoError
from screen import Screen

from weightswap_runtime import Artifact

CLIENTS = 3
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Options:
    """Options of a run. `pace` is the minimum time of an epoch in seconds, so that each generation serves a while."""

    out: Path
    epochs: int
    residency: str
    pace: float
    rate: float
    serve: bool = False
    live: bool = False
    ranks: bool = False


@dataclass
class Outcome:
    """Result of the story. Sizes in bytes; `answers_given` is the server's own count.

    page: the address of the operator's page, and its token. sends: of a trainer that sends from memory.
    """

    ledger: Ledger
    graph_id: str
    artifact_bytes: int
    weight_file_bytes: int
    expected_weights_ids: list[str]
    answers_given: int
    forbidden_imports: list[str]
    page: dict[str, str] | None
    sends: Sends | None = None


class Story:
    """One run. Every wait ends: with its event, a dead child, or a timeout (DemoError)."""

    def __init__(self, options: Options, folder: Path, children: Children, screen: Screen) -> None:
        self._options = options
        self._folder = folder
        self._children = children
        self._screen = screen
        self._ledger = Ledger()
        self._checkpoints: dict[int, Path] = {}
        self._shards: deque[Path] = deque()
        self._done: dict[str, dict[str, Any]] = {}
        self._delivered = 0
        self._page: dict[str, str] | None = None
        self._handlers: dict[str, Callable[[Event], None]] = {
            "ready": self._on_ready,
            "checkpoint": self._on_checkpoint,
            "committed": self._on_commit,
            "rolled back": self._on_commit,
            "refused": self._on_refusal,
            "answers": self._on_answers,
            "done": self._on_done,
        }
        for name in ("checkpoints", "packed", "inbox", "shards"):
            (folder / name).mkdir()
        _, held_out = split_digits()
        write_images(folder / "held-out.npz", held_out)
        self._checker = Checker(held_out)

    def play(self) -> Outcome:
        """Run from the export to the last check. Raises DemoError."""
        artifact = self._export()
        options = self._options
        arguments = ["checkpoints", f"--epochs={options.epochs}", f"--pace={options.pace}"]
        self._children.start("trainer", "training.py", arguments)
        self._start_server()
        last = self._options.epochs
        for epoch in range(last + 1):
            packed = self._pack(epoch, artifact)
            if epoch:  # a server that starts slowly would find several, and replace them before anyone has asked
                self._until(self._has_answered, f"answer with epoch {epoch - 1}")
            self._deliver(epoch)
        self._until(lambda: len(self._ledger.generations) == last + 1, "commit of the last checkpoint")
        self._serve_on(self._options.pace)
        self._deliver_damaged(packed)
        self._roll_back(last - 1)
        self._serve_on(self._options.pace)
        return self._end(artifact, packed)

    def _end(self, artifact: Artifact, packed: Path) -> Outcome:
        done = self._stop()
        return Outcome(
            ledger=self._ledger,
            graph_id=artifact.graph_id,
            artifact_bytes=folder_bytes(artifact.path),
            weight_file_bytes=packed.stat().st_size,
            expected_weights_ids=self._checker.expected_ids(),
            answers_given=done["answers"],
            forbidden_imports=done["forbidden_imports"],
            page=self._page,
        )

    def _export(self) -> Artifact:
        artifact = export_topology(self._folder / "digits.artifact")
        size = f"{folder_bytes(artifact.path) / 1e3:.0f} kB"
        self._screen.say(f"exported the topology, before training: graph {artifact.graph_id[:12]}, {size}, no weights")
        return artifact

    def _start_server(self, *more: str) -> None:
        options = self._options
        self._children.start(
            "server",
            "serving.py",
            [
                *("digits.artifact", "held-out.npz", "inbox", "shards"),
                *(f"--residency={options.residency}", f"--clients={CLIENTS}", f"--rate={options.rate}"),
                *(["--operated"] if options.serve else []),
                *more,
            ],
        )

    def _pack(self, epoch: int, artifact: Artifact) -> Path:
        self._until(lambda: epoch in self._checkpoints, f"checkpoint of epoch {epoch}", self._options.pace)
        checkpoint = self._checkpoints[epoch]
        packed = pack_checkpoint(checkpoint, artifact, self._folder / "packed" / f"epoch-{epoch}.safetensors", epoch)
        self._checker.learn(epoch, packed.weights_id, checkpoint)
        return packed.path

    def _deliver(self, epoch: int) -> None:
        self._checker.expect(epoch)
        self._put(self._folder / "packed" / f"epoch-{epoch}.safetensors")

    def _deliver_damaged(self, packed: Path) -> None:
        """Deliver the last file again, damaged: first truncated, then with a flipped bit."""
        for count, damage in enumerate((truncated_copy, flipped_copy), start=1):
            name = damage.__name__.removesuffix("_copy")
            self._put(damage(packed, packed.with_stem(f"{packed.stem}-{name}")))
            self._until(partial(self._answered, count), f"refusal of the {name} file")
            self._serve_on(self._options.pace / 2)

    def _answered(self, count: int) -> bool:
        handled = len(self._ledger.refusals) + len(self._ledger.generations)
        return len(self._ledger.refusals) == count or handled == self._delivered

    def _put(self, file: Path) -> None:
        deliver(file, self._folder / "inbox", self._delivered, file.stem)
        self._delivered += 1

    def _roll_back(self, epoch: int) -> None:
        self._checker.expect(epoch)
        self._children.send("server", "rollback")
        self._until(lambda: self._ledger.generations[-1].rolled_back, "rollback")

    def _serve_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end and self._has_answered(), "end of a pause", seconds)

    def _has_answered(self) -> bool:
        """Return whether the weights that came last have answered a request."""
        return bool(self._ledger.generations) and bool(self._ledger.generations[-1].samples)

    def _stop(self) -> dict[str, Any]:
        self._children.send("server", "stop")
        self._until(lambda: self._done.keys() >= {"server", "trainer"} and not self._shards, "end of the server")
        return self._done["server"]

    def _until(self, reached: Callable[[], bool], what: str, longer: float = 0.0) -> None:
        """Handle events and check answers until a condition holds. Raises DemoError if it does not."""
        deadline = time.monotonic() + PATIENCE_SECONDS + longer
        while not reached():
            if time.monotonic() > deadline:
                raise DemoError(f"waited {PATIENCE_SECONDS + longer:.0f} s in vain for the {what}")
            if event := self._children.next_event(0.0 if self._shards else POLL_SECONDS):
                self._handlers[event.kind](event)
            elif self._shards:
                self._check(self._shards.popleft())
            self._screen.show(self._ledger)

    def _check(self, shard: Path) -> None:
        for answer in read_shard(shard):
            self._ledger.add(answer, self._checker.judge(answer), self._checker.hits(answer))
        shard.unlink()

    def _on_ready(self, event: Event) -> None:
        self._screen.say("the server is ready; it has the graph, but no weights")
        self._page = event.fields["page"]
        if self._page is not None:
            self._screen.say(f"the operator's page: {self._page['address']}  token: {self._page['token']}")

    def _on_checkpoint(self, event: Event) -> None:
        self._checkpoints[event.fields["epoch"]] = self._folder / "checkpoints" / event.fields["file"]

    def _on_commit(self, event: Event) -> None:
        generation = self._record(event)
        self._screen.say(
            f"{event.kind}: generation {generation.generation}, weights {generation.weights_id[:12]}, "
            f"{self._ledger.unit} {generation.version}, paused {generation.seconds_paused * 1e6:.1f} µs"
        )

    def _record(self, event: Event) -> Generation:
        fields = event.fields
        generation = Generation(
            generation=fields["generation"],
            weights_id=fields["weights_id"],
            version=int(fields["labels"][self._ledger.unit]),
            rolled_back=event.kind == "rolled back",
            at=event.at,
            seconds_staged=fields["seconds_staged"],
            seconds_paused=fields["seconds_paused"],
        )
        self._ledger.generations.append(generation)
        return generation

    def _on_refusal(self, event: Event) -> None:
        refusal = Refusal(at=event.at, **event.fields)
        self._ledger.refusals.append(refusal)
        state = "serving unchanged" if refusal.unchanged else "SERVING HAS CHANGED"
        self._screen.say(f"refused: {refusal.error}: {refusal.message}")
        self._screen.say(f"{state}: generation {refusal.generation}, weights {refusal.weights_id[:12]}")

    def _on_answers(self, event: Event) -> None:
        self._shards.append(self._folder / "shards" / event.fields["file"])

    def _on_done(self, event: Event) -> None:
        self._done[event.source] = event.fields
