"""Story of `scripts/demo --live`: a trainer sends its weights from memory, every few steps, into the running server."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from dataset import split_digits
from events import Event
from ledger import Send, Sends
from processes import Children
from screen import Screen
from sending import SEND_STEPS
from story import Options, Outcome, Story
from training import BATCH

from weightswap_exporter import pack

SOCKET = "unix:live.sock"
SHOWN = 10  # one in so many commits is a line


class Live(Story):
    """A run in which the trainer is killed once in the middle of sending, and diverges once."""

    def __init__(self, options: Options, folder: Path, children: Children, screen: Screen) -> None:
        super().__init__(options, folder, children, screen)
        steps = -(-len(split_digits()[0].labels) // BATCH)  # of an epoch
        self._ledger.unit = "step"
        self._sends = Sends(last_step=options.epochs * steps)
        self._arguments = [f"--steps={options.epochs * steps}", f"--pace={options.pace / steps}"]
        self._is_ready = False
        self._handlers |= {
            "training": self._on_training,
            "halted": self._on_halt,
            "served": self._on_served,
            "not served": self._on_not_served,
        }

    def play(self) -> Outcome:
        """Run from the export to the last check. Raises DemoError."""
        sends, pace = self._sends, self._options.pace
        seconds = self._options.epochs * pace
        self._artifact = self._export()
        self._start_server(f"--receive={SOCKET}")
        self._until(lambda: self._is_ready, "server")
        self._start_trainer("halt", 1 / 2)
        self._until(lambda: sends.halted_at >= 0, "trainer's halt", seconds)
        self._children.kill("trainer")
        sends.killed = time.monotonic()
        self._screen.say(f"killed the trainer (SIGKILL) when half of step {sends.halted_at} had been sent")
        self._serve_on(pace / 2)
        self._start_trainer("spoil", 3 / 4)
        self._until(lambda: "trainer" in self._done, "end of the training", seconds)
        self._serve_on(pace / 2)
        return replace(self._end(self._artifact, self._packed(self._ledger.generations[-1].version)), sends=sends)

    def _start_trainer(self, event: str, share: float) -> None:
        step = round(self._sends.last_step * share) // SEND_STEPS * SEND_STEPS
        arguments = ["digits.artifact", SOCKET, "checkpoints", *self._arguments, f"--{event}-at={step}"]
        self._children.start("trainer", "sending.py", arguments)

    def _packed(self, step: int) -> Path:
        return self._folder / "packed" / f"step-{step}.safetensors"

    def _on_ready(self, event: Event) -> None:
        super()._on_ready(event)
        self._is_ready = True

    def _on_commit(self, event: Event) -> None:
        step = int(event.fields["labels"]["step"])
        if not self._checker.knows(step):  # the trainer has saved it before it sent it
            checkpoint = self._folder / "checkpoints" / f"step-{step}.pt"
            packed = pack(checkpoint, self._artifact, out=self._packed(step))
            self._checker.learn(step, packed.weights_id, checkpoint)
        self._checker.expect(step)
        if event.fields["generation"] % SHOWN == 0:
            super()._on_commit(event)
        else:
            self._record(event)

    def _on_training(self, event: Event) -> None:
        step = event.fields["step"]
        self._sends.resumed_at, self._sends.resumed = step, event.at
        self._screen.say(f"the trainer begins at step {step}, and sends its weights every {SEND_STEPS} steps")

    def _on_halt(self, event: Event) -> None:
        self._sends.halted_at = event.fields["step"]

    def _on_served(self, event: Event) -> None:
        self._sends.served.append(Send(**event.fields))

    def _on_not_served(self, event: Event) -> None:
        self._sends.others.append(event.fields)
