"""BLAKE3 digests of bytes in a GPU's memory, computed by the GPU instead of the host."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from blake3 import blake3

from weightswap_runtime.errors import lacks_memory
from weightswap_runtime.memory.arena import ByteRange
from weightswap_runtime.tensors.digests import BLOCK
from weightswap_runtime.tensors.torch_modes import default_torch_modes
from weightswap_runtime.threads.worker_threads import WorkerThreads

from . import Buffer

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
