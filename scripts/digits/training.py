"""Trainer process: it knows nothing of weightswap, and saves an ordinary checkpoint after each epoch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from dataset import Digits, split_digits
from events import emit
from network import DigitsNet
from torch import nn

BATCH = 32
LEARNING_RATE = 3e-4


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits) -> Iterator[float]:
    """Train one pass in random order. Yield, after each step, the sum of its losses."""
    model.train()
    for batch in torch.randperm(len(digits.labels)).split(BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(digits.images[batch]), digits.labels[batch])
        loss.backward()
        optimizer.step()
        yield loss.item() * len(batch)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits) -> float:
    """Train one pass in random order, and return the mean loss."""
    return sum(train_steps(model, optimizer, digits)) / len(digits.labels)


def save(state: dict[str, Any], path: Path) -> None:
    """Save a state dict, or several, with `torch.save`; the file appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, help="the folder to save epoch-N.pt in")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="minimum seconds of an epoch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits, _ = split_digits()
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    loss = None
    for epoch in range(options.epochs + 1):
        started = time.monotonic()
        if epoch:  # epoch 0 is the untrained model
            loss = train_epoch(model, optimizer, digits)
            time.sleep(max(0.0, started + options.pace - time.monotonic()))
        path = options.checkpoints / f"epoch-{epoch}.pt"
        save(model.state_dict(), path)
        emit("checkpoint", epoch=epoch, file=path.name, loss=loss)
    emit("done")


if __name__ == "__main__":
    main()
