"""Names of devices, and the memory of a device by its name."""

from __future__ import annotations

from typing import Literal, get_args

from weightswap_runtime.errors import Unsupported

from .host import HostMemory, Memory

StagingMode = Literal["auto", "device", "host"]
HOST = "cpu"


def device_name(device: object) -> str:
    """Return the device's name with its index, such as "cuda:0" for "cuda". Raises Unsupported and MissingExtra."""
    is_torch = (type(device).__module__, type(device).__name__) == ("torch", "device")
    if not isinstance(device, str) and not is_torch:
        raise Unsupported(f'device={device!r}: expected a string such as "cpu", "cuda" or "cuda:1"')
    if str(device) == HOST:
        return HOST
    from .device.torch_device import open_accelerator  # needs torch

    return open_accelerator(str(device)).name


def open_memory(device: str, staging: str) -> Memory:
    """Return a device's memory. staging: where single residency stages. Raises Unsupported, and MissingExtra."""
    if staging not in get_args(StagingMode):
        raise Unsupported(f"staging={staging!r}: expected {', '.join(map(repr, get_args(StagingMode)))}")
    if device == HOST:
        if staging == "device":
            raise Unsupported('staging="device" is for accelerators; on the CPU weights are staged in host memory')
        return HostMemory()
    from .device.memory import DeviceMemory
    from .device.torch_device import open_accelerator, ring_of  # needs torch

    accelerator = open_accelerator(device)
    return DeviceMemory(accelerator, ring_of(accelerator), staging)
