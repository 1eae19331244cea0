"""The replicas of a node: each has a slot of the control page until it ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from select import POLLIN, poll
from threading import Lock

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.shared.control import Control


class Seats:
    """Slots of replicas, with pidfds that show their ends. Every method may be called from any thread."""

    def __init__(self, control: Control, belongs: Callable[[int], bool]) -> None:
        """Takes over the slots of living replicas, and empties those of dead ones, whose pid may be in use again.

        belongs: returns True if a process has this memory.
        """
        self._control = control
        self._lock = Lock()
        self._taken: dict[int, tuple[int, int]] = {}  # slot -> process, pidfd
        for slot, pid in enumerate(control.processes):
            if pid and not (belongs(pid) and self._watch(slot, pid)):
                control.empty_slot(slot)

    def take(self, pid: int) -> int:
        """Give a process a slot. Raises Unsupported if all are taken."""
        self.sweep()
        with self._lock:
            free = next((slot for slot in range(self._control.workers) if slot not in self._taken), None)
            if free is None:
                raise Unsupported(f"at most {self._control.workers} replicas on one node can share weights")
            if not self._watch(free, pid):
                raise Unsupported(f"no process {pid} here; a replica and its node's keeper must see each other")
            return free

    def _watch(self, slot: int, pid: int) -> bool:
        try:
            self._taken[slot] = pid, os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        return True

    def sweep(self) -> None:
        """Empty the slots of replicas that have ended."""
        with self._lock:
            for slot, (_, descriptor) in list(self._taken.items()):
                if _has_ended(descriptor):
                    self._control.empty_slot(slot)
                    del self._taken[slot]
                    os.close(descriptor)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of replicas, in the order of their slots."""
        with self._lock:
            return tuple(pid for _, (pid, _) in sorted(self._taken.items()))

    def close(self) -> None:
        with self._lock:
            for _, descriptor in self._taken.values():
                os.close(descriptor)
            self._taken.clear()


def _has_ended(descriptor: int) -> bool:
    watched = poll()
    watched.register(descriptor, POLLIN)
    return bool(watched.poll(0))
