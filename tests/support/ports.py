"""Free ports of this machine."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

# below those that the system gives to anybody, and others for each process of a run
_FIRST, _LAST = 12_000, 30_000
_numbers = count(os.getpid() * 37)


def free_port() -> int:
    """Return a port on which nothing listens now, and which no other test of this run gets."""
    for number in _numbers:
        port = _FIRST + number % (_LAST - _FIRST)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError
