"""Calls that are captured once for their inputs' shapes, and then replayed over the same addresses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightswap_runtime.errors import lacks_memory
from weightswap_runtime.memory.device import Device
from weightswap_runtime.memory.device.capturing import check_not_capturing
from weightswap_runtime.tensors.torch_modes import default_torch_modes

MOST = 64  # shapes that are captured at most, unless they are named
_log = logging.getLogger("weightswap.captures")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging
Function = Callable[[], list[Any]]
Inputs = list[Any]
Run = Callable[[str, Inputs], list[Any]]


class Passing(Exception):
    """A call cannot be captured now, but perhaps after the next swap."""


class GraphRecorder(Protocol):
    """Records the work that a function enqueues on a device."""

    def record(self, function: Function) -> tuple[Callable[[], object], list[Any]]:
        """Run the function several times. Return a function that replays its work, and the tensors with its results.

        A replay runs in the current stream, and must follow the previous one.
        """
        ...

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors, once they are dropped, until the current stream has done its work until then."""
        ...


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
        """Forget failures that were due to a lack of memory or streams."""
        while self._passing:
            self.failures.pop(self._passing.pop(), None)


def key_of(method: str, inputs: Inputs) -> Hashable:
    """Return a key that is equal for calls that one capture can replay."""
    return method, *[(x.shape, x.stride()) if isinstance(x, torch.Tensor) else (type(x), x) for x in inputs]


class _CapturedCall(NamedTuple):
    """A recorded call. `inputs` is the memory that it reads; `written` are the indices of inputs that it writes to.

    streams: the keys of the streams that this memory was lent to.
    """

    inputs: Inputs
    outputs: list[Any]
    replay: Callable[[], object]
    written: list[int]
    streams: set[int]


class Captures:
    """The captured calls of one session. They share scratch memory, so each replay waits for the previous one."""

    def __init__(self, device: Device, recorder: GraphRecorder, shapes: Shapes, run: Run) -> None:
        """run: function that runs a method on flat inputs."""
        self._device = device
        self._recorder = recorder
        self._shapes = shapes
        self._run = run
        self._lock = RLock()
        self._captured: dict[Hashable, _CapturedCall] = {}
        self._last = device.current()  # the stream of the last replay: one of torch's, which are never destroyed

    def try_again(self) -> None:
        """Let the next calls try the captures again that failed for lack of memory or streams."""
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
        with self._lock, torch.no_grad():
            self._follow()
            self._lend(captured)
            _fill(captured.inputs, inputs)
            captured.replay()
            for index in captured.written:
                inputs[index].copy_(captured.inputs[index])
            return [_copied(value) for value in captured.outputs]

    def _follow(self) -> None:
        """Let the current stream wait for the last replay, if that was in another stream."""
        stream, last = self._device.current(), self._last
        if stream != last:
            check_not_capturing(self._device, last)
            self._device.wait(stream, self._device.mark(last))
            self._last = stream

    def _lend(self, captured: _CapturedCall) -> None:
        key = self._device.current_key()
        if key not in captured.streams:
            self._recorder.lend(value for value in captured.inputs if isinstance(value, torch.Tensor))
            captured.streams.add(key)

    def _capture(self, key: Hashable, method: str, inputs: Inputs) -> _CapturedCall | None:
        last = _LastOperator()  # type: ignore[no-untyped-call]
        try:
            with default_torch_modes(), self._lock:
                if key not in self._captured and key not in self._shapes.failures:
                    self._captured[key] = self._record(method, inputs, last)
                    self._shapes.note(key, method, inputs)
        except Exception as error:
            passing = isinstance(error, Passing) or lacks_memory(error)
            self._shapes.failed(key, method, f"{last.name}: {type(error).__name__}: {error}", passing)
        return self._captured.get(key)

    def _record(self, method: str, inputs: Inputs, last: _LastOperator) -> _CapturedCall:
        self._follow()
        static = [_like(value) for value in inputs]
        _fill(static, inputs)  # raises if elements of an input overlap
        versions = [_version(value) for value in static]
        with last:
            replay, outputs = self._recorder.record(lambda: self._run(method, static))
        written = [index for index, value in enumerate(static) if _version(value) != versions[index]]
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


def _version(value: Any) -> int:
    """Return a counter of writes to a tensor."""
    return int(value._version) if isinstance(value, torch.Tensor) else 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _LastOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the operator that was called last."""

    name = "before the first operator"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))
