"""Where sets of weights are kept that serve on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena
from weightswap_runtime.memory.device import Device
from weightswap_runtime.memory.host import StagedIn
from weightswap_runtime.memory.patch import HostPatch, Patch

from .arena import DeviceArena, LockedArena, Region
from .patch import DevicePatch
from .ring import Ring

T = TypeVar("T")
RESERVE = 256 << 20  # bytes that a staging leaves for calls


class DeviceMemory:
    """A device's memory, and page-locked memory beside it.

    mode: where a commit in place finds its weights. "device": there; "host": in page-locked memory, or in any where
    none can be had; "auto": on the device if there is room, else as "host".
    """

    def __init__(self, device: Device, ring: Ring, mode: str) -> None:
        self._device = device
        self._ring = ring
        self._mode = mode

    @property
    def stages_on_host(self) -> bool:
        """Whether weights may wait there for their commit."""
        return self._mode != "device"

    def arena(self, layout: ArenaLayout) -> DeviceArena:
        """Raises OutOfMemory."""
        try:
            return DeviceArena(self._device, layout, self._ring, serves=True)
        except MemoryError as error:
            raise self._no_memory(layout.nbytes, "") from error

    def staging(self, layout: ArenaLayout) -> tuple[Arena, StagedIn]:
        """On the device if that is wanted and has room, else in page-locked memory, else in any. Raises OutOfMemory."""
        found, staged_in = self._on_device(
            layout.nbytes, lambda: DeviceArena(self._device, layout, self._ring, serves=False)
        )
        if found is not None:
            return found, staged_in
        try:
            return LockedArena(self._device, layout), staged_in
        except MemoryError as error:
            why = f"{staged_in.reason}; no host memory can be page-locked ({error})"
            return HostArena(layout), StagedIn("host", why)

    def staged_patch(self, patch: HostPatch) -> tuple[Patch, StagedIn]:
        """On the device if that is wanted and has room, else where it is. Raises OutOfMemory."""
        found, staged_in = self._on_device(
            patch.nbytes, lambda: DevicePatch.of(patch, Region(self._device, patch.nbytes, self._ring))
        )
        return (patch, StagedIn("host", staged_in.reason)) if found is None else (found, staged_in)

    def kept(self, layout: ArenaLayout) -> HostArena:
        """In page-locked memory, if there is any. Raises OutOfMemory."""
        try:
            return LockedArena(self._device, layout)
        except MemoryError:
            return HostArena(layout)

    def _on_device(self, nbytes: int, make: Callable[[], T]) -> tuple[T | None, StagedIn]:
        """What was made on the device, or None and why not."""
        if self._mode == "host":
            return None, StagedIn("pinned", 'staging="host" was asked for')
        free = self._device.free_bytes()
        numbers = f"{self._device.name} has {free} bytes free, the staging takes {nbytes}"
        if self._mode == "auto" and free < nbytes + RESERVE:
            return None, StagedIn("pinned", f"{numbers}, and {RESERVE} are left for calls")
        if free < nbytes:  # torch would give back all that it keeps, and the device wait for that, before it refused
            raise self._no_memory(nbytes, 'Load with staging="host", which stages in host memory.')
        try:
            return make(), StagedIn("device", numbers)
        except MemoryError as error:
            if self._mode == "device":
                raise self._no_memory(
                    nbytes, 'Load with staging="host" or "auto", which stage in host memory.'
                ) from error
            return None, StagedIn("pinned", f"{numbers}, but it cannot be allocated ({error})")

    def _no_memory(self, nbytes: int, advice: str) -> OutOfMemory:
        return OutOfMemory(
            f"{self._device.name}: {nbytes} bytes are needed, {self._device.free_bytes()} are free. {advice}".rstrip()
        )
