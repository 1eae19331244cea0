"""Changes of an arena that wait for their commit on its device."""

from __future__ import annotations

from collections.abc import Iterable

from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.patch import HostPatch, Patch, Span, in_chunks
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.workers import Workers

from .arena import Copy, DeviceArena, Region
from .ring import BUFFER_BYTES


class DevicePatch(Patch):
    """Spans whose bytes are on the device of the arena that they belong to."""

    def __init__(self, region: Region, runs: Iterable[Copy]) -> None:
        self._region = region
        self._runs = tuple(runs)

    @classmethod
    def of(cls, patch: HostPatch, region: Region, workers: Workers) -> DevicePatch:
        """Copy a patch to a region of its size, through the ring. What lies side by side is one run."""
        runs: list[Copy] = []
        parts: list[Span] = []  # by their places in the region
        begin = 0
        for offset, data in sorted(patch.spans, key=lambda span: span.offset):
            parts.append(Span(begin, data))
            if runs and runs[-1].offset + runs[-1].nbytes == offset:
                runs[-1] = runs[-1]._replace(nbytes=runs[-1].nbytes + len(data))
            else:
                runs.append(Copy(offset, begin, len(data)))
            begin += len(data)
        with region.writing():
            workers.run_all(lambda part: region.write(part.offset, part.data), in_chunks(parts, BUFFER_BYTES))
        region.synchronize()
        return cls(region, runs)

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def write_to(self, arena: Arena, workers: Workers) -> None:
        """Copy every span to its place; on the device the host waits for nothing."""
        if isinstance(arena, DeviceArena):
            arena.take_from(self._region, self._runs)
            return
        for offset, begin, nbytes in self._runs:
            arena.write(offset, self._region.fetch(begin, nbytes))

    def lay_over(self, arena: Arena, workers: Workers, job: Job) -> None:
        """As `write_to`, at the job's pace. Raises StageCancelled, with the copy half done."""
        job.begin("copying", self.nbytes)
        for offset, begin, nbytes in self._runs:
            for start, stop in job.steps(0, nbytes):
                DevicePatch(self._region, [Copy(offset + start, begin + start, stop - start)]).write_to(arena, workers)

    def undo(self, arena: Arena) -> DevicePatch:
        """What lies in the arena where this would be written, on the device. Raises MemoryError."""
        assert isinstance(arena, DeviceArena)
        region = arena.beside(self.nbytes)
        with region.writing():
            region.take_from(arena, [Copy(begin, offset, nbytes) for offset, begin, nbytes in self._runs])
        return DevicePatch(region, self._runs)

    def saved(self, arena: Arena) -> HostPatch:
        """As `undo`, in host memory."""
        return HostPatch(Span(offset, arena.fetch(offset, nbytes)) for offset, _, nbytes in self._runs)
