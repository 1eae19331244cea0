"""Accelerators as torch has them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightswap_runtime.arena import allocate
from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_runtime.plainly import plainly
from weightswap_runtime.workers import Workers

from .ring import Ring

try:
    import torch
except ImportError as error:
    raise MissingExtra("a device other than the CPU", "torch") from error

_LOW, _HIGH = 0, -1  # priorities of streams
LARGE = 64 << 20  # bytes
SPARE = 4  # buffers whose bytes are on their way, beside those that threads fill


class TorchBuffer:
    """Bytes as a torch tensor, on a device or page-locked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.address = tensor.data_ptr()

    @property
    def view(self) -> memoryview:
        """Of page-locked memory."""
        return self.tensor.numpy().data


class Accelerator:
    """One device of torch's current accelerator. Buffers, streams and events are its own."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.name = str(device)
        self.index = device.index
        self.staging = torch.Stream(device, priority=_LOW)
        self.commits = torch.Stream(device, priority=_HIGH)
        raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self._raw = raw if device.type == "cuda" else None

    @plainly()
    def allocate(self, nbytes: int) -> TorchBuffer:
        """Memory of torch's allocator, which may have been freed a moment ago, and be still in use, in `staging`.

        Raises MemoryError.
        """
        try:
            with self.on(self.staging):
                return TorchBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self.torch))
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).split("\n")[0]) from error

    @plainly()
    def lock(self, nbytes: int) -> TorchBuffer:
        """Page-locked memory; much of it not of torch's allocator, which rounds up to a power of two.

        Raises MemoryError.
        """
        if self.torch.type == "cuda" and nbytes > LARGE:
            return _registered(nbytes)
        try:
            return TorchBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            raise MemoryError(str(error).split("\n")[0]) from error

    def free_bytes(self) -> int:
        """What the driver has, and what torch's allocator keeps without using it."""
        free, _ = torch.accelerator.get_memory_info(self.torch)
        kept = torch.accelerator.memory_reserved(self.torch) - torch.accelerator.memory_allocated(self.torch)
        return int(free) + int(kept)

    def copy(self, target: Any, at: int, source: Any, begin: int, nbytes: int) -> None:
        """Ask for a copy of bytes, in the current stream. The host does not wait."""
        target.tensor[at : at + nbytes].copy_(source.tensor[begin : begin + nbytes], non_blocking=True)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """A block in which `stream` is the thread's current one. Unlike torch's, several threads may use one stream."""
        index, before = torch.accelerator.current_device_index(), self.current()
        try:
            torch.accelerator.set_stream(stream)
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    def current(self) -> torch.Stream:
        """The thread's current stream on this device."""
        return torch.accelerator.current_stream(self.torch)

    def current_key(self) -> int:
        """The stream's handle."""
        return int(self._raw(self.index)) if self._raw else self.current().stream_id

    def mark(self, stream: Any) -> torch.Event:
        """A mark after all that `stream` was asked for. Who waits for it sleeps."""
        event = torch.Event(self.torch, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, mark: Any) -> None:
        """Let all that `stream` is asked for from now on wait for a mark."""
        stream.wait_event(mark)

    def lend(self, buffer: Any, stream: Any) -> None:
        """Let torch's allocator know that a stream uses memory."""
        buffer.tensor.record_stream(stream)


def _registered(nbytes: int) -> TorchBuffer:
    """Memory of this process that CUDA was told to lock."""
    tensor = torch.frombuffer(allocate(nbytes), dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0)
    if int(code):
        raise MemoryError(f"cudaHostRegister of {nbytes} bytes: {runtime.cudaGetErrorString(code)}")
    buffer = TorchBuffer(tensor)
    weakref.finalize(buffer, _unregister, runtime, tensor).atexit = False
    return buffer


def _unregister(runtime: Any, tensor: torch.Tensor) -> None:
    """The finalizer's reference keeps the memory until then."""
    runtime.cudaHostUnregister(tensor.data_ptr())


@functools.cache
def ring_of(accelerator: Accelerator) -> Ring:
    """The buffers that all models on a device share."""
    return Ring(accelerator, Workers().threads + SPARE)


@functools.cache
def open_accelerator(name: str) -> Accelerator:
    """The accelerator called `name`, such as "cuda" or "cuda:1". Raises Unsupported where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise Unsupported(f"device {name!r}: torch knows no such device") from error
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        here = "none" if current is None else repr(current.type)
        raise Unsupported(f"device {name!r}: this torch ({torch.__version__}) has no such device here; it has {here}")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise Unsupported(f"device {name!r}: there are {count}, counted from 0")
    return Accelerator(torch.device(device.type, index))
