"""Sampling of the next token: repetition penalty, temperature, top-k and top-p, in the order of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import CallError, Unsupported
from weightswap_runtime.options import is_number

Scores = NDArray[np.floating[Any]]


class Sampling(NamedTuple):
    """The options of sampling. temperature 0 takes the most likely token, whatever `top_k` and `top_p` are.

    top_k: sample among this many of the most likely tokens. top_p: sample among the fewest most likely tokens whose
    probabilities add up to it. repetition_penalty: divides positive logits of past tokens, multiplies negative ones.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def check(self) -> None:
        """Raise Unsupported for invalid numbers."""
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise Unsupported(f"temperature={self.temperature!r}: expected 0 or more")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise Unsupported(f"top_k={self.top_k!r}: expected 1 or more, or None")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise Unsupported(f"top_p={self.top_p!r}: expected a number above 0, up to 1, or None")
        if not (is_number(self.repetition_penalty) and self.repetition_penalty > 0):
            raise Unsupported(f"repetition_penalty={self.repetition_penalty!r}: expected a positive number")


def choose(logits: Scores, seen: Sequence[int], sampling: Sampling, random: np.random.Generator) -> int:
    """Choose the next token of one row. logits: [vocabulary]. seen: the tokens that have occurred."""
    scores = _penalised(logits, seen, sampling.repetition_penalty)
    best = scores.argmax()  # NaN wins; -inf forbids a token, but not all of them
    if not math.isfinite(scores[best]):
        raise CallError(f"generate: the largest logit of the next token must be finite, got {scores[best]}")
    if not sampling.temperature:
        return int(best)
    return int(random.choice(len(scores), p=probabilities(scores, sampling)))


def _penalised(logits: Scores, seen: Sequence[int], penalty: float) -> Scores:
    if penalty == 1.0 or not seen:
        return logits
    tokens = np.unique(np.asarray(seen))
    scores = logits.copy()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scores[tokens] = np.where(scores[tokens] < 0, scores[tokens] * penalty, scores[tokens] / penalty)
    return scores


def probabilities(scores: Scores, sampling: Sampling) -> NDArray[np.float64]:
    """Return the probability of each token, [vocabulary]; temperature must not be 0."""
    scaled = scores.astype(np.float64)
    scaled = (scaled - scaled.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    if sampling.top_p is not None and sampling.top_p < 1:
        order = np.argsort(scaled, kind="stable")  # the least likely first
        scaled[order[:-1][_softmax(scaled[order]).cumsum()[:-1] <= 1 - sampling.top_p]] = -np.inf
    return _softmax(scaled)


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(scores - scores.max())
    result: NDArray[np.float64] = exponentials / exponentials.sum()
    return result
