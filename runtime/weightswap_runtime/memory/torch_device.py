"""A device as torch has it: memory, streams, events, an account of the memory, and digests that it computes itself.

Torch's allocator, streams and modes belong to the application, too. What is used here must neither be changed by it nor
change anything for it: hence streams of our own, where CUDA allows it, and `default_torch_modes`.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("a device other than the CPU", "torch") from error

import ctypes
import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import numpy as np

from weightswap_runtime import native
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.identity import NONFINITE
from weightswap_runtime.torch_tensors import default_torch_modes

from .arena import BlockTable, Copy, Inspected, Rows

SLICE_NS = 50_000_000  # nanoseconds after which an upload lets others have its buffer, and can be cancelled
SOURCE = Path(__file__).with_name("blake3.cu")
_KERNEL, _THREADS = "inspect_parts", 256  # as in the source, and so are the fields of _PART and RESULT
_PART = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), *((name, "<u4") for name in ("value", "mask", "even", "odd", "ones", "_"))]
)
RESULT = np.dtype([("digest", "V32"), ("has_nonfinite", "<u4")])
_LOW, _HIGH = 0, -1  # priorities of streams
_NON_BLOCKING = 1  # cudaStreamNonBlocking: not synchronized with the default stream
_SPECIAL_HANDLES = {1: "cudaStreamLegacy", 2: "cudaStreamPerThread"}  # which stand for other streams
# not "active_bytes", where a freed arena that was lent to another stream counts until the next allocation
_HELD, _MOST_HELD = "allocated_bytes.all.current", "allocated_bytes.all.peak"
_log = logging.getLogger("weightswap.device")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


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


class TorchBuffer:
    """Bytes as a torch tensor, on a device or page-locked. Writes of the device are visible once they are done."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.address = tensor.data_ptr()

    @property
    def view(self) -> memoryview:
        """The bytes of page-locked memory."""
        return self.tensor.numpy().data


class Accelerator:
    """Device of torch's current accelerator, with streams for one model alone.

    Copies are enqueued in the calling thread's current stream; the host does not wait. Tests have a stand-in for this.
    """

    staging: torch.Stream  # for work that no call waits for
    inspecting: torch.Stream  # for work beside that
    commits: torch.Stream  # for work that calls wait for

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.name = str(device)
        self.index = device.index
        self._on_cuda = device.type == "cuda"
        sleeping = functools.partial(torch.cuda.Event, blocking=True)  # a wait for it uses no processor
        self._new_event: Callable[[], torch.Event] = sleeping if self._on_cuda else torch.Event
        self.staging, self.inspecting, self.commits = (
            lend_stream(self, device, priority) if self._on_cuda else torch.Stream(device, priority=priority)
            for priority in (_LOW, _LOW, _HIGH)
        )
        self._account = _accounts[device.index]
        self._dropped = 0  # bytes of freed arenas; torch's allocator may have returned some to the driver
        raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self._raw = raw if self._on_cuda else None

    @property
    def capability(self) -> str:
        """The hardware properties that decide the last bits of results."""
        if self.torch.type != "cuda":
            return self.torch.type
        return f"{torch.cuda.get_device_name(self.torch)} {torch.cuda.get_device_capability(self.torch)}"

    @default_torch_modes()
    def allocate(self, nbytes: int) -> TorchBuffer:
        """Allocate memory for `staging` with torch's allocator; work enqueued there may still use it.

        Other streams wait for a mark in `staging` first. Raises MemoryError.
        """
        with self._account.growing:
            # once there is another arena, the allocator's peak says less about calls
            self._account.note(self._statistics().get(_MOST_HELD, 0))
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
            self._account.note(statistics.get(_MOST_HELD, 0))
            now = statistics.get(_HELD, 0) - self._account.held
        return max(0, self._account.calls - now) if statistics else 0

    def _statistics(self) -> Mapping[str, int]:
        try:
            return torch.cuda.memory_stats(self.torch) if self._on_cuda else {}
        except RuntimeError:  # raised by an allocator that replaces torch's
            return {}

    @default_torch_modes()
    def borrow(self, tensor: Any) -> TorchBuffer | None:
        """Return a tensor's row-major bytes, for the current stream; None if it is not on this device."""
        if tensor.device != self.torch:
            return None
        rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return TorchBuffer(rows.as_strided((rows.numel(),), (1,)).view(torch.uint8))

    @default_torch_modes()
    def inspector(self, buffer: TorchBuffer, blocks: BlockTable) -> TorchInspector | None:
        """Return an inspector of blocks; None if the device has none. Raises what the device reports."""
        kernel = _kernel_of(self.torch) if self._on_cuda else None
        return None if kernel is None else TorchInspector(self.torch, kernel, buffer, blocks)

    def distrust_inspector(self, reason: str, lasting: bool) -> None:
        """Log that the host inspects a set. lasting: `inspector` returns None from now on."""
        if lasting:
            _kernels[self.torch] = None
        _log.warning("%s: the host computes %s: %s", self.name, "digests" if lasting else "these digests", reason)

    def copy(self, target: TorchBuffer, at: int, source: TorchBuffer, begin: int, nbytes: int) -> None:
        target.tensor[at : at + nbytes].copy_(source.tensor[begin : begin + nbytes], non_blocking=True)

    def upload(
        self, target: TorchBuffer, copies: Sequence[Copy], source: int | memoryview, through: TorchBuffer, done: int
    ) -> int | None:
        """Enqueue copies of an open file's bytes, or of ordinary memory's, without Python.

        They pass through a page-locked buffer of native.UPLOAD_BYTES or more. done: how many of all their bytes are
        copied already. Returns how many are then, after some milliseconds perhaps not all; these are read, and the
        buffer as well if it is not all. Returns None, with some copied, if the device cannot do that or if it failed:
        to copy with the other methods then says why.
        """
        runtime = _runtime() if self._on_cuda else None
        if runtime is None or native.library is None:
            return None
        columns = np.array(copies, np.int64).T.copy()
        file, memory = (source, None) if isinstance(source, int) else (-1, native.address(source))
        done = native.library.upload(
            runtime,
            ctypes.c_void_p(self.current_key()),
            file,
            memory,
            ctypes.c_void_p(target.address),
            *map(native.address, columns),
            ctypes.c_int64(len(copies)),
            ctypes.c_int64(done),
            ctypes.c_void_p(through.address),
            ctypes.c_int64(SLICE_NS),
        )
        return None if done < 0 else done

    @default_torch_modes()
    def scatter(self, target: TorchBuffer, source: TorchBuffer, rows: Rows) -> None:
        """Write rows that are end to end in `source` to their places in `target`."""
        table, content, numbers = _of_rows(target, source, rows)
        table.index_copy_(0, numbers, content)

    @default_torch_modes()
    def gather(self, target: TorchBuffer, source: TorchBuffer, rows: Rows) -> None:
        """The reverse. Fill the rows of `target`, which has their numbers, from their places in `source`."""
        table, content, numbers = _of_rows(source, target, rows)
        torch.index_select(table, 0, numbers, out=content)

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
            return torch.cuda.current_stream(self.index)
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
        """Return whether a stream's work is being captured instead of done."""
        with self.on(stream):
            return self.is_capturing_here()

    def is_capturing_here(self) -> bool:
        """As `is_capturing`, for the current stream on this device, which need not be the thread's current device."""
        if not self._on_cuda or torch.cuda.current_device() == self.index:
            return self._on_cuda and torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.torch):
            return torch.cuda.is_current_stream_capturing()

    def mark(self, stream: Any) -> torch.Event:
        """Record a mark after all work that is enqueued in `stream`."""
        event = self._new_event()
        event.record(stream)
        return event

    def finish(self, mark: Any) -> None:
        """Let the host wait for a mark, without the interpreter's lock, and on CUDA without busy waiting."""
        mark.synchronize()

    def wait(self, stream: Any, mark: Any) -> None:
        """Let all later work of `stream` wait for a mark. The host does not wait."""
        stream.wait_event(mark)

    def lend(self, buffer: TorchBuffer, stream: Any) -> None:
        """Keep memory, once it is dropped, until `stream` has done all work enqueued until then."""
        buffer.tensor.record_stream(stream)


def _of_rows(arena: TorchBuffer, region: TorchBuffer, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the table from its row 0 on, the rows' content, and their numbers, over the memory of both buffers."""
    count = (arena.nbytes - rows.base) // rows.width
    table = arena.tensor[rows.base : rows.base + count * rows.width].view(count, rows.width)
    content = region.tensor[rows.begin : rows.begin + rows.total * rows.width].view(rows.total, rows.width)
    numbers = region.tensor[rows.numbers : rows.end].view(torch.int64)
    if rows.width % 8 == 0 and rows.begin % 8 == 0 and rows.base % 8 == 0:  # else a thread moves a byte at a time
        table, content = table.view(torch.int64), content.view(torch.int64)
    return table, content, numbers


class _Account:
    """Bytes on one device, of all models."""

    def __init__(self) -> None:
        self.held = 0  # of arenas, now
        self.most = 0  # of arenas, at most
        self.calls = 0  # of calls, at most: a lower bound
        # held while an arena is allocated and counted, so that its memory is not taken for that of calls
        self.growing = Lock()
        self.lock = RLock()  # an arena may be garbage-collected while one is counted

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.held += nbytes
            self.most = max(self.most, self.held)

    def note(self, peak: int) -> None:
        """Learn from the allocator's peak, of which arenas had their peak at most."""
        with self.lock:
            self.calls = max(self.calls, peak - self.most)


_accounts: defaultdict[int, _Account] = defaultdict(_Account)  # by index of the device


def lend_stream(owner: object, device: torch.device, priority: int, purpose: str = "copies") -> torch.Stream:
    """Lend a stream for as long as `owner` lives. It is never lent for another purpose.

    Torch deals its own streams, 32 of each priority, in turns: another part of the application would get the same ones,
    and could wait for a staging, or capture it. If CUDA is linked into torch itself, it is one of torch's streams.
    """
    spare = _spare.setdefault((device.index, priority, purpose), [])
    try:
        stream = spare.pop()
    except IndexError:
        stream = _new_stream(device, priority)
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream


def is_ours(handle: int) -> bool:
    """Return whether a handle is that of a stream that was created here."""
    return handle in _created


def _new_stream(device: torch.device, priority: int) -> torch.Stream:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    create = getattr(ctypes.CDLL(None), "cudaStreamCreateWithPriority", None)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        if create is None or create(ctypes.byref(handle), _NON_BLOCKING, priority) or not handle.value:
            return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    _created.add(handle.value)
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]


@functools.cache
def _runtime() -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the functions of CUDA that native code calls, as its struct; None if they are linked into torch."""
    loaded = ctypes.CDLL(None)
    names = ("MemcpyAsync", "EventCreateWithFlags", "EventRecord", "EventSynchronize", "EventDestroy", "GetLastError")
    functions = [getattr(loaded, f"cuda{name}", None) for name in names]
    addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions if function is not None]
    return (ctypes.c_void_p * len(names))(*addresses) if len(addresses) == len(names) else None


# by device, priority and purpose; lent again, never destroyed, as the allocator keeps what was freed in them for them
_spare: dict[tuple[int, int, str], list[torch.Stream]] = {}
_created: set[int] = set()  # handles


class TorchInspector:
    """Inspector of blocks in a CUDA buffer: BLAKE3 digests, and whether values are not finite."""

    def __init__(self, device: torch.device, kernel: Kernel, buffer: TorchBuffer, blocks: BlockTable) -> None:
        self._device, self._kernel, self._buffer = device, kernel, buffer
        parts = torch.from_numpy(parts_of(blocks).view(np.uint8))
        self._parts = parts.pin_memory().to(device, non_blocking=True)
        self._results = torch.empty(len(blocks.kinds) * RESULT.itemsize, dtype=torch.uint8, device=device)
        # All processors of an H100 hash 596 GB/s. Half of them are still faster than any bus, and leave room for calls
        self._grid = max(1, torch.cuda.get_device_properties(device).multi_processor_count // 2)

    @default_torch_modes()
    def inspect(self, first: int, count: int) -> None:
        """Enqueue in the current stream: inspect so many blocks from an index on."""
        parts, results = self._parts[first * _PART.itemsize :], self._results[first * RESULT.itemsize :]
        with torch.cuda.device(self._device):
            self._kernel((min(self._grid, count), 1, 1), (_THREADS, 1, 1), [self._buffer.tensor, parts, results, count])

    @default_torch_modes()
    def results(self) -> Inspected:
        """Return what was found in all blocks. The host waits."""
        found = torch.empty(self._results.shape, dtype=torch.uint8, pin_memory=True)
        found.copy_(self._results, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        done.synchronize()
        return inspected(found.numpy().view(RESULT))


def inspected(results: np.ndarray) -> Inspected:
    """Return what the kernel has written."""
    digests = results["digest"].tobytes()
    nonfinite = np.flatnonzero(results["has_nonfinite"]).tolist()
    return Inspected([digests[at : at + 32] for at in range(0, len(digests), 32)], nonfinite)


def parts_of(blocks: BlockTable) -> np.ndarray:
    """Return blocks as the kernel takes them."""
    parts = np.zeros(len(blocks.kinds), _PART)
    parts["offset"], parts["length"] = blocks.offsets, blocks.lengths
    patterns = np.array([_lanes(dtype) for dtype in blocks.dtypes], np.uint32)[blocks.kinds]
    for column, name in enumerate(("value", "mask", "even", "odd", "ones")):
        parts[name] = patterns[:, column]
    return parts


def _lanes(dtype: str) -> tuple[int, int, int, int, int]:
    """Return which elements in the lanes of a 32-bit word are not finite, as the kernel takes it."""
    pattern = NONFINITE.get(dtype)
    if pattern is None:
        return 0, 0, 0, 0, 0
    size, mask, value = pattern
    if size == 8:  # the upper half, in every second word, decides
        assert not mask & 0xFFFF_FFFF
        return value >> 32, mask >> 32, 0, 1 << 31, 1
    ones = sum(1 << 8 * at for at in range(0, 4, size))
    highest = ones << (8 * size - 1)
    return value * ones, mask * ones, highest, highest, ones


Kernel = Callable[..., None]
_kernels: dict[torch.device, Kernel | None] = {}  # None: it cannot be used
_compiling = Lock()


def _kernel_of(device: torch.device) -> Kernel | None:
    """Return the kernel, compiled on first use. Raises whatever torch, NVRTC and the driver raise."""
    from torch.cuda._utils import _cuda_load_module

    with _compiling:
        if device not in _kernels:
            with torch.cuda.device(device):
                code = compile_source(SOURCE.read_text(), torch.cuda.get_device_capability(device))
                _kernels[device] = getattr(_cuda_load_module(code), _KERNEL)
        return _kernels[device]


def compile_source(source: str, capability: tuple[int, int]) -> bytes:
    """Compile a source without includes for GPUs of a compute capability, with torch's NVRTC.

    torch's own function for this needs the CUDA toolkit's folder and setuptools.

    Raises OSError if there is no NVRTC, and RuntimeError with its log if it refuses the source.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)("--gpu-architecture=sm_{}{}".format(*capability).encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC: {log.rstrip(bytes(1)).decode(errors='replace')}")
        return _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC of torch's version of CUDA. In wheels only a library of torch that links to it finds it."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        return ctypes.CDLL(name)  # loaded by that library


def _output(size_of: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(get(program, content))
    return content.raw


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC: error {code}")
