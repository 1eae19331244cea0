"""Turns of tests, in several processes, that need one thing of the machine for themselves."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(name: str) -> Iterator[None]:
    """A block that no other process of this machine is in at the same time."""
    with (Path(tempfile.gettempdir()) / f"weightswap-tests-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
