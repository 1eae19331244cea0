"""Recording with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch

from weightswap_runtime.errors import Unsupported

from .accelerator import Accelerator

WARM_UPS = 2  # libraries allocate and choose in first calls, which a capture does not allow
_capturing = Lock()  # CUDA captures one graph at a time


class CudaRecorder:
    """Records in a stream of its own. All its graphs share scratch memory, and must be replayed one after the other."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Raises Unsupported on another device than CUDA."""
        if accelerator.torch.type != "cuda":
            raise Unsupported(f"cuda_graphs on the device {accelerator.name!r}: they are CUDA's")
        self._accelerator = accelerator
        self._stream = accelerator.captures
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        """Run the function, then record it. Other threads and streams go on meanwhile, unlike with `torch.cuda.graph`.

        Returns what replays it in the current stream, and the tensors in which its results are then.
        """
        outer = self._accelerator.current()
        graph = torch.cuda.CUDAGraph()
        with _capturing, self._accelerator.on(self._stream):
            self._accelerator.wait(self._stream, self._accelerator.mark(outer))
            for _ in range(WARM_UPS):
                function()
            self._accelerator.finish(self._accelerator.mark(self._stream))
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = function()
            finally:
                graph.capture_end()
        self._accelerator.wait(outer, self._accelerator.mark(self._stream))
        return graph.replay, outputs
