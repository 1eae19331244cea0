"""Recording of CUDA graphs in torch's streams of priority -2: their kernels run before calls that are not captured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from threading import Lock, RLock
from typing import Any

import torch

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.memory.device import Stream
from weightswap_runtime.memory.device.torch_device import Accelerator
from weightswap_runtime.threads.garbage import without_garbage_collection

from .replays import Passing

_PRIORITY = -2  # torch's own code and most applications use no streams of this priority
MOST_STREAMS = 32  # of one priority in torch
WARM_UPS = 2  # in their first calls libraries allocate and choose kernels, which a capture does not allow
_capturing = RLock()  # torch's generator of a device knows of one capture at a time; a signal handler may call a model
_failed: list[torch.cuda.CUDAGraph] = []  # kept alive, as torch's host allocator never stops querying them


class NoStream(Passing):
    """Every stream of the device is used by a session that captures."""

    def __init__(self) -> None:
        streams = f"all of torch's {MOST_STREAMS} streams of priority {_PRIORITY}"
        super().__init__(f"{streams} are taken by sessions that capture; close some")


class _StreamLease:
    """A stream that nobody else captures in, as long as this object lives."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream


class _Replay:
    """A graph. Its destructor drops cuBLAS's memory of the stream, so it must run before the stream is leased again."""

    def __init__(self, graph: torch.cuda.CUDAGraph, lease: _StreamLease) -> None:
        self._graph = graph
        self._lease = lease
        self._replay = graph.replay

    def __call__(self) -> None:
        self._replay()

    def __del__(self) -> None:
        del self._replay, self._graph


class CaptureStreams:
    """Streams of one device, each leased to one session at a time, and one shared stream for warm-ups.

    A graph keeps the scratch memory of cuBLAS for the recording thread and stream. If two sessions shared a stream,
    their replays, which are not in order with each other, would share that memory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._lock = Lock()
        self._free: list[Stream] = []
        self._used_ids: set[int] = set()
        self._torch = accelerator.torch
        self.warm_up = self._new()
        self.repairs = self._new()

    def take(self) -> _StreamLease:
        """Lease a stream. Raises NoStream."""
        with self._lock:
            lease = _StreamLease(self._free.pop() if self._free else self._new())
        weakref.finalize(lease, self._free.append, lease.stream).atexit = False
        return lease

    def _new(self) -> Stream:
        for _ in range(MOST_STREAMS):
            stream = torch.cuda.Stream(self._torch, priority=_PRIORITY)  # type: ignore[no-untyped-call]
            if stream.stream_id not in self._used_ids:  # torch hands them out round-robin
                self._used_ids.add(stream.stream_id)
                return stream
        raise NoStream


_streams: dict[int, CaptureStreams] = {}
_creating = Lock()


def streams_of(accelerator: Accelerator) -> CaptureStreams:
    """Return the streams of a device, which all models share."""
    with _creating:
        if accelerator.index not in _streams:
            _streams[accelerator.index] = CaptureStreams(accelerator)
        return _streams[accelerator.index]


class CudaRecorder:
    """Records in a stream of its own. Its graphs share scratch memory, and must be replayed one after another."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Raises Unsupported on a device other than CUDA."""
        if accelerator.torch.type != "cuda":
            raise Unsupported(f"cuda_graphs on the device {accelerator.name!r}: CUDA graphs need a CUDA device")
        self._accelerator = accelerator
        self._streams = streams_of(accelerator)
        self._pool = torch.cuda.graph_pool_handle()

    @cached_property
    def _lease(self) -> _StreamLease:
        return self._streams.take()

    def record(self, function: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        """Warm the function up, then record it. Unlike with `torch.cuda.graph`, other threads and streams keep running.

        Returns a function that replays it in the current stream, and the tensors that then hold its results.
        """
        outer = self._accelerator.current()
        with _capturing:
            stream = self._lease.stream
            self._warm_up(function, outer)
            with self._accelerator.on(stream), without_garbage_collection():  # which may unload kernels
                try:
                    return self._capture(function)
                finally:
                    self._accelerator.wait(outer, self._accelerator.mark(stream))

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = self._accelerator.current()
        for tensor in tensors:
            tensor.record_stream(stream)

    def _warm_up(self, function: Callable[[], list[Any]], outer: Stream) -> None:
        """Run in a stream that all recorders share: torch's allocator caches memory per stream."""
        stream = self._streams.warm_up
        with self._accelerator.on(stream):
            self._accelerator.wait(stream, self._accelerator.mark(outer))
            try:
                for _ in range(WARM_UPS):
                    function()
                self._accelerator.finish(self._accelerator.mark(stream))
            finally:
                self._accelerator.wait(outer, self._accelerator.mark(stream))

    def _capture(self, function: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            outputs = function()
            graph.capture_end()
        except BaseException:
            self._recover(graph)
            raise
        return _Replay(graph, self._lease), outputs

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed: `capture_end` raises before it has reset the allocator and the generator.

        Otherwise no memory that was lent to a stream would ever be freed, every other capture with this pool would
        fail, and, in torch 2.11, so would every random number.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            _failed.append(graph)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._accelerator.index, self._pool)
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self._accelerator.index, self._pool)
        else:  # the capture was valid, and `function` raised an error of its own
            graph.reset()
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            self._capture_nothing()

    def _capture_nothing(self) -> None:
        """Capture successfully, which resets the generator.

        The stream is one in which nothing else is captured: with the graph, torch drops cuBLAS's memory of the stream.
        """
        with self._accelerator.on(self._streams.repairs):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._accelerator.torch)  # torch warns of an empty one
            graph.capture_end()
