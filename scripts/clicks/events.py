"""Clicks in the shape of Criteo's: 13 numbers, 26 categories with Zipf's ids, and tastes that drift with time."""

from __future__ import annotations

from typing import NamedTuple

import torch

NUMBERS = 13
SIZES = (600_000, 400_000, 240_000, 180_000, 120_000, 80_000, 60_000, 40_000, 24_000, 16_000, 10_000, 6_000, 4_000)
SIZES += (2_400, 1_600, 1_000, 600, 400, 200, 120, 80, 48, 32, 20, 12, 8)
"""Ids of each category."""
FORGETTING = 60.0  # seconds after which a taste agrees with what it was by exp(-1/2)
_ZIPF = 1.2
_SPREAD = 0.45  # of a taste, in the logit of a click
_WORLD = 7  # the seed of the tastes, which all processes share


class Events(NamedTuple):
    """A batch of events; clicks are 0 or 1."""

    numbers: torch.Tensor
    ids: torch.Tensor
    clicks: torch.Tensor


class Clicks:
    """The source of events; each seed has its own, of the same tastes."""

    def __init__(self, seed: int) -> None:
        world = torch.Generator().manual_seed(_WORLD)
        count = sum(SIZES)
        self._phase = torch.rand(count, generator=world) * 2 * torch.pi
        # random speeds: two moments `age` apart agree by exp(-(age / FORGETTING)**2 / 2), and never come back
        self._speed = torch.randn(count, generator=world) / FORGETTING
        self._weights = torch.randn(NUMBERS, generator=world) * 0.1
        self._sizes = torch.tensor(SIZES)
        self._starts = self._sizes.cumsum(0) - self._sizes
        self._own = torch.Generator().manual_seed(seed)

    def draw(self, count: int, now: float) -> Events:
        """Draw events of the moment `now`: seconds since the demo began, as float32 has few digits."""
        numbers = torch.randn(count, NUMBERS, generator=self._own)
        uniform = torch.rand(count, len(SIZES), generator=self._own)
        # the inverse of a continuous Zipf distribution on [1, size + 1)
        power = 1 - _ZIPF
        ids = (1 + uniform * ((self._sizes + 1) ** power - 1)) ** (1 / power)
        ids = torch.minimum(ids.long() - 1, self._sizes - 1)
        rows = ids + self._starts
        tastes = _SPREAD * torch.cos(self._phase[rows] + self._speed[rows] * now)
        logits = tastes.sum(1) + numbers @ self._weights - 1
        clicks = torch.rand(count, generator=self._own) < logits.sigmoid()
        return Events(numbers, ids, clicks.float())
