"""Renewal of locks in forked children, where a thread that held one at the fork no longer exists to release it."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object whose locks are replaced in a forked child."""

    def _renew(self) -> None: ...


_known: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Call `thing._renew()` in every child that is forked from now on, before anything else runs there."""
    _known.add(thing)


def _after_fork() -> None:
    for thing in list(_known):
        thing._renew()


os.register_at_fork(after_in_child=_after_fork)
