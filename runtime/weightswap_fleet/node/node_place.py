"""The place of the desired state, with the time since a node has read it."""

from __future__ import annotations

from collections.abc import Callable

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.desired.place import DesiredPlace, Source
from weightswap_runtime.sources.byte_source import Check

SILENT = 30.0  # seconds without a read of the place, after which a node reports it


class NodePlace(DesiredPlace):
    """A place that knows the time since its last read, even while a read hangs."""

    def __init__(self, place: Source, clock: Callable[[], float]) -> None:
        super().__init__(place)
        self._clock = clock
        self._read_at = clock()

    def read(self, check: Check | None = None) -> DesiredState:
        state = super().read(check)
        self._read_at = self._clock()
        return state

    @property
    def unread(self) -> float:
        """Seconds since the last read."""
        return self._clock() - self._read_at

    def silence(self, interval: float) -> str:
        """Return a sentence if the last read is too long ago, else "". interval: seconds between two reads."""
        most = max(SILENT, 3 * interval)
        return f"{self.where}: has not been read for more than {most:g} s" if self.unread > most else ""
