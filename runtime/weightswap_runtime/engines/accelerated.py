"""The engine `torch` on an accelerator. What it is asked for is done later, in order by streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from weightswap_runtime.arena import Arena
from weightswap_runtime.artifact import Artifact
from weightswap_runtime.contents import Content
from weightswap_runtime.devices.accelerator import Accelerator, TorchBuffer, open_accelerator
from weightswap_runtime.devices.arena import DeviceArena
from weightswap_runtime.goldens import Environment
from weightswap_runtime.plainly import plainly

from . import AUTO, Bound, CudaGraphs
from .callers import check_plain, uncompiled
from .captures import Captures, Recorder, Shapes
from .graph_calls import Call
from .shapes import samples
from .torch import BoundTorch, TorchEngine, put_state, sparse

_CPU = torch.device("cpu")
Move = Callable[[torch.Tensor], torch.Tensor]


class AcceleratedEngine(TorchEngine):
    """The graphs of one artifact on an accelerator."""

    def __init__(
        self,
        artifact: Artifact,
        device: str,
        *,
        prologue: bool = True,
        on_host: bool = False,
        cuda_graphs: CudaGraphs | None = None,
    ) -> None:
        """on_host: weights that wait for their commit in host memory can be tried there.

        Raises ArtifactError, and Unsupported for shapes that no method has.
        """
        self._accelerator = open_accelerator(device)
        self.device = self._accelerator.torch
        with self._accelerator.on(self._accelerator.staging):
            super().__init__(artifact, prologue=prologue)
        self._shapes: Shapes | None = None
        if cuda_graphs is not None:
            with self._accelerator.on(self._accelerator.staging):
                named = list(samples(cuda_graphs, artifact.manifest, self.device))
            self._shapes = Shapes(named, auto=cuda_graphs == AUTO)
            self._new_recorder()  # so that a device without them is refused now
        self._host = TorchEngine(artifact, prologue=prologue) if on_host else None

    def misplaced(self, value: torch.Tensor) -> str | None:  # type: ignore[override]
        """What is wrong with an input beside dtype and shape."""
        if value.device != self.device:
            return (
                f"expected a tensor on {self.device}, got one on {value.device}: move it with .to({str(self.device)!r})"
            )
        return sparse(value)

    def bind(self, arena: Arena) -> Bound:
        """As on the CPU; weights in host memory are for trials, and run there."""
        if isinstance(arena, DeviceArena):
            return super().bind(arena)
        assert self._host is not None
        return OnHost(self._host.bind(arena), self._placed, self._fetched)

    def _flat(self, arena: Arena, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        assert isinstance(arena, DeviceArena)
        assert isinstance(arena.buffer, TorchBuffer)
        storage = arena.buffer.tensor.untyped_storage()
        flat = torch.empty(0, dtype=dtype, device=self.device)
        return flat.set_(storage, offset // dtype.itemsize, (count,), (1,))

    def _bound(
        self,
        calls: Mapping[str, Call],
        state: list[tuple[torch.Tensor, torch.Tensor]],
        arena: Arena,
        owned: list[torch.Tensor],
    ) -> BoundTorch:
        assert isinstance(arena, DeviceArena)
        bound = BoundAccelerated(calls, state, arena, owned, self._accelerator)
        if self._shapes is not None and arena.serves:
            bound.capture(self._new_recorder(), self._shapes)
        return bound

    def _new_recorder(self) -> Recorder:
        from weightswap_runtime.devices.cuda_graphs import CudaRecorder

        return CudaRecorder(self._accelerator)

    def tensor(self, content: Content) -> torch.Tensor:  # type: ignore[override]
        """A tensor on the device."""
        return self._placed(super().tensor(content))

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the device, through page-locked memory: from other memory, the whole device would wait."""
        try:
            value = value.pin_memory()
        except RuntimeError:  # none can be locked
            return value.to(self.device)
        return value.to(self.device, non_blocking=True)

    def content(self, value: torch.Tensor) -> Content:  # type: ignore[override]
        """What is in a tensor of the device, copied."""
        return super().content(self._fetched(value))

    def _fetched(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory, once the device is done; any memory where none can be locked."""
        plain = value.detach().resolve_conj().resolve_neg()
        try:
            copy = torch.empty_like(plain, device=_CPU, pin_memory=True)
        except RuntimeError:
            return plain.cpu()
        copy.copy_(plain, non_blocking=True)
        self._accelerator.finish(self._accelerator.mark(self._accelerator.current()))
        return copy

    def environment(self) -> Environment | None:  # type: ignore[override]
        """What decides the last bits of an output."""
        return Environment(
            torch=str(torch.__version__),
            device=self.device.type,
            capability=self._accelerator.capability,
            threads=0,
        )

    @contextmanager
    def plainly(self) -> Iterator[None]:  # type: ignore[override]
        """As on the CPU, and in a stream that no call is in."""
        with plainly(), self._accelerator.on(self._accelerator.staging):
            yield


class BoundAccelerated(BoundTorch):
    """All methods over one arena of a device. Safe to call from any number of threads, in any stream."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        state: list[tuple[torch.Tensor, torch.Tensor]],
        arena: DeviceArena,
        owned: list[torch.Tensor],
        accelerator: Accelerator,
    ) -> None:
        super().__init__(calls, state, arena, owned)
        self._arena = arena
        self._accelerator = accelerator
        self._lent: set[int] = set()
        self._own = owned
        self._changed: torch.Event | None = None  # when the state was read or written last
        self._captures: Captures | None = None

    def capture(self, recorder: Recorder, shapes: Shapes) -> None:
        """Let calls be captured, those of named shapes as soon as there are weights."""
        self._captures = Captures(self._accelerator, recorder, shapes, super().run, self._state_undone)

    @uncompiled
    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs, in the thread's current stream."""
        check_plain(method, inputs)  # before anything is replayed, or given to another stream
        self._arena.use()
        self._lend()
        if not self._calls[method].stateful:
            return self._run(method, inputs)
        with self._in_turn():
            return self._run(method, inputs)

    def _run(self, method: str, inputs: list[Any]) -> list[Any]:
        # what a caller's autocast changes was not captured
        if self._captures is not None and not torch.is_autocast_enabled(self._accelerator.torch.type):
            found = self._captures.replay(method, inputs)
            if found is not None:
                return found
        return super().run(method, inputs)

    @contextmanager
    def _state_undone(self) -> Iterator[None]:
        """A block whose calls leave no traces; nobody else is in a call that does."""
        with self._in_turn():
            before = [live.clone() for live, _ in self._state]
            try:
                yield
            finally:
                for (live, _), value in zip(self._state, before, strict=True):
                    put_state(live, value)

    def _lend(self) -> None:
        """Let this stream use what is not in the arena: constants, state, and what was computed from weights."""
        key = self._accelerator.current_key()
        if key not in self._lent:
            stream = self._accelerator.current()
            for tensor in (*self._own, *(value for call in self._calls.values() for value in call.hoisted)):
                tensor.record_stream(stream)
            self._lent.add(key)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Calls that change the state do so one after the other, also where their streams differ."""
        with self._state_lock:
            stream = self._accelerator.current()
            if self._changed is not None:
                stream.wait_event(self._changed)
            try:
                yield
            finally:
                self._changed = self._accelerator.mark(stream)

    def _reset(self) -> None:
        self._arena.use()
        self._lend()
        with self._in_turn():
            super()._reset()

    def _renew(self) -> None:
        """After a fork: the device is the parent's alone."""
        self._state_lock = RLock()

    def prepare(self) -> None:
        """After new weights came to the arena: compute what depends on them alone, and capture what was named."""
        super().prepare()
        if self._captures is not None:
            self._captures.capture_named()

    def adopt(self, other: Bound) -> bool:
        """As on the CPU; the other's memory is kept until the copies are done."""
        if isinstance(other, BoundAccelerated):
            other._lend()
        return super().adopt(other)

    def _prepare(self) -> None:
        super()._prepare()
        self._lent.clear()


class OnHost:
    """Weights that wait in host memory, tried there: inputs come from the device, and outputs go to it."""

    def __init__(self, bound: Bound, placed: Move, fetched: Move) -> None:
        self._bound = bound
        self._placed = placed
        self._fetched = fetched
        self.prepare = bound.prepare
        self.adopt = bound.adopt
        self.keep = bound.keep
        self.reset_state = bound.reset_state

    @uncompiled
    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs, both on the device."""
        return _moved(self._placed, self._bound.run(method, _moved(self._fetched, inputs)))

    @property
    def has_prologue(self) -> bool:
        return self._bound.has_prologue

    @property
    def has_state(self) -> bool:
        return self._bound.has_state


def _moved(move: Move, values: list[Any]) -> list[Any]:
    return [move(value) if isinstance(value, torch.Tensor) else value for value in values]
