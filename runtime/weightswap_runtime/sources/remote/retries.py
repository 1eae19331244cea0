"""Doing it again: with longer and longer pauses, a limited number of times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from weightswap_runtime.errors import WeightFileError

from .transport import Transient

T = TypeVar("T")
ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds
MOST_SECONDS = 120.0  # after the first attempt has begun, no other begins
_jitter = random.Random()  # a training's own random numbers stay as they were seeded


async def persist(attempt: Callable[[], Awaitable[T]], where: Callable[[], str]) -> T:
    """Await `attempt()` until it raises nothing transient. Raises WeightFileError when that takes too long."""
    start = time.monotonic()
    for number in range(1, ATTEMPTS + 1):
        try:
            return await attempt()
        except Transient as error:
            pause = max(_backoff(number), error.after)
            reason = str(error)
        if number == ATTEMPTS or time.monotonic() + pause > start + MOST_SECONDS:
            break
        await asyncio.sleep(pause)
    raise WeightFileError(
        f"{where()}, after {number} attempt(s) ({reason}). Check the server and the network, then stage again."
    )


def _backoff(number: int) -> float:
    """Exponential, with jitter, so that servers that failed together do not come back together."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (number - 1)) * _jitter.uniform(0.5, 1.0)
