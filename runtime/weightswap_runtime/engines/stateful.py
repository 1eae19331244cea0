"""Buffers that calls mutate: one call at a time, back to their initial values, whole after a fork."""

from __future__ import annotations

from threading import RLock

from weightswap_runtime.forks import renew_in_children


class Stateful:
    """What engines that are bound to an arena have in common about state."""

    def __init__(self, *, has_state: bool) -> None:
        self.has_state = has_state  # whether calls leave traces
        self._state_lock = RLock()
        renew_in_children(self)

    def _renew(self) -> None:
        """After a fork: what a call of another thread was doing to the state is undone."""
        free = self._state_lock.acquire(blocking=False)
        self._state_lock = RLock()
        if not free:
            self.reset_state()

    def reset_state(self) -> None:
        """Copy the initial values over the state, in place."""
        with self._state_lock:
            self._reset()

    def _reset(self) -> None:
        raise NotImplementedError
