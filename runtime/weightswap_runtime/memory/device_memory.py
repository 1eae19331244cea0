"""Which device serves, and where a set of weights waits for its commit: in the device's memory or in the host's.

While calls wait, a copy within the device is many times as fast as one from the host. But calls need memory of the
device, too, and fail where a staging has left them none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import OutOfMemory, Unsupported
from weightswap_runtime.jobs import Job
from weightswap_runtime.native import as_bytes
from weightswap_runtime.threads import WorkerThreads

from .arena import Arena, ArenaLayout, Copy, HostArena, HostPatch, Patch, Rows
from .device_arena import BUFFER_BYTES, DeviceArena, Region, Ring

if TYPE_CHECKING:
    from .torch_device import Accelerator

T = TypeVar("T")
StagingMode = Literal["auto", "device", "host"]
HOST = "cpu"
SPARE = 4  # buffers of a ring that are being copied, beside those that threads fill
RESERVE = 256 << 20  # bytes that a staging at least leaves for calls
# What to do about an OutOfMemory, by what the memory was for
FOR_TWO = 'Free memory, or load with residency="single", which holds one set of weights instead of two.'
FOR_ONE = "Free memory: the model holds only one set of weights."
FOR_STAGING = "Free memory, or swap a delta, which takes memory only for what changes."
FOR_PREVIOUS = "Free memory, or load without keep_previous, which holds the previous weights in memory."


class StagedIn(NamedTuple):
    """The place where a set of weights waits for its commit."""

    kind: str  # "in place", "device" or "host"
    reason: str


IN_PLACE = StagedIn("in place", "the arena itself serves after the commit")
_ON_THE_HOST = StagedIn("host", "the weights serve there")


@contextmanager
def advising(text: str) -> Iterator[None]:
    """Append advice to an OutOfMemory that the block raises."""
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(f"{error} {text}") from error


def device_name(device: object) -> str:
    """Return the device's name with its index, such as "cuda:0" for "cuda". Raises Unsupported and MissingExtra."""
    is_torch = (type(device).__module__, type(device).__name__) == ("torch", "device")
    if not isinstance(device, str) and not is_torch:
        raise Unsupported(f'device={device!r}: expected a string such as "cpu", "cuda" or "cuda:1"')
    if str(device) == HOST:
        return HOST
    from .torch_device import open_accelerator  # needs torch

    return open_accelerator(str(device)).name


class HostMemory:
    """The memory of this process. The methods of both kinds raise OutOfMemory."""

    stages_on_host = False  # whether weights for another device may wait there for their commit

    def arena(self, layout: ArenaLayout) -> HostArena:
        """Allocate an arena that serves."""
        return HostArena(layout)

    def staging(self, layout: ArenaLayout) -> tuple[HostArena, StagedIn]:
        """Allocate an arena whose weights a commit can copy to the serving arena as fast as possible."""
        return HostArena(layout), _ON_THE_HOST

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        """Return a patch of a serving arena, in memory from which it is written as fast as possible."""
        return patch, _ON_THE_HOST


def open_memory(device: str, staging: str) -> Memory:
    """Return a device's memory. staging: where single residency stages. Raises Unsupported, and MissingExtra."""
    if staging not in get_args(StagingMode):
        raise Unsupported(f"staging={staging!r}: expected {', '.join(map(repr, get_args(StagingMode)))}")
    if device == HOST:
        if staging == "device":
            raise Unsupported('staging="device" is for accelerators; on the CPU weights are staged in host memory')
        return HostMemory()
    from .torch_device import open_accelerator  # needs torch

    accelerator = open_accelerator(device)
    return DeviceMemory(accelerator, ring_of(accelerator), staging)


def ring_of(accelerator: Accelerator) -> Ring:
    """Return the page-locked buffers that all models on a device share."""
    with _opening:
        ring = _rings.get(accelerator.index)
        if ring is None:
            # the model's would keep its streams for ever
            owner = type(accelerator)(accelerator.torch)
            count = WorkerThreads().threads + SPARE
            ring = _rings[owner.index] = Ring(owner, count, urgent=Ring(owner, count))
        return ring


_opening = Lock()
_rings: dict[int, Ring] = {}


class DeviceMemory:
    """A device's memory, with that of the host.

    Whole sets are never page-locked, as the driver takes seconds for that, in which calls wait; they are copied through
    the ring's buffers.
    """

    def __init__(self, device: Accelerator, ring: Ring, mode: str) -> None:
        """mode: where single residency stages weights: "auto" on the device if there is room, else on the host.

        Raises OutOfMemory if no memory can be page-locked.
        """
        self._device = device
        self._ring = ring
        self._mode = mode
        self.stages_on_host = mode != "device"
        try:
            ring.allocate()
        except MemoryError as error:
            raise OutOfMemory(
                f"{device.name}: cannot page-lock host memory, through which weights reach the device ({error})"
            ) from error

    def arena(self, layout: ArenaLayout) -> DeviceArena:
        try:
            return DeviceArena(self._device, layout, self._ring, serves=True)
        except MemoryError as error:
            raise self._no_memory(layout.nbytes, "") from error

    def staging(self, layout: ArenaLayout) -> tuple[Arena, StagedIn]:
        """Allocate on the device if the mode allows it and there is room, else on the host. Raises OutOfMemory."""
        arena, staged_in = self._on_device(
            layout.nbytes, lambda: DeviceArena(self._device, layout, self._ring, serves=False)
        )
        return arena or HostArena(layout), staged_in

    def staged_patch(self, patch: HostPatch, workers: WorkerThreads) -> tuple[Patch, StagedIn]:
        """Copy the patch to the device if the mode allows it and there is room, else return it. Raises OutOfMemory."""
        on_device, staged_in = self._on_device(
            patch.nbytes, lambda: DevicePatch.of(patch, lambda size: Region(self._device, size, self._ring), workers)
        )
        return on_device or patch, staged_in

    def _on_device(self, nbytes: int, make: Callable[[], T]) -> tuple[T | None, StagedIn]:
        """Return the result of `make` on the device, or None, and the reason."""
        if self._mode == "host":
            return None, StagedIn("host", 'staging="host" was asked for')
        free = self._device.free_bytes()
        numbers = f"{self._device.name} has {free} bytes free, the staging takes {nbytes}"
        reserve = max(RESERVE, self._device.needed_by_calls())
        if self._mode == "auto" and free < nbytes + reserve:
            return None, StagedIn("host", f"{numbers}, and {reserve} are left for calls")
        if free < nbytes:  # before it fails, torch would free its cache, for which the whole device waits
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


Memory = HostMemory | DeviceMemory


class DevicePatch(Patch):
    """Ranges whose new bytes are on the arena's device, as runs to copy, or as rows that one operation writes."""

    def __init__(self, region: Region, nbytes: int, runs: Sequence[Copy], rows: Sequence[Rows]) -> None:
        self._region, self._runs, self._rows = region, tuple(runs), tuple(rows)
        self.nbytes = nbytes

    @classmethod
    def of(cls, patch: HostPatch, make: Callable[[int], Region], workers: WorkerThreads) -> DevicePatch:
        """Copy a patch to a region, which `make` allocates, through the ring. Adjacent ranges become one run."""
        runs: list[Copy] = []
        rows: list[Rows] = []
        uploads: list[tuple[int, memoryview]] = []
        end = 0
        for part in patch.parts:
            uploads.append((end, part.data))
            if (found := Rows.of(part, end)) is None:
                runs += _runs_of(part, end)
                end += part.nbytes
            else:
                uploads.append((found.numbers, as_bytes(part.rows(found.width))))
                rows.append(found)
                end = found.end
            end += -end % 8  # numbers are read as such
        region = make(end)

        def upload(piece: tuple[int, memoryview]) -> None:
            region.write(*piece)

        pieces = (
            (at + start, data[start : start + BUFFER_BYTES])
            for at, data in uploads
            for start in range(0, len(data), BUFFER_BYTES)
        )
        with region.writing():
            workers.run_all(upload, pieces)
        region.synchronize()
        return cls(region, patch.nbytes, runs, rows)

    def write_to(self, arena: Arena, workers: WorkerThreads, job: Job | None = None) -> None:
        """Write every range to its place. The host does not wait if the arena is on the device."""
        runs: Iterable[Copy] = self._runs
        if job is not None:
            job.begin("copying", self.nbytes)
            runs = (
                Copy(run.offset + start, run.begin + start, stop - start)
                for run in self._runs
                for start, stop in job.steps(0, run.nbytes)
            )
        if isinstance(arena, DeviceArena):
            arena.copy_from(self._region, runs)
            for rows in self._rows:
                if job is not None:  # the rate is kept on average: one operation writes all of them
                    deque(job.steps(0, rows.width * rows.total), maxlen=0)
                arena.scatter_rows(self._region, [rows])
            return
        for offset, begin, nbytes in runs:
            arena.write(offset, self._region.fetch(begin, nbytes))
        for rows in self._rows:
            numbers = np.frombuffer(self._region.fetch(rows.numbers, 8 * rows.total), np.int64)
            data = self._region.fetch(rows.begin, rows.width * rows.total)
            arena.scatter(ByteRanges.of_rows(numbers, rows.width, data).moved(rows.base))

    def undo(self, arena: Arena) -> DevicePatch:
        """Copy what this patch would overwrite in the arena, on the device. Raises MemoryError."""
        assert isinstance(arena, DeviceArena)
        region = arena.beside(self._region.buffer.nbytes)
        with region.writing():
            region.copy_from(self._region, [Copy(rows.numbers, rows.numbers, 8 * rows.total) for rows in self._rows])
            region.copy_from(arena, [Copy(begin, offset, nbytes) for offset, begin, nbytes in self._runs])
            region.gather_rows(arena, self._rows)
        return DevicePatch(region, self.nbytes, self._runs, self._rows)

    def saved(self, arena: Arena) -> HostPatch:
        undo = self.undo(arena)
        parts = []
        for offset, begin, nbytes in self._runs:
            place = np.array([[offset, offset + nbytes]], np.int64)
            parts.append(ByteRanges.of(place, undo._region.fetch(begin, nbytes)))
        for rows in self._rows:
            numbers = np.frombuffer(undo._region.fetch(rows.numbers, 8 * rows.total), np.int64)
            data = undo._region.fetch(rows.begin, rows.width * rows.total)
            parts.append(ByteRanges.of_rows(numbers, rows.width, data).moved(rows.base))
        return HostPatch(parts)


def _runs_of(part: ByteRanges, start: int) -> list[Copy]:
    """Return the copies of a part whose bytes begin at `start` of a region."""
    firsts = np.flatnonzero(np.append(-1, part.ends[:-1]) != part.begins)
    begins, ends = part.begins[firsts].tolist(), part.ends[np.append(firsts[1:] - 1, -1)].tolist()
    places = (start + part.offsets[firsts]).tolist()
    return [Copy(begin, place, end - begin) for begin, place, end in zip(begins, places, ends, strict=True)]
