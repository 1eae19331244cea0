"""The place of the desired state, as a node reads it."""

from __future__ import annotations

from collections.abc import Callable

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.desired.place import DesiredPlace, Source
from weightswap_runtime.sources.byte_source import Check

SILENT = 30.0  # seconds without a word from the place, after which a node says so


class NodePlace(DesiredPlace):
    """A place that knows for how long it was not read: also while an answer is waited for, which may never come."""

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
        """Seconds since it was read."""
        return self._clock() - self._read_at

    def silence(self, interval: float) -> str:
        """That it was not read for too long; else empty. interval: seconds between two looks."""
        most = max(SILENT, 3 * interval)
        return f"{self.where}: was not read for more than {most:g} s" if self.unread > most else ""
