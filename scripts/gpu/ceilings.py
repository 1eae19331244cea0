"""Ceilings of a GPU machine: the reference figures for those of a swap. Takes half a minute.

`ceilings.py FILE [MEGABYTES]` prints each figure as it is measured, and writes FILE after it. It measures no code of
weightswap.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3

MB = 1 << 20
ROUNDS = 5
LAUNCHES = 1000
DEVICE = "cuda"


class Figure(NamedTuple):
    what: str
    value: float
    unit: str


def figures(nbytes: int) -> Iterator[Figure]:
    """Measure with buffers of `nbytes`, a multiple of 64 MiB; first the host, which needs no GPU."""
    yield Figure("cores", len(os.sched_getaffinity(0)), "")
    yield from _host(nbytes)
    locked = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    yield from _files(locked)
    yield from _transfers(locked, nbytes)
    yield from _launches()
    yield from _locking(nbytes)
    yield from _allocating(nbytes)


def _host(nbytes: int) -> Iterator[Figure]:
    one, two = bytearray(nbytes), bytearray(os.urandom(64 * MB) * (nbytes // (64 * MB)))
    to, source = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (one, two))
    view = memoryview(two)
    for threads in _threads():
        rate = _parallel(threads, nbytes, lambda at: ctypes.memmove(to + at, source + at, 16 * MB))
        yield Figure(f"memmove, {threads} threads", rate, "GB/s")
    for threads in _threads():
        rate = _parallel(threads, nbytes, lambda at: _digests(view[at : at + 16 * MB]))
        yield Figure(f"BLAKE3 of blocks of 1 MiB, {threads} threads", rate, "GB/s")


def _files(locked: torch.Tensor) -> Iterator[Figure]:
    """Measure reads from the page cache into page-locked memory."""
    view = locked.numpy().data
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(len(view) // (64 * MB)):
            file.write(os.urandom(64 * MB))
        file.flush()

        def read(at: int) -> None:
            for start in range(at, at + 16 * MB, MB):
                os.preadv(file.fileno(), [view[start : start + MB]], start)

        def both(at: int) -> None:
            read(at)
            _digests(view[at : at + 16 * MB])

        for name, work in (("preadv", read), ("preadv and BLAKE3", both)):
            for threads in _threads():
                yield Figure(f"{name}, {threads} threads", _parallel(threads, len(view), work), "GB/s")


def _digests(view: memoryview) -> None:
    for start in range(0, len(view), MB):
        blake3(view[start : start + MB]).digest()


def _transfers(locked: torch.Tensor, nbytes: int) -> Iterator[Figure]:
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    for step in sorted({MB, 8 * MB, 16 * MB, 64 * MB, nbytes}):

        def copy(step: int = step) -> None:
            for at in range(0, nbytes, step):
                on_device[at : at + step].copy_(locked[at : at + step], non_blocking=True)

        yield Figure(f"to the device, page-locked, pieces of {step // MB} MiB", _rate(nbytes, copy), "GB/s")
    yield Figure(
        "from the device, page-locked", _rate(nbytes, lambda: locked.copy_(on_device, non_blocking=True)), "GB/s"
    )
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    yield Figure("to the device, pageable", _rate(nbytes, lambda: on_device.copy_(pageable)), "GB/s")
    large = _large(nbytes)
    one, two = (torch.empty(large, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    what = f"on the device, {large / 1e9:.1f} GB, counted once"
    yield Figure(what, _rate(large, lambda: one.copy_(two)), "GB/s")


def _launches() -> Iterator[Figure]:
    """Measure the host's cost of one small launch."""
    x, event = torch.zeros(1, device=DEVICE), torch.cuda.Event()
    stream = torch.cuda.Stream()

    def waits() -> None:
        event.record()
        stream.wait_event(event)

    for what, work in (("a kernel", lambda: x.add_(1)), ("an event, and another stream that waits for it", waits)):
        duration = _best(lambda: [work() for _ in range(LAUNCHES)])  # noqa: B023
        yield Figure(f"the host asks for {what}", duration / LAUNCHES * 1e6, "us")
    event = torch.cuda.Event(blocking=True)

    def one() -> None:
        x.add_(1)
        event.record()
        event.synchronize()

    yield Figure("the host waits for a kernel, asleep", _best(one) * 1e6, "us")
    sleep = torch.cuda._sleep
    cycles = 20_000_000
    yield Figure("cycles of torch.cuda._sleep", cycles / _best(lambda: sleep(cycles)) / 1e6, "million a second")


def _locking(nbytes: int) -> Iterator[Figure]:
    """Measure the cost of page-locking, for the caller and for others."""
    runtime = torch.cuda.cudart()
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0, nbytes)
    for piece in sorted({64 * MB, min(nbytes, 256 * MB), nbytes}):
        begins = range(0, nbytes, piece)
        with _beat() as gaps:
            start = time.perf_counter()
            codes = {int(runtime.cudaHostRegister(address + at, min(piece, nbytes - at), 0)) for at in begins}
            duration = time.perf_counter() - start
        for at in begins:
            runtime.cudaHostUnregister(address + at)
        what = f"page-locking in pieces of {piece // MB} MiB"
        if codes != {0}:
            what += f", refused with {codes}"
        yield Figure(what, duration / nbytes * 1e9, "s for each GB")
        yield Figure(f"{what}: another thread's call of CUDA waited", max(gaps) * 1e3, "ms")


def _allocating(nbytes: int) -> Iterator[Figure]:
    torch.cuda.empty_cache()
    large = _large(nbytes)
    with _beat() as gaps:
        start = time.perf_counter()
        memory = torch.empty(large, dtype=torch.uint8, device=DEVICE)
        duration = time.perf_counter() - start
    yield Figure(f"cudaMalloc of {large / 1e9:.1f} GB", duration * 1e3, "ms")
    yield Figure("cudaMalloc: another thread's call of CUDA waited", max(gaps) * 1e3, "ms")
    del memory
    with _beat() as gaps:
        start = time.perf_counter()
        torch.cuda.empty_cache()
        duration = time.perf_counter() - start
    yield Figure(f"cudaFree of {large / 1e9:.1f} GB", duration * 1e3, "ms")
    yield Figure("cudaFree: another thread's call of CUDA waited", max(gaps) * 1e3, "ms")


@contextmanager
def _beat() -> Iterator[list[float]]:
    """Let a thread request small kernels and events during the block, and collect the seconds of each."""
    gaps, stop, ready = [0.0], threading.Event(), threading.Event()

    def run() -> None:
        x = torch.zeros(1, device=DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                start = time.perf_counter()
                x.add_(1)
                torch.cuda.current_stream().record_event().query()
                if ready.is_set():
                    gaps.append(time.perf_counter() - start)
                ready.set()
                time.sleep(0.0005)

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield gaps
    finally:
        stop.set()
        thread.join()


def _threads() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return sorted({count for count in (1, 4, 8, 12, 16) if count <= cores} | {cores})


def _large(nbytes: int) -> int:
    """Return the size of a buffer that is large for the device, and fits twice."""
    return int(min(16 * nbytes, torch.cuda.mem_get_info()[0] // 4))


def _parallel(threads: int, nbytes: int, work: Callable[[int], object]) -> float:
    """Return the GB/s of several threads, each with pieces of 16 MiB."""
    with ThreadPoolExecutor(threads) as pool:

        def once() -> float:
            start = time.perf_counter()
            list(pool.map(work, range(0, nbytes, 16 * MB)))
            return time.perf_counter() - start

        return nbytes / min(once() for _ in range(2)) / 1e9


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    return nbytes / _best(work) / 1e9


def _best(work: Callable[[], object]) -> float:
    """Return the seconds until the device is done, the minimum of some rounds."""
    durations = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return min(durations)


def main(path: Path, megabytes: int) -> None:
    measured = []
    for figure in figures(megabytes * MB):
        print(f"{figure.what}: {figure.value:.4g} {figure.unit}", flush=True)
        measured.append(figure._asdict())
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(measured, indent=1))
        temporary.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1024)
