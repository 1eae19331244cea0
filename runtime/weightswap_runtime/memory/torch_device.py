"""The device as torch has it, and digests computed on it."""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("a device other than the CPU", "torch") from error

import ctypes
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock, RLock
from typing import Any

from blake3 import blake3

from weightswap_runtime.errors import Unsupported, lacks_memory
from weightswap_runtime.tensors import BLOCK
from weightswap_runtime.threads import WorkerThreads
from weightswap_runtime.torch_tensors import default_torch_modes

from .arena import ByteRange
from .device import Buffer, Hasher, Ring

_NON_BLOCKING = 1  # cudaStreamNonBlocking: not synchronized with the default stream
_spare: dict[tuple[int, int], list[torch.Stream]] = {}
_created: set[int] = set()


def lend_stream(owner: object, device: torch.device, priority: int) -> torch.Stream:
    """Lend a stream for as long as `owner` lives. If CUDA is linked into torch itself, it is one of torch's streams."""
    spare = _spare.setdefault((device.index, priority), [])
    try:
        stream = spare.pop()
    except IndexError:
        stream = _new(device, priority)
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream


def is_ours(handle: int) -> bool:
    """Return whether a handle is that of a stream that was created here."""
    return handle in _created


def _new(device: torch.device, priority: int) -> torch.Stream:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    create = getattr(ctypes.CDLL(None), "cudaStreamCreateWithPriority", None)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        if create is None or create(ctypes.byref(handle), _NON_BLOCKING, priority) or not handle.value:
            return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    _created.add(handle.value)
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]


SOURCE = Path(__file__).with_name("blake3.cu")
KERNEL = "digest_blocks"
THREADS = 256  # of the kernel
AT_ONCE = 512  # blocks of one launch: kernels of calls wait for its end, and so many keep any GPU busy
MOST_MEASURED = 1024  # blocks with which the speed is measured: a few would leave most of a GPU idle
_log = logging.getLogger("weightswap.device")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


class DeviceHasher:
    """A kernel compiled for a device. `was_faster`: it has been measured, and was faster than the host."""

    was_faster = False

    def __init__(self, device: torch.device) -> None:
        """Raises whatever torch, NVRTC and the driver raise if compiling or loading fails."""
        from torch.cuda._utils import _cuda_load_module

        self._device = device
        with torch.cuda.device(device):
            code = compile_source(SOURCE.read_text(), torch.cuda.get_device_capability(device))
            self._kernel = getattr(_cuda_load_module(code), KERNEL)

    @default_torch_modes()
    def digests(self, buffer: Buffer, parts: Sequence[ByteRange]) -> list[bytes]:
        """Return the digests of parts of at most a block each, computed in the current stream. The host waits."""
        table = torch.tensor(parts, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
        digests = torch.empty(len(parts), 32, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            for first in range(0, len(parts), AT_ONCE):
                grid = min(AT_ONCE, len(parts) - first), 1, 1
                self._kernel(grid, (THREADS, 1, 1), [buffer.tensor, table[first:], digests[first:]])  # type: ignore[attr-defined]
        on_host = torch.empty(digests.shape, dtype=torch.uint8, pin_memory=True).copy_(digests, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        done.synchronize()
        return [row.tobytes() for row in on_host.numpy()]


_hashers: dict[torch.device, DeviceHasher | None] = {}  # None: it cannot be used
_lock = threading.Lock()


def hasher_of(device: torch.device, buffer: Buffer) -> DeviceHasher | None:
    """Return the hasher of a device, compiled on first use; None if it fails, or is slower than the host just now.

    It is measured for each set until it has been faster once: a device that was busy, or few blocks, say little about
    the next set. buffer: memory to measure it with, of at least a block; many blocks are more like a staging.
    """
    with _lock:
        try:
            if device not in _hashers:
                _hashers[device] = DeviceHasher(device)
            hasher = _hashers[device]
            if hasher is not None and not hasher.was_faster:
                hasher.was_faster = _is_faster(hasher, device, buffer)
        except Exception as error:
            _log.warning("%s: the host computes digests: %s: %s", device, type(error).__name__, error)
            if not lacks_memory(error):  # the next attempt may have more memory
                _hashers[device] = None
            return None
        return hasher if hasher is not None and hasher.was_faster else None


def distrust(device: torch.device, reason: str) -> None:
    """Let the host compute all digests from now on."""
    _hashers[device] = None
    _log.warning("%s: the host computes digests: %s", device, reason)


def _is_faster(hasher: DeviceHasher, device: torch.device, buffer: Buffer) -> bool:
    count = min(buffer.nbytes // BLOCK, MOST_MEASURED)
    on_device, on_host = _seconds(hasher, buffer, count)
    figures = f"digests of {count} MiB take {on_device:.2g} s on the device, {on_host:.2g} s on the host"
    if on_device < on_host:
        _log.info("%s: the device computes digests: %s", device, figures)
        return True
    _log.warning("%s: the host computes the digests of this set: %s; the next set is measured again", device, figures)
    return False


def _seconds(hasher: DeviceHasher, buffer: Buffer, count: int) -> tuple[float, float]:
    """Measure the seconds that the device, and all threads of the host together, take for `count` blocks."""
    parts = [ByteRange(index * BLOCK, BLOCK) for index in range(count)]
    hasher.digests(buffer, parts)  # loads the kernel and locks the pages that it needs
    block = bytes(BLOCK)
    on_host = _least_seconds(lambda: blake3(block).digest())
    return _least_seconds(lambda: hasher.digests(buffer, parts)), on_host * count / WorkerThreads().threads


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the shortest of three runs."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def compile_source(source: str, capability: tuple[int, int]) -> bytes:
    """Compile a source without includes for GPUs of a compute capability, with torch's NVRTC.

    torch's own function for this needs the CUDA toolkit's folder and setuptools.

    Raises OSError if there is no NVRTC, and RuntimeError with its log if it refuses the source.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)("--gpu-architecture=sm_{}{}".format(*capability).encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC: {log.rstrip(bytes(1)).decode(errors='replace')}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _library() -> ctypes.CDLL:
    """Load NVRTC of torch's version of CUDA. In wheels only a library of torch that links to it finds it."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        return ctypes.CDLL(name)  # loaded by that library


def _read(size_of: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(get(program, content))
    return content.raw


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC: error {code}")


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

        return hasher_of(self.torch, buffer)

    def distrust_hasher(self, reason: str) -> None:

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
