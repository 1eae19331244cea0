"""Recording with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Any

import torch

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.memory.device import Stream
from weightswap_runtime.memory.device.torch_device import Accelerator

WARM_UPS = 2  # libraries allocate and choose in first calls, which a capture does not allow
_capturing = Lock()  # torch's random generator of a device knows of one capture at a time
_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator for the host never stops asking them about streams


class CudaRecorder:
    """Records in a stream of its own. All its graphs share scratch memory, and must be replayed one after the other.

    A graph keeps the scratch memory that cuBLAS has for the recording thread and stream. Were the stream another
    recorder's, too, then replays that do not follow one another would share that memory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Raises Unsupported on another device than CUDA."""
        if accelerator.torch.type != "cuda":
            raise Unsupported(f"cuda_graphs on the device {accelerator.name!r}: they are CUDA's")
        self._accelerator = accelerator
        self._pool = torch.cuda.graph_pool_handle()

    @cached_property
    def _stream(self) -> Stream:
        return self._accelerator.stream_apart()

    def record(self, function: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        """Run the function, then record it. Other threads and streams go on meanwhile, unlike with `torch.cuda.graph`.

        Returns what replays it in the current stream, and the tensors in which its results are then.
        """
        outer = self._accelerator.current()
        with _capturing:
            self._warm_up(function, outer)
            with self._accelerator.on(self._stream):
                try:
                    return self._capture(function)
                finally:
                    self._accelerator.wait(outer, self._accelerator.mark(self._stream))

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Once they are dropped, keep their memory until what the current stream was asked for until then is done."""
        stream = self._accelerator.current()
        for tensor in tensors:
            tensor.record_stream(stream)

    def _warm_up(self, function: Callable[[], list[Any]], outer: Stream) -> None:
        """In a stream that all recorders share, as what torch's allocator keeps for one it gives to no other."""
        stream = self._accelerator.captures
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
        return graph.replay, outputs

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
        """A capture that succeeds, after which the generator knows of none."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self._accelerator.torch)  # torch warns of an empty one
        graph.capture_end()
