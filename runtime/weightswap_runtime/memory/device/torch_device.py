"""Accelerators as torch has them."""

from __future__ import annotations

import functools
import time
import weakref
from contextlib import AbstractContextManager, suppress
from threading import Lock
from typing import Any

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_runtime.memory.arena import allocate
from weightswap_runtime.tensors.torch_modes import default_torch_modes
from weightswap_runtime.threads.workers import Workers

from .ring import Ring

try:
    import torch
except ImportError as error:
    raise MissingExtra("a device other than the CPU", "torch") from error

_LOW, _HIGH, _APART = 0, -1, -2  # priorities; torch hands the streams of each out in turn, also to others
NAP = 0.0001  # seconds
LARGE = 64 << 20  # bytes
KEPT = 3  # large pieces of page-locked memory that nobody uses, beside the one that is locked next
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
        self.captures = self.stream_apart()
        self._locked: list[torch.Tensor] = []  # what was dropped, the latest last
        self._locking = Lock()
        raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self._raw = raw if device.type == "cuda" else None

    def stream_apart(self) -> torch.Stream:
        """A stream that nothing of ours is in, and that torch hands out again only after 31 others."""
        return torch.Stream(self.torch, priority=_APART)

    @property
    def capability(self) -> str:
        """What decides the last bits of what it computes."""
        if self.torch.type != "cuda":
            return self.torch.type
        return f"{torch.cuda.get_device_name(self.torch)} {torch.cuda.get_device_capability(self.torch)}"

    @default_torch_modes()
    def allocate(self, nbytes: int) -> TorchBuffer:
        """Memory of torch's allocator, which may have been freed a moment ago, and be still in use, in `staging`.

        Raises MemoryError.
        """
        try:
            with self.on(self.staging):
                return TorchBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self.torch))
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).split("\n")[0]) from error

    @default_torch_modes()
    def lock(self, nbytes: int) -> TorchBuffer:
        """Page-locked memory; much of it not of torch's allocator, which rounds up to a power of two.

        Raises MemoryError.
        """
        if self.torch.type == "cuda" and nbytes > LARGE:
            return self._registered(nbytes)
        try:
            return TorchBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            raise MemoryError(str(error).split("\n")[0]) from error

    def _registered(self, nbytes: int) -> TorchBuffer:
        """Memory of this process that CUDA was told to lock.

        It takes seconds, so that a few that were dropped are kept for others of the same size.
        """
        for stream in (self.staging, self.commits):  # what was dropped may still be copied from
            self.finish(self.mark(stream))
        with self._locking:
            place = next((place for place, kept in enumerate(self._locked) if kept.numel() == nbytes), None)
            if place is None:
                self._unlock(len(self._locked) - KEPT)
            tensor = self._locked_anew(nbytes) if place is None else self._locked.pop(place)
        buffer = TorchBuffer(tensor)
        weakref.finalize(buffer, self._locked.append, tensor).atexit = False
        return buffer

    def _locked_anew(self, nbytes: int) -> torch.Tensor:
        try:
            return self._register(torch.frombuffer(allocate(nbytes), dtype=torch.uint8))
        except MemoryError:
            if not self._locked:
                raise
        self._unlock(len(self._locked))
        return self._register(torch.frombuffer(allocate(nbytes), dtype=torch.uint8))

    def _unlock(self, count: int) -> None:
        """Let go of those that were dropped first."""
        for _ in range(count):
            torch.cuda.cudart().cudaHostUnregister(self._locked.pop(0).data_ptr())  # type: ignore[no-untyped-call]

    def _register(self, tensor: torch.Tensor) -> torch.Tensor:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with self.on(self.staging):
            code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
            if not int(code):
                return tensor
            with suppress(RuntimeError):  # CUDA keeps the error for whoever asks next
                torch.zeros(1, device=self.torch)
        raise MemoryError(f"cudaHostRegister of {tensor.numel()} bytes: {runtime.cudaGetErrorString(code)}")

    def free_bytes(self) -> int:
        """What the driver has, and what torch's allocator keeps for the stream `staging` without using it."""
        free, _ = torch.accelerator.get_memory_info(self.torch)
        if self.torch.type != "cuda":
            return int(free)
        handle = self.staging.native_handle  # type: ignore[attr-defined]
        kept = 0
        for segment in torch.cuda.memory_snapshot(include_traces=False):  # type: ignore[no-untyped-call]
            if (segment["device"], segment["stream"]) == (self.index, handle):
                kept += segment["total_size"] - segment["active_size"]
        return int(free) + kept

    def copy(self, target: Any, at: int, source: Any, begin: int, nbytes: int) -> None:
        """Ask for a copy of bytes, in the current stream. The host does not wait."""
        target.tensor[at : at + nbytes].copy_(source.tensor[begin : begin + nbytes], non_blocking=True)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """A block in which `stream` is the thread's current one.

        The object is a new one, as torch keeps in it what was current before; and an interrupt cannot leave the thread
        in the stream, as it could with `set_stream`.
        """
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def current(self) -> torch.Stream:
        """The thread's current stream on this device."""
        return torch.accelerator.current_stream(self.torch)

    def current_key(self) -> int:
        """The stream's handle."""
        return int(self._raw(self.index)) if self._raw else self.current().stream_id

    def mark(self, stream: Any) -> torch.Event:
        """A mark after all that `stream` was asked for."""
        event: torch.Event = stream.record_event()
        return event

    def finish(self, mark: Any) -> None:
        """Keep the host waiting for a mark, asleep: torch's own wait would keep a processor busy."""
        while not mark.query():
            time.sleep(NAP)

    def wait(self, stream: Any, mark: Any) -> None:
        """Let all that `stream` is asked for from now on wait for a mark."""
        stream.wait_event(mark)

    def lend(self, buffer: Any, stream: Any) -> None:
        """Let torch's allocator know that a stream uses memory."""
        buffer.tensor.record_stream(stream)


@functools.cache
def ring_of(accelerator: Accelerator) -> Ring:
    """The buffers that all models on a device share, and a few for what calls wait for."""
    return Ring(accelerator, Workers().threads + SPARE, urgent=Ring(accelerator, SPARE))


def open_accelerator(name: str) -> Accelerator:
    """The accelerator called `name`, such as "cuda" or "cuda:1", one object for each.

    Raises Unsupported where there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise Unsupported(f"device {name!r}: torch knows no such device") from error
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        here = "none" if current is None else repr(current.type)
        raise Unsupported(f"device {name!r}: this torch ({torch.__version__}) has no such device here; it has {here}")
    count = torch.accelerator.device_count()
    said = name.partition(":")[2]
    if said and int(said) != device.index:  # torch keeps eight bits of it
        raise Unsupported(f"device {name!r}: there are {count}, counted from 0")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise Unsupported(f"device {name!r}: there are {count}, counted from 0")
    with _opening:
        if index not in _opened:
            _opened[index] = Accelerator(torch.device(device.type, index))
        return _opened[index]


_opening = Lock()
_opened: dict[int, Accelerator] = {}
