"""Memory for what is computed of a block, used again for the next one: fresh memory would cost more than the work."""

from __future__ import annotations

import threading
from typing import Literal

import numpy as np

from .scaling import Floats

Use = Literal["before", "after", "gaps", "spare"]


class Workspace(threading.local):
    """One array for each use; every thread has its own. What was taken before for the same use is overwritten."""

    def __init__(self) -> None:
        self._arrays: dict[Use, Floats] = {}

    def take(self, use: Use, count: int) -> Floats:
        """An array of `count` 64-bit floats, of any value."""
        if use not in self._arrays or len(self._arrays[use]) < count:
            self._arrays[use] = np.empty(count)
        return self._arrays[use][:count]


WORKSPACE = Workspace()
