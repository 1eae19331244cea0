"""Where sets of weights are kept that serve on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena
from weightswap_runtime.memory.device import Device
from weightswap_runtime.memory.host import StagedIn
from weightswap_runtime.memory.patch import HostPatch, Patch, Span, in_chunks
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .arena import Copy, DeviceArena, Region
from .ring import BUFFER_BYTES, Ring

T = TypeVar("T")
RESERVE = 256 << 20  # bytes that a staging leaves for calls at least


class DeviceMemory:
    """A device's memory, and that of the host beside it.

    mode: where a commit in place finds its weights. "device": there; "host": in ordinary memory of the host; "auto": on
    the device if there is room, else on the host. Sets are never page-locked: the driver takes seconds for that, in
    which calls wait. They go through the ring's buffers.
    """

    def __init__(self, device: Device, ring: Ring, mode: str) -> None:
        """Raises OutOfMemory where nothing can be page-locked."""
        self._device = device
        self._ring = ring
        self._mode = mode
        self.stages_on_host = mode != "device"
        try:
            ring.allocate()
        except MemoryError as error:
            raise OutOfMemory(
                f"{device.name}: no memory of the host can be page-locked, through which weights go there ({error})"
            ) from error

    def arena(self, layout: ArenaLayout) -> DeviceArena:
        try:
            return DeviceArena(self._device, layout, self._ring, serves=True)
        except MemoryError as error:
            raise self._no_memory(layout.nbytes, "") from error

    def staging(self, layout: ArenaLayout) -> tuple[Arena, StagedIn]:
        """On the device if that is wanted and has room, else on the host. Raises OutOfMemory."""
        found, staged_in = self._on_device(
            layout.nbytes, lambda: DeviceArena(self._device, layout, self._ring, serves=False)
        )
        return found or HostArena(layout), staged_in

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        """On the device if that is wanted and has room, else where it is. Raises OutOfMemory."""
        found, staged_in = self._on_device(
            patch.nbytes, lambda: DevicePatch.of(patch, Region(self._device, patch.nbytes, self._ring), workers)
        )
        return found or patch, staged_in

    def _on_device(self, nbytes: int, make: Callable[[], T]) -> tuple[T | None, StagedIn]:
        """What was made on the device, or None and why not."""
        if self._mode == "host":
            return None, StagedIn("host", 'staging="host" was asked for')
        free = self._device.free_bytes()
        numbers = f"{self._device.name} has {free} bytes free, the staging takes {nbytes}"
        reserve = max(RESERVE, self._device.needed_by_calls())
        if self._mode == "auto" and free < nbytes + reserve:
            return None, StagedIn("host", f"{numbers}, and {reserve} are left for calls")
        if free < nbytes:  # torch would give back all that it keeps, and the device wait for that, before it refused
            raise self._no_memory(nbytes, 'Load with staging="host", which stages in host memory.')
        try:
            return make(), StagedIn("device", numbers)
        except MemoryError as error:
            if self._mode == "device":
                raise self._no_memory(
                    nbytes, 'Load with staging="host" or "auto", which stage in host memory.'
                ) from error
            return None, StagedIn("host", f"{numbers}, but it cannot be allocated ({error})")

    def _no_memory(self, nbytes: int, advice: str) -> OutOfMemory:
        return OutOfMemory(
            f"{self._device.name}: {nbytes} bytes are needed, {self._device.free_bytes()} are free. {advice}".rstrip()
        )


class DevicePatch(Patch):
    """Spans whose bytes are on the device of the arena that they belong to."""

    def __init__(self, region: Region, runs: Iterable[Copy]) -> None:
        self._region = region
        self._runs = tuple(runs)
        self.nbytes = sum(run.nbytes for run in self._runs)

    @classmethod
    def of(cls, patch: HostPatch, region: Region, workers: WorkerThreads) -> DevicePatch:
        """Copy a patch to a region of its size, through the ring. What lies side by side is one run."""
        runs: list[Copy] = []
        parts: list[Span] = []  # by their offsets in the region
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

    def write_to(self, arena: Arena, workers: WorkerThreads) -> None:
        """Copy every span to its offset; on the device the host waits for nothing."""
        if isinstance(arena, DeviceArena):
            arena.take_from(self._region, self._runs)
            return
        for offset, begin, nbytes in self._runs:
            arena.write(offset, self._region.fetch(begin, nbytes))

    def lay_over(self, arena: Arena, workers: WorkerThreads, job: Job) -> None:
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
        return HostPatch(Span(offset, arena.fetch(offset, nbytes)) for offset, _, nbytes in self._runs)
