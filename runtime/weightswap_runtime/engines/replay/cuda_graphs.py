"""Recording with CUDA graphs, which run in torch's streams of priority -2: before calls that are not captured."""

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

_APART = -2  # a priority that torch's own code and most applications do not ask for
MOST_STREAMS = 32  # torch has no more of one priority
WARM_UPS = 2  # libraries allocate and choose in first calls, which a capture does not allow
_capturing = RLock()  # torch's generator of a device knows of one capture at a time; a signal handler may call a model
_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator for the host never stops asking them about streams


class NoStream(Passing):
    """As many sessions capture on the device as there are streams."""

    def __init__(self) -> None:
        super().__init__(
            f"all of torch's {MOST_STREAMS} streams of priority {_APART} are taken by sessions that capture; close some"
        )


class _Taken:
    """A stream that nobody else captures in."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream


class _Replay:
    """A graph. At its end torch drops what cuBLAS has in the stream, so that nobody else may have that sooner."""

    def __init__(self, graph: torch.cuda.CUDAGraph, taken: _Taken) -> None:
        self._graph = graph
        self._taken = taken
        self._replay = graph.replay

    def __call__(self) -> None:
        self._replay()

    def __del__(self) -> None:
        del self._replay, self._graph


class CaptureStreams:
    """Streams of one device that each belong to one session at a time, and one that all warm up in.

    A graph keeps the scratch memory that cuBLAS has for the recording thread and stream. Were the stream another
    session's, too, then replays that do not follow one another would share that memory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._lock = Lock()
        self._free: list[Stream] = []
        self._handed: set[int] = set()
        self._torch = accelerator.torch
        self.warm_up = self._new()
        self.repairs = self._new()

    def take(self) -> _Taken:
        """A stream for as long as what is returned lives. Raises NoStream."""
        with self._lock:
            taken = _Taken(self._free.pop() if self._free else self._new())
        weakref.finalize(taken, self._free.append, taken.stream).atexit = False
        return taken

    def _new(self) -> Stream:
        for _ in range(MOST_STREAMS):
            stream = torch.cuda.Stream(self._torch, priority=_APART)  # type: ignore[no-untyped-call]
            if stream.stream_id not in self._handed:  # torch hands them out in turn, and begins again
                self._handed.add(stream.stream_id)
                return stream
        raise NoStream


_streams: dict[int, CaptureStreams] = {}
_making = Lock()


def streams_of(accelerator: Accelerator) -> CaptureStreams:
    """Those of a device, for all models."""
    with _making:
        if accelerator.index not in _streams:
            _streams[accelerator.index] = CaptureStreams(accelerator)
        return _streams[accelerator.index]


class CudaRecorder:
    """Records in a stream of its own. All its graphs share scratch memory, and must be replayed one after the other."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Raises Unsupported on another device than CUDA."""
        if accelerator.torch.type != "cuda":
            raise Unsupported(f"cuda_graphs on the device {accelerator.name!r}: they are CUDA's")
        self._accelerator = accelerator
        self._streams = streams_of(accelerator)
        self._pool = torch.cuda.graph_pool_handle()

    @cached_property
    def _taken(self) -> _Taken:
        return self._streams.take()

    def record(self, function: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        """Run the function, then record it. Other threads and streams go on meanwhile, unlike with `torch.cuda.graph`.

        Returns what replays it in the current stream, and the tensors in which its results are then.
        """
        outer = self._accelerator.current()
        with _capturing:
            stream = self._taken.stream
            self._warm_up(function, outer)
            with self._accelerator.on(stream), without_garbage_collection():  # it may ask CUDA to unload what it drops
                try:
                    return self._capture(function)
                finally:
                    self._accelerator.wait(outer, self._accelerator.mark(stream))

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = self._accelerator.current()
        for tensor in tensors:
            tensor.record_stream(stream)

    def _warm_up(self, function: Callable[[], list[Any]], outer: Stream) -> None:
        """In a stream that all recorders share, as what torch's allocator keeps for one it gives to no other."""
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
        return _Replay(graph, self._taken), outputs

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed: `capture_end` raises before it has told the allocator and the generator.

        That would keep all memory that was lent to a stream from ever being freed, refuse every other capture with this
        pool, and, in torch 2.11, every random number.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            _failed.append(graph)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._accelerator.index, self._pool)
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self._accelerator.index, self._pool)
        else:  # in order, as where `function` raised an error of its own
            graph.reset()
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            self._capture_nothing()

    def _capture_nothing(self) -> None:
        """A capture that succeeds, after which the generator knows of none.

        In a stream in which nothing else is captured: with the graph, torch drops what cuBLAS has there.
        """
        with self._accelerator.on(self._streams.repairs):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._accelerator.torch)  # torch warns of an empty one
            graph.capture_end()
