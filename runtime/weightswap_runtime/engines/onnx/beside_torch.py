"""The engine `onnx` on the CPU for artifacts with ONNX graphs of only some methods: `torch` runs the others.

Both read the same arena. State is kept for ONNX Runtime: a call on `torch` copies the state that its method uses, and
copies the changed state back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weightswap_runtime.engines.engine import Bound, Chosen, State
from weightswap_runtime.errors import MissingExtra
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.memory.arena import Arena

try:
    import torch
except ImportError as error:
    raise MissingExtra("an artifact that lacks ONNX graphs of some methods, on the engine `onnx`,", "torch") from error

from weightswap_runtime.engines.torch.cpu import TorchEngine
from weightswap_runtime.engines.torch.variants import ChosenTensors
from weightswap_runtime.tensors.torch_modes import default_torch_modes

from .engine import BoundOnnx, OnnxChosen, OnnxEngine, OnnxState
from .values import content_array, content_of, value_of


class OnnxBesideTorch(OnnxEngine):
    """The ONNX graphs of one artifact, and the captured graphs of methods without one."""

    def __init__(self, artifact: Artifact, threads: int | None = None, *, prologue: bool = True) -> None:
        """threads: for each call on ONNX Runtime. Raises ArtifactError and Unsupported."""
        super().__init__(artifact, threads)
        self._torch = TorchEngine(_without(artifact, self._graphs), prologue=prologue)

    @property
    def runs(self) -> dict[str, str]:
        runs = super().runs | self._torch.runs
        return {name: runs[name] for name in self._manifest.methods}

    def bind(self, arena: Arena) -> BoundBoth:  # type: ignore[override]
        """Bind both engines to views of the arena."""
        return BoundBoth(super().bind(arena), self._torch.bind(arena), self._torch)

    def variant(self, rows: Iterable[NamedTensor], arena: Arena) -> _Chosen:  # type: ignore[override]
        rows = list(rows)
        return _Chosen(super().variant(rows, arena), self._torch.variant(rows, arena))

    def joined(self, chosen: Iterable[_Chosen]) -> _Chosen:  # type: ignore[override]
        pairs = list(chosen)
        return _Chosen(super().joined(pair.onnx for pair in pairs), self._torch.joined(pair.torch for pair in pairs))


class _Chosen(NamedTuple):
    """The tensors of the variants that a call uses, for both engines."""

    onnx: OnnxChosen
    torch: ChosenTensors


def _without(artifact: Artifact, compiled: Iterable[str]) -> Artifact:
    """Return the artifact without some methods, and with the state of the others alone."""
    manifest = artifact.manifest
    methods = {name: method for name, method in manifest.methods.items() if name not in set(compiled)}
    used = {item.name for method in methods.values() for item in method.inputs if item.kind == "state"}
    state = tuple(row for row in manifest.state if used.intersection(row.names))
    return Artifact(artifact.path, msgspec.structs.replace(manifest, methods=methods, state=state))


class BoundBoth:
    """All methods over one arena, each on its engine."""

    def __init__(self, onnx: BoundOnnx, torch_bound: Bound, engine: TorchEngine) -> None:
        """torch_bound: `engine` bound to the same arena."""
        self._onnx = onnx
        self._torch_bound = torch_bound
        self._engine = engine
        self._methods = frozenset(engine.runs)
        self.run_prologue = torch_bound.run_prologue
        self.keep: Callable[[], Callable[[], None]] = torch_bound.keep

    @property
    def has_prologue(self) -> bool:
        return self._torch_bound.has_prologue

    def copy_prologue_from(self, other: Bound) -> bool:
        return isinstance(other, BoundBoth) and self._torch_bound.copy_prologue_from(other._torch_bound)

    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        assert chosen is None or isinstance(chosen, _Chosen)
        if method not in self._methods:
            return self._onnx.run(method, inputs, state, None if chosen is None else chosen.onnx)
        assert state is None or isinstance(state, OnnxState)
        with default_torch_modes():
            return self._run_beside(method, inputs, state, None if chosen is None else chosen.torch)

    def _run_beside(
        self, method: str, inputs: list[Any], state: OnnxState | None, chosen: ChosenTensors | None
    ) -> list[Any]:
        engine = self._engine
        tensors = [engine.tensor(content_of(value)) if isinstance(value, np.ndarray) else value for value in inputs]
        versions = [_version(value) for value in tensors]
        torch_state = None
        if state is not None:
            torch_state = engine.new_state({name: state.content(name) for name in engine.state_names})
        outputs = self._torch_bound.run(method, tensors, torch_state, chosen)
        results = [
            content_array(engine.content(value)) if isinstance(value, torch.Tensor) else value for value in outputs
        ]
        for array, tensor, version in zip(inputs, tensors, versions, strict=True):
            if _version(tensor) != version:  # the graph has written to it
                array[...] = content_array(engine.content(tensor))
        if state is not None and torch_state is not None:
            contents = {name: torch_state.content(name) for name in engine.state_names}
            state.values |= {name: value_of(bytearray(c.data), c.dtype, c.shape) for name, c in contents.items()}
        return results


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0
