"""CUDA graphs: calls of recurring shapes are recorded once and replayed, so the host does not launch each kernel anew.

A replay reads and writes the addresses of the recording. The weights of a session keep theirs, so its graphs stay valid
when new weights are copied there; inputs are copied to where a graph expects them, and its outputs are copied out.
`Shapes` says which calls to record, `Captures` has a session's recordings and replays them, `CudaRecorder` makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightswap_runtime.errors import Unsupported, lacks_memory
from weightswap_runtime.memory.device_arena import check_not_capturing
from weightswap_runtime.memory.torch_device import Accelerator, is_ours, lend_stream
from weightswap_runtime.threads import without_garbage_collection
from weightswap_runtime.torch_tensors import default_torch_modes

from .torch_calls import writes_to

MOST = 64  # shapes that are captured at most, unless they are named: each keeps its inputs, outputs and kernels
_PRIORITY = 0  # of replayed kernels, as of those of other calls
WARM_UPS = 2  # in their first calls libraries allocate and choose kernels, which a capture does not allow
_log = logging.getLogger("weightswap.captures")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging

Inputs = list[Any]  # flat inputs of a method
Function = Callable[[], list[Any]]
Recorded = tuple[Callable[[], object], list[Any]]


class Shapes:
    """Shapes of methods' inputs that are captured; shared by all sessions of an engine."""

    def __init__(self, named: Iterable[tuple[str, Inputs]], auto: bool) -> None:
        """named: methods with flat inputs. auto: shapes of calls are captured, too, up to MOST shapes in all."""
        self._auto = auto
        self.samples: dict[Hashable, tuple[str, Inputs]] = {key_of(*sample): sample for sample in named}
        self.failures: dict[Hashable, str] = {}
        self._passing: set[Hashable] = set()

    def should_capture(self, key: Hashable) -> bool:
        """Return whether to capture calls of these shapes."""
        if key in self.failures:
            return False
        return key in self.samples or (self._auto and len(self.samples) < MOST)

    def note(self, key: Hashable, method: str, inputs: Inputs) -> None:
        """Remember a shape, so that other sessions capture it, too. Values do not matter."""
        if key not in self.samples:
            self.samples[key] = method, [_like(value) for value in inputs]

    def failed(self, key: Hashable, method: str, reason: str, passing: bool) -> None:
        """Remember that a shape cannot be captured; if passing, only until `try_again`."""
        self.failures[key] = reason
        if passing:
            self._passing.add(key)
        _log.warning("%s: calls run without a CUDA graph: %s", method, reason)

    def try_again(self) -> None:
        """Forget failures that were due to a lack of memory."""
        while self._passing:
            self.failures.pop(self._passing.pop(), None)


def key_of(method: str, inputs: Inputs) -> Hashable:
    """Return a key that is equal for calls that one capture can replay."""
    return method, *[(x.shape, x.stride()) if isinstance(x, torch.Tensor) else (type(x), x) for x in inputs]


class _CapturedCall(NamedTuple):
    """A recorded call."""

    inputs: Inputs  # the memory that it reads
    outputs: list[Any]
    replay: Callable[[], object]
    written: list[int]  # indices of inputs that it writes to
    streams: set[int]  # keys of the streams that the memory of the inputs was lent to


class Captures:
    """The captured calls of one session. They share scratch memory, so each replay waits for the previous one."""

    def __init__(
        self, device: Accelerator, recorder: CudaRecorder, shapes: Shapes, run: Callable[[str, Inputs], list[Any]]
    ) -> None:
        """run: function that runs a method on flat inputs."""
        self._device = device
        self._recorder = recorder
        self._shapes = shapes
        self._run = run
        self._lock = RLock()  # a signal handler may call the model
        self._captured: dict[Hashable, _CapturedCall] = {}
        # the stream of the last replay: one of torch's, which are never destroyed
        self._last, self._last_key = device.current(), device.current_key()

    def try_again(self) -> None:
        """Let the next calls try the captures again that failed for lack of memory."""
        self._shapes.try_again()

    def capture_named(self) -> None:
        """Capture the shapes that are named or that other sessions have captured."""
        self.try_again()
        for key, (method, inputs) in list(self._shapes.samples.items()):
            if key not in self._captured and key not in self._shapes.failures:
                self._capture(key, method, inputs)

    def replay(self, method: str, inputs: Inputs) -> list[Any] | None:
        """Replay a call in the current stream and return copies of its outputs; None if such calls are not captured."""
        key = key_of(method, inputs)
        captured = self._captured.get(key)
        if captured is None and self._shapes.should_capture(key):
            captured = self._capture(key, method, inputs)
        if captured is None:
            return None
        with self._lock, torch.no_grad():  # until the outputs are copied: the next replay writes to the same memory
            self._follow()
            self._lend(captured)
            _fill(captured.inputs, inputs)
            captured.replay()
            for index in captured.written:
                inputs[index].copy_(captured.inputs[index])
            return [value.clone() if isinstance(value, torch.Tensor) else value for value in captured.outputs]

    def _follow(self) -> None:
        """Let the current stream wait for the last replay, if that was in another stream."""
        if (key := self._device.current_key()) != self._last_key:
            check_not_capturing(self._device, self._last)
            stream = self._device.current()
            self._device.wait(stream, self._device.mark(self._last))
            self._last, self._last_key = stream, key

    def _lend(self, captured: _CapturedCall) -> None:
        key = self._device.current_key()
        if key not in captured.streams:
            self._recorder.lend(value for value in captured.inputs if isinstance(value, torch.Tensor))
            captured.streams.add(key)

    def _capture(self, key: Hashable, method: str, inputs: Inputs) -> _CapturedCall | None:
        """Record a call, or remember why that fails: a call that cannot be captured runs as it would without this."""
        last = _LastOperator()  # type: ignore[no-untyped-call]
        try:
            with default_torch_modes(), self._lock:
                if key not in self._captured and key not in self._shapes.failures:
                    self._captured[key] = self._record(method, inputs, last)
                    self._shapes.note(key, method, inputs)
        except Exception as error:
            reason = f"{last.name}: {type(error).__name__}: {error}"
            self._shapes.failed(key, method, reason, passing=lacks_memory(error))
        return self._captured.get(key)

    def _record(self, method: str, inputs: Inputs, last: _LastOperator) -> _CapturedCall:
        self._follow()
        static = [_like(value) for value in inputs]
        _fill(static, inputs)  # raises if elements of an input overlap
        versions = [writes_to(value) for value in static]
        with last:
            replay, outputs = self._recorder.record(lambda: self._run(method, static))
        written = [index for index, value in enumerate(static) if writes_to(value) != versions[index]]
        return _CapturedCall(static, outputs, replay, written, set())


def _like(value: Any) -> Any:
    """Return zeros in the tensor's strides, on which kernels depend. Other values are returned as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()


def _fill(static: Inputs, inputs: Inputs) -> None:
    for target, value in zip(static, inputs, strict=True):
        if isinstance(value, torch.Tensor):
            target.copy_(value)


class _LastOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the operator that was called last, for the message if it cannot be captured."""

    name = "before the first operator"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


_capturing = RLock()  # torch's generator of a device knows of one capture at a time; a signal handler may call a model
_failed: list[torch.cuda.CUDAGraph] = []  # kept alive, as torch's host allocator never stops querying them


class CudaRecorder:
    """Records in a stream of its own. Its graphs share scratch memory, and must be replayed one after another."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Raises Unsupported on a device other than CUDA."""
        if accelerator.torch.type != "cuda":
            raise Unsupported(f"cuda_graphs on the device {accelerator.name!r}: CUDA graphs need a CUDA device")
        self._accelerator = accelerator
        self._stream = OwnStream(accelerator)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Function) -> Recorded:
        """Warm the function up, then record it. Unlike with `torch.cuda.graph`, other threads and streams keep running.

        Returns a function that replays it in the current stream, and must follow the previous replay, and the tensors
        that then hold its results.
        """
        outer = self._accelerator.current()
        with _capturing:
            stream = self._stream.stream
            self._warm_up(function, outer)
            with self._accelerator.on(stream), without_garbage_collection():  # which may unload kernels
                try:
                    return self._capture(function)
                finally:
                    self._accelerator.wait(outer, self._accelerator.mark(stream))

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors, once they are dropped, until the current stream has done its work until then."""
        stream = self._accelerator.current()
        for tensor in tensors:
            tensor.record_stream(stream)

    def _warm_up(self, function: Function, outer: torch.Stream) -> None:
        """Run in a stream that all recorders share: torch's allocator caches memory per stream."""
        stream = _shared_stream("warm-ups", self._accelerator)
        with self._accelerator.on(stream):
            self._accelerator.wait(stream, self._accelerator.mark(outer))
            try:
                for _ in range(WARM_UPS):
                    function()
                self._accelerator.finish(self._accelerator.mark(stream))
            finally:
                self._accelerator.wait(outer, self._accelerator.mark(stream))

    def _capture(self, function: Function) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": other threads may allocate and synchronize meanwhile, as calls and swaps do
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            outputs = function()
            graph.capture_end()
        except BaseException:
            self._recover(graph)
            raise
        return _Replay(graph, self._stream), outputs

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
        with self._accelerator.on(_shared_stream("repairs", self._accelerator)):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._accelerator.torch)  # torch warns of an empty one
            graph.capture_end()


class _Replay:
    """A graph. Its destructor drops cuBLAS's memory of the stream, so it must run before the stream is lent again."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: OwnStream) -> None:
        self._graph = graph
        self._stream = stream
        self._replay = graph.replay

    def __call__(self) -> None:
        self._replay()

    def __del__(self) -> None:
        del self._replay, self._graph


class OwnStream:
    """A stream in which nobody else captures, as long as this object lives.

    A graph keeps the scratch memory of cuBLAS for the recording thread and stream. If two sessions shared a stream,
    their replays, which are not in order with each other, would share that memory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Raises Unsupported where only torch itself can create streams, as it deals the same ones to others."""
        # not one that was used for something else, in which cuBLAS may have memory that is not the graph's
        self.stream: torch.Stream = lend_stream(self, accelerator.torch, _PRIORITY, "captures")
        if not is_ours(self.stream.stream_id):
            raise Unsupported(
                "cuda_graphs: CUDA creates no stream that is ours alone; it may be linked into this build of torch"
            )


_shared: dict[tuple[str, int], OwnStream] = {}


def _shared_stream(purpose: str, accelerator: Accelerator) -> torch.Stream:
    """Return a stream of a device that all recorders share, one at a time."""
    key = purpose, accelerator.index
    if key not in _shared:
        _shared[key] = OwnStream(accelerator)
    return _shared[key].stream
