"""Retries with exponential backoff, a limited number of times."""

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
MOST_SECONDS = 120.0  # time from the start of the first attempt in which others may begin
_jitter = random.Random()  # separate from the global generator, which a training may have seeded


async def persist(attempt: Callable[[], Awaitable[T]], where: Callable[[], str]) -> T:
    """Await `attempt()`, and retry while it raises Transient. Raises WeightFileError when the retries are used up."""
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
    """Return the pause in seconds: exponential, with jitter, so that clients do not retry all at once."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (number - 1)) * _jitter.uniform(0.5, 1.0)
