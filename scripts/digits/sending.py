"""Trainer process of `scripts/demo --live`: every few steps it saves its state, and sends its weights from memory.

It goes on from the step that it saved last, which it sends first. To be killed in the middle of sending it stops there
(`--halt-at`); to diverge once it sends NaN (`--spoil-at`).
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import torch
from dataset import split_digits
from events import emit
from network import DigitsNet
from training import LEARNING_RATE, save, train_steps

from weightswap_runtime import Sender, Sending, SwapError

SEND_STEPS = 4
State = dict[str, torch.Tensor]


class _Sent(NamedTuple):
    step: int
    began: float  # seconds since the epoch, as in receipts
    held: float  # seconds for which the training stood still
    sending: Sending


class Reports:
    """Sends, until what became of them is told to the parent process."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._open: deque[_Sent] = deque()

    def send(self, step: int, weights: State | Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send weights without waiting until they are served."""
        began = time.time()
        sending = self._sender.send(weights, labels={"step": str(step)}, wait=False)
        assert isinstance(sending, Sending)
        self._open.append(_Sent(step, began, time.time() - began, sending))

    def tell(self, *, wait: bool = False) -> None:
        """Report the sends that have ended; with `wait`, all."""
        while self._open and (wait or self._open[0].sending.done):
            step, began, held, sending = self._open.popleft()
            try:
                receipt = sending.wait()
            except SwapError as error:
                emit("not served", step=step, error=type(error).__name__, message=str(error))
            else:
                emit(
                    "served",
                    step=step,
                    generation=receipt.generation,
                    weights_id=receipt.weights_id,
                    seconds_held=held,
                    seconds_until_served=receipt.committed_at - began,
                )


def halting(state: State, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield half of the tensors, and wait for the end of this process."""
    for number, item in enumerate(state.items()):
        if number == len(state) // 2:
            emit("halted", step=step)
            while True:
                signal.pause()
        yield item


def spoiled(state: State) -> State:
    return {name: tensor * torch.nan if name == "head.5.bias" else tensor for name, tensor in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("to", help="the server's socket, unix:PATH")
    parser.add_argument("checkpoints", type=Path, help="the folder to save step-N.pt in")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="minimum seconds of a step")
    parser.add_argument("--halt-at", type=int)
    parser.add_argument("--spoil-at", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    digits, _ = split_digits()
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    first = max((int(path.stem.removeprefix("step-")) for path in options.checkpoints.glob("step-*.pt")), default=0)
    torch.manual_seed(first)
    if first:
        saved = torch.load(options.checkpoints / f"step-{first}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    losses = chain.from_iterable(train_steps(model, optimizer, digits) for _ in count())
    emit("training", step=first)
    with Sender(options.to, options.artifact) as sender:
        reports = Reports(sender)
        for step in range(first, options.steps + 1):
            started = time.monotonic()
            if step > first:
                next(losses)
            state = model.state_dict()
            if step % SEND_STEPS == 0:
                save({"model": state, "optimizer": optimizer.state_dict()}, options.checkpoints / f"step-{step}.pt")
                if step == options.halt_at:
                    reports.send(step, halting(state, step))
                elif step == options.spoil_at:
                    reports.send(step, spoiled(state))
                    reports.tell(wait=True)  # or later weights could overtake these
                else:
                    reports.send(step, state)
                reports.tell()
            time.sleep(max(0.0, started + options.pace - time.monotonic()))
        reports.tell(wait=True)
    emit("done")


if __name__ == "__main__":
    main()
