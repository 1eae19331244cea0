"""Changes of an arena that wait for their commit on its device."""

from __future__ import annotations

from collections.abc import Iterable

from weightswap_runtime.arena import Arena
from weightswap_runtime.job import Job
from weightswap_runtime.patches import HostPatch, Patch
from weightswap_runtime.workers import Workers

from .arena import DeviceArena, Region, Run


class DevicePatch(Patch):
    """Spans whose bytes are on the device of the arena that they belong to."""

    def __init__(self, region: Region, runs: Iterable[Run]) -> None:
        self._region = region
        self._runs = tuple(runs)

    @classmethod
    def of(cls, patch: HostPatch, region: Region) -> DevicePatch:
        """Copy a patch to a region of its size, through the ring."""
        runs, begin = [], 0
        with region.writing():
            for offset, data in patch.spans:
                region.write(begin, data)
                runs.append(Run(offset, begin, len(data)))
                begin += len(data)
        return cls(region, runs)

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def write_to(self, arena: Arena, workers: Workers) -> None:
        """Copy every span to its place; the host waits for nothing."""
        assert isinstance(arena, DeviceArena)
        for offset, begin, nbytes in self._runs:
            arena.take_from(offset, self._region, begin, nbytes)

    def lay_over(self, arena: Arena, workers: Workers, job: Job) -> None:
        """As `write_to`. Raises StageCancelled before it begins."""
        job.begin("copying", self.nbytes)
        self.write_to(arena, workers)
        job.advance(self.nbytes)

    def undo(self, arena: Arena) -> DevicePatch:
        """What lies in the arena where this would be written, on the device. Raises MemoryError."""
        assert isinstance(arena, DeviceArena)
        region = arena.beside(self.nbytes)
        with region.writing():
            for offset, begin, nbytes in self._runs:
                region.take_from(begin, arena, offset, nbytes)
        return DevicePatch(region, self._runs)
