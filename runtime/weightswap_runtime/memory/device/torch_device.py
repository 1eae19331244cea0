"""Accelerators through torch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import Lock, RLock
from typing import Any

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_runtime.tensors.torch_modes import default_torch_modes
from weightswap_runtime.threads.worker_threads import WorkerThreads

from . import Hasher
from .ring import Ring

try:
    import torch
except ImportError as error:
    raise MissingExtra("a device other than the CPU", "torch") from error

from .own_streams import is_ours, lend_stream

_LOW, _HIGH = 0, -1  # priorities
# not "active_bytes", where a freed arena that was lent to another stream counts until the next allocation
_HELD, _MOST_HELD = "allocated_bytes.all.current", "allocated_bytes.all.peak"
_SPECIAL_HANDLES = {1: "cudaStreamLegacy", 2: "cudaStreamPerThread"}  # which stand for other streams
SPARE = 4  # buffers that are being copied, beside those that threads fill
URGENT = 8  # buffers for copies that calls wait for


class TorchBuffer:
    """Bytes as a torch tensor, on a device or page-locked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.address = tensor.data_ptr()

    @property
    def view(self) -> memoryview:
        """The bytes of page-locked memory."""
        return self.tensor.numpy().data


class _Account:
    """Bytes on one device, of all models: of arenas now (held) and at most (most), and of calls at most (calls).

    growing: lock held while an arena is allocated and counted, so that its memory is not counted as that of calls.
    """

    def __init__(self) -> None:
        self.held = self.most = self.calls = 0
        self.growing = Lock()
        self.lock = RLock()  # an arena may be garbage-collected while one is counted

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.held += nbytes
            self.most = max(self.most, self.held)

    def note(self, peak: int) -> None:
        """Update the lower bound of the most that calls had: the allocator's peak less the peak of arenas."""
        with self.lock:
            self.calls = max(self.calls, peak - self.most)


class Accelerator:
    """One device of torch's current accelerator, with streams for one model alone."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.name = str(device)
        self.index = device.index
        self._on_cuda = device.type == "cuda"
        sleeping = functools.partial(torch.cuda.Event, blocking=True)  # a wait for it uses no processor
        self._new_event: Callable[[], torch.Event] = sleeping if self._on_cuda else torch.Event
        self.staging, self.commits = (self._new_stream(priority) for priority in (_LOW, _HIGH))
        self._account = _accounts.setdefault(device.index, _Account())
        self._dropped = 0  # bytes of freed arenas; torch's allocator may have returned some to the driver
        raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self._raw = raw if self._on_cuda else None

    def _new_stream(self, priority: int) -> torch.Stream:
        return lend_stream(self, self.torch, priority) if self._on_cuda else torch.Stream(self.torch, priority=priority)

    @property
    def capability(self) -> str:
        """The hardware properties that decide the last bits of results."""
        if self.torch.type != "cuda":
            return self.torch.type
        return f"{torch.cuda.get_device_name(self.torch)} {torch.cuda.get_device_capability(self.torch)}"

    @default_torch_modes()
    def allocate(self, nbytes: int) -> TorchBuffer:
        """Allocate memory for `staging` with torch's allocator; work enqueued there may still use it.

        Raises MemoryError.
        """
        with self._account.growing:
            self._account.note(self._peak(self._statistics()))  # the peak says less once there is another arena
            try:
                with self.on(self.staging):
                    buffer = TorchBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self.torch))
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error).split("\n")[0]) from error
            self._count(nbytes)
        weakref.finalize(buffer, self._count, -nbytes).atexit = False
        return buffer

    def _count(self, nbytes: int) -> None:
        """Add to the bytes of arenas, in any thread, as the garbage collector may run anywhere."""
        with self._account.lock:
            self._account.add(nbytes)
            self._dropped = max(0, self._dropped - nbytes)

    @default_torch_modes()
    def lock(self, nbytes: int) -> TorchBuffer:
        """Allocate page-locked memory. Meanwhile the driver answers no other request of this process.

        Raises MemoryError.
        """
        try:
            return TorchBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            raise MemoryError(str(error).split("\n")[0]) from error

    def free_bytes(self) -> int:
        """Return the driver's free bytes, plus the bytes of freed arenas that torch's allocator keeps.

        Only new arenas can reuse the latter without a wait for the whole device.
        """
        free, _ = torch.accelerator.get_memory_info(self.torch)
        statistics = self._statistics()
        kept = statistics.get("reserved_bytes.all.current", 0) - statistics.get(_HELD, 0)
        return int(free) + max(0, min(self._dropped, kept))

    def needed_by_calls(self) -> int:
        """Return the peak of calls' memory less what they have now, as far as torch's allocator knows."""
        with self._account.growing:
            statistics = self._statistics()
            self._account.note(self._peak(statistics))
            now = statistics.get(_HELD, 0) - self._account.held
        return max(0, self._account.calls - now) if statistics else 0

    @staticmethod
    def _peak(statistics: Mapping[str, int]) -> int:
        return statistics.get(_MOST_HELD, 0)

    def _statistics(self) -> Mapping[str, int]:
        try:
            return torch.cuda.memory_stats(self.torch) if self._on_cuda else {}
        except RuntimeError:  # raised by an allocator that replaces torch's
            return {}

    def hasher(self, buffer: Any) -> Hasher | None:
        if not self._on_cuda:
            return None
        from .digests import hasher_of

        return hasher_of(self.torch, buffer)

    def distrust_hasher(self, reason: str) -> None:
        from .digests import distrust

        distrust(self.torch, reason)

    def copy(self, target: Any, at: int, source: Any, begin: int, nbytes: int) -> None:
        target.tensor[at : at + nbytes].copy_(source.tensor[begin : begin + nbytes], non_blocking=True)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the thread's current one.

        It is a new Stream object, as torch keeps the previous stream in it. Unlike with `set_stream`, an interrupt
        cannot leave the thread in the stream.
        """
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def current(self) -> torch.Stream:
        """Return the thread's current stream on this device."""
        if self._on_cuda:
            return torch.cuda.current_stream(self.torch)
        return torch.accelerator.current_stream(self.torch)

    def current_key(self) -> int:
        """Return the current stream's handle."""
        return int(self._raw(self.index)) if self._raw else self.current().stream_id

    def is_foreign(self, stream: Any) -> bool:
        """Return whether a stream is neither torch's nor ours: it may be destroyed at any time, and its handle reused.

        Raises Unsupported for a special handle of CUDA, which stands for another stream.
        """
        if not self._on_cuda or not stream.stream_id or stream.stream_id & 1 or is_ours(stream.stream_id):
            return False  # ids of torch's own streams are odd
        if name := _SPECIAL_HANDLES.get(stream.cuda_stream):
            raise Unsupported(f"the current stream is {name}, a special CUDA handle: call on one of torch's streams")
        return True

    def is_capturing(self, stream: Any) -> bool:
        with self.on(stream):
            return self.is_capturing_here()

    def is_capturing_here(self) -> bool:
        """As `is_capturing`, for the current stream on this device, which need not be the thread's current device."""
        if not self._on_cuda or torch.cuda.current_device() == self.index:
            return self._on_cuda and torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.torch):
            return torch.cuda.is_current_stream_capturing()

    def mark(self, stream: Any) -> torch.Event:
        event = self._new_event()
        event.record(stream)
        return event

    def finish(self, mark: Any) -> None:
        """Let the host wait for a mark, without the interpreter's lock, and on CUDA without busy waiting."""
        mark.synchronize()

    def wait(self, stream: Any, mark: Any) -> None:
        stream.wait_event(mark)

    def lend(self, buffer: Any, stream: Any) -> None:
        """Tell torch's allocator that a stream uses memory."""
        buffer.tensor.record_stream(stream)


def ring_of(accelerator: Accelerator) -> Ring:
    """Return the page-locked buffers that all models on a device share."""
    with _opening:
        ring = _rings.get(accelerator.index)
        if ring is None:
            urgent = Ring(accelerator, URGENT)
            ring = _rings[accelerator.index] = Ring(accelerator, WorkerThreads().threads + SPARE, urgent)
        return ring


def open_accelerator(name: str) -> Accelerator:
    """Open the accelerator called `name`, such as "cuda" or "cuda:1", with streams of its own.

    Raises Unsupported if there is none.
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
    number = name.partition(":")[2]
    if number and int(number) != device.index:  # torch keeps only eight bits of it
        raise Unsupported(f"device {name!r}: there are {count}, counted from 0")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise Unsupported(f"device {name!r}: there are {count}, counted from 0")
    return Accelerator(torch.device(device.type, index))


_opening = Lock()
_rings: dict[int, Ring] = {}
_accounts: dict[int, _Account] = {}
