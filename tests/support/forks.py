"""Checks in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_a_child(work: Callable[[], bool]) -> bool:
    """Return True if `work` returns True in a forked child within a minute."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
