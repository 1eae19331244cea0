"""Memory fences across processes: membarrier(2), called by ctypes as Python has no function for it.

If the kernel refuses it (seccomp, gVisor), the slower command that needs no registration is tried, and then a pause
that is far longer than the time for which a processor may delay a store.
"""

from __future__ import annotations

import ctypes
import platform
import time
from functools import cache

_NUMBER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_GLOBAL, _GLOBAL_EXPEDITED, _REGISTER = 1, 2, 4
_PAUSE = 0.05  # seconds


def _membarrier(command: int) -> bool:
    return _NUMBER is not None and ctypes.CDLL(None, use_errno=True).syscall(_NUMBER, command, 0, 0) == 0


@cache
def has_fences() -> bool:
    """Register this process, once; return whether the fast fence reaches it."""
    return _membarrier(_REGISTER)


def fence(unregistered: bool) -> None:
    """Make the earlier stores of all processes visible to all. `unregistered`: the fast fence would miss a process."""
    if not (not unregistered and has_fences() and _membarrier(_GLOBAL_EXPEDITED)) and not _membarrier(_GLOBAL):
        time.sleep(_PAUSE)
