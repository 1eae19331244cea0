"""Checker: every answer is computed again, by the eager model of the generation that it claims to come from."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch
from answers import Answer
from dataset import Digits
from network import DigitsNet


class Verdict(Enum):
    """Verdict on an answer. `WRONG`: another generation's output or weights id. `MIXED`: no generation's output."""

    RIGHT = "right"
    WRONG = "wrong"
    MIXED = "mixed"


class Weights(NamedTuple):
    """One checkpoint: its epoch or step, the weights id from pack(), and the eager model with it."""

    version: int
    weights_id: str
    model: DigitsNet


class Checker:
    """Checker that knows each generation's weights from the order of the deliveries, or from the step that a sender has
    named, without asking the server for any.

    Bits depend on the shape of the batch and on the number of threads, so both are those of the server.
    """

    def __init__(self, digits: Digits) -> None:
        torch.set_num_threads(1)
        self.tolerance = 0.0  # of answers, absolute
        self._digits = digits
        self._weights: dict[int, Weights] = {}
        self._generations: list[Weights] = []

    def learn(self, version: int, weights_id: str, checkpoint: Path) -> None:
        """Build the eager model of a checkpoint from the trainer's file."""
        model, saved = DigitsNet(), torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved.get("model", saved))
        self._weights[version] = Weights(version, weights_id, model.eval())

    def knows(self, version: int) -> bool:
        return version in self._weights

    def expect(self, version: int) -> None:
        """Expect the next generation to have the weights of this epoch or step."""
        self._generations.append(self._weights[version])

    def expected_ids(self) -> list[str]:
        return [weights.weights_id for weights in self._generations]

    def judge(self, answer: Answer) -> Verdict:
        claimed = self._generations[answer.generation] if answer.generation < len(self._generations) else None
        if claimed and self._equal(answer, claimed):
            return Verdict.RIGHT if answer.weights_id == claimed.weights_id else Verdict.WRONG
        of_any_generation = any(self._equal(answer, weights) for weights in self._weights.values())
        return Verdict.WRONG if of_any_generation else Verdict.MIXED

    def hits(self, answer: Answer) -> int:
        """Return how many digits an answer recognised."""
        labels = self._digits.labels[torch.from_numpy(answer.indices)]
        return int((torch.from_numpy(answer.logits).argmax(1) == labels).sum())

    def _equal(self, answer: Answer, weights: Weights) -> bool:
        images = self._digits.images[torch.from_numpy(answer.indices)]
        with torch.no_grad():
            expected, found = weights.model(images), torch.from_numpy(answer.logits)
        if not self.tolerance:
            return torch.equal(expected, found)
        return torch.allclose(expected, found, rtol=0.0, atol=self.tolerance)
