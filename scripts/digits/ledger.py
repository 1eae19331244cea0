"""Results of the run so far, by generation."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from answers import Answer
from checking import Verdict


class Sample(NamedTuple):
    """Checked answer. `started` is in seconds of the monotonic clock, `seconds` is the latency."""

    started: float
    seconds: float
    generation: int
    images: int
    hits: int


class Latency(NamedTuple):
    """Percentiles in milliseconds; NaN if there was no answer."""

    p50: float
    p99: float


def latency(samples: list[Sample]) -> Latency:
    """Return the latency percentiles of some answers."""
    if not samples:
        return Latency(float("nan"), float("nan"))
    p50, p99 = np.percentile([sample.seconds * 1e3 for sample in samples], [50, 99])
    return Latency(float(p50), float(p99))


def accuracy(samples: list[Sample]) -> float:
    """Return the share of digits that some answers recognised, 0 to 1."""
    return sum(sample.hits for sample in samples) / max(1, sum(sample.images for sample in samples))


@dataclass
class Generation:
    """Commit, and the answers that claim to come from it. Times in seconds, `at` of the monotonic clock."""

    generation: int
    weights_id: str
    version: int  # the epoch, or the step
    rolled_back: bool
    at: float
    seconds_staged: float
    seconds_paused: float
    samples: list[Sample] = field(default_factory=list)
    wrong: int = 0
    mixed: int = 0


@dataclass
class Refusal:
    """Weight file that was refused, and whether serving continued unchanged."""

    at: float
    file: str
    error: str
    message: str
    generation: int
    weights_id: str
    unchanged: bool


class Send(NamedTuple):
    """Weights that a trainer was told are served. Times in seconds."""

    step: int
    generation: int
    weights_id: str
    seconds_held: float  # for which the training stood still
    seconds_until_served: float


@dataclass
class Sends:
    """What trainers that send from memory were told, and the end of the first. Times are of the monotonic clock."""

    last_step: int
    halted_at: int = -1  # the step
    resumed_at: int = -1
    killed: float = 0.0
    resumed: float = 0.0
    served: list[Send] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)  # `step`, `error`, `message` of each


@dataclass
class Ledger:
    """All observations. `strays` are answers that claim a generation that was never committed."""

    unit: str = "epoch"  # what versions count
    precision: str = "bit for bit"  # of the comparison with the eager model
    generations: list[Generation] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    strays: int = 0

    def add(self, answer: Answer, verdict: Verdict, hits: int) -> None:
        if answer.generation >= len(self.generations):
            self.strays += 1
            return
        generation = self.generations[answer.generation]
        sample = Sample(answer.started, answer.seconds, answer.generation, len(answer.indices), hits)
        generation.samples.append(sample)
        generation.wrong += verdict is Verdict.WRONG
        generation.mixed += verdict is Verdict.MIXED

    @property
    def samples(self) -> list[Sample]:
        """All answers, ordered by the time of their requests."""
        return sorted(sample for generation in self.generations for sample in generation.samples)

    @property
    def wrong(self) -> int:
        return self.strays + sum(generation.wrong for generation in self.generations)

    @property
    def mixed(self) -> int:
        return sum(generation.mixed for generation in self.generations)

    @property
    def stale(self) -> int:
        """The number of answers from weights that had been replaced before they were asked for."""
        begins = [generation.at for generation in self.generations]
        return sum(bisect_left(begins, sample.started) - 1 > sample.generation for sample in self.samples)

    def answers_between(self, start: float, end: float) -> int:
        return sum(start < sample.started < end for sample in self.samples)

    def answers_after(self, refusal: Refusal) -> int:
        """Return how many requests of the refusal's generation began after it."""
        return sum(sample.started > refusal.at for sample in self.generations[refusal.generation].samples)

    def longest_silence(self) -> float:
        """Return the longest time without an answer, in seconds."""
        ends = np.sort([sample.started + sample.seconds for sample in self.samples])
        return float(np.diff(ends).max(initial=0.0))
