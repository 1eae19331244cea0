"""The engine `onnx` where it meets torch: on a device, and on the CPU beside `torch`, for what has no ONNX graph.

On a device tensors are torch's, and ONNX Runtime is given their addresses. On the CPU they are numpy arrays, and those
of calls that `torch` runs are converted.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("an artifact that lacks ONNX graphs of some methods, on the engine `onnx`,", "torch") from error

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch.utils.dlpack import from_dlpack

from weightswap_runtime.errors import Unsupported, listed
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Method, NamedTensor
from weightswap_runtime.format.signature import Integer, Tensor
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.torch_device import Accelerator
from weightswap_runtime.torch_tensors import default_torch_modes, torch_dtype

from .engine import Bound, Chosen, State
from .onnx import (
    BoundOnnx,
    OnnxChosen,
    OnnxEngine,
    OnnxGraph,
    OnnxState,
    as_value,
    content_array,
    content_of,
    value_of,
)
from .onnx_names import ELEMENTS, dtype_of
from .torch_calls import ChosenTensors, MethodCall, Tensors, TorchState, as_row_major, load_graph, writes_to
from .torch_cpu import TorchEngine
from .torch_device import AcceleratedEngine


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
        versions = [writes_to(value) for value in tensors]
        torch_state = None
        if state is not None:
            torch_state = engine.new_state({name: state.content(name) for name in engine.state_names})
        outputs = self._torch_bound.run(method, tensors, torch_state, chosen)
        results = [
            content_array(engine.content(value)) if isinstance(value, torch.Tensor) else value for value in outputs
        ]
        for array, tensor, version in zip(inputs, tensors, versions, strict=True):
            if writes_to(tensor) != version:  # the graph has written to it
                array[...] = content_array(engine.content(tensor))
        if state is not None and torch_state is not None:
            contents = {name: torch_state.content(name) for name in engine.state_names}
            state.values |= {name: value_of(bytearray(c.data), c.dtype, c.shape) for name, c in contents.items()}
        return results


# by torch's type of device: ONNX Runtime's execution provider, its name of the device, and the provider's options
PROVIDERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "cuda": (
        "CUDAExecutionProvider",
        "cuda",
        {
            "use_tf32": "0",  # torch computes without it
            "cudnn_conv_algo_search": "HEURISTIC",  # not a search for the fastest in the first call of each shape
            "arena_extend_strategy": "kSameAsRequested",  # not in powers of two: torch needs memory beside it
        },
    )
}


class OnnxAcceleratedEngine(AcceleratedEngine):
    """The ONNX graphs of one artifact on an accelerator. Methods without one run as on the engine `torch`."""

    name = "onnx"

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        """Raises ArtifactError, and Unsupported if ONNX Runtime has no provider for the device."""
        if self.device.type not in PROVIDERS:
            raise Unsupported(f"engine 'onnx' on the device {str(self.device)!r}: it runs on {listed(PROVIDERS)}")
        name, self._device_name, options = PROVIDERS[self.device.type]
        provider = name, {**options, "device_id": str(self.device.index)}
        compiled = artifact.compiled_methods("onnx")
        beside = [name for name in artifact.methods if name not in compiled]
        graphs = {name: load_graph(artifact, name, prologue, self.device) for name in beside}
        return graphs | {name: OnnxGraph(artifact, name, None, provider) for name in compiled}

    def _call(self, name: str, method: Method, tensors: Tensors) -> MethodCall:
        if not isinstance(graph := self._graphs[name], OnnxGraph):
            return super()._call(name, method, tensors)
        return OnnxCall(graph, tensors, self._accelerator, self._device_name)

    def environment(self) -> None:  # type: ignore[override]
        """Return None: outputs equal eager only within tolerances."""


class OnnxCall(MethodCall):
    """One method over one arena. Bindings are not safe to share, so each call takes one from a pool.

    ONNX Runtime works in streams of its own, so the host waits: before a call until its inputs and the weights are
    ready, and in the call until the outputs are.
    """

    def __init__(self, graph: OnnxGraph, tensors: Tensors, accelerator: Accelerator, device: str) -> None:
        """device: its name in ONNX Runtime. Raises Unsupported for outputs of dtypes that DLPack lacks."""
        self._graph = graph
        self._accelerator = accelerator
        self._device = device
        by_name = {name: value for (_, name), value in tensors.items()}
        self._fixed = [(name, by_name[name].detach()) for name in graph.tensors if name in by_name]
        self._read = [name for name in graph.tensors if name not in by_name]
        variable = {name for kind, name in tensors if kind == "variant"}
        self._variable = [(name, value) for name, value in self._fixed if name in variable]
        self._inputs = list(zip(graph.names.inputs, graph.inputs, strict=True))
        self._outputs = list(zip(graph.names.outputs, graph.outputs, strict=True))
        self._changed = graph.after
        self._dtypes = {name: torch_dtype(graph.dtypes[name]) for name in self._changed if name in graph.dtypes}
        self.stateful = bool(self._read or self._changed)
        self._pool: list[Any] = []
        if dtypes := sorted({dtype for _, leaf in self._outputs if (dtype := dtype_of(leaf)).startswith("F8")}):
            raise Unsupported(f"engine 'onnx' on a device: it cannot return outputs of type {', '.join(dtypes)}")

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None = None) -> list[Any]:
        self._graph.check_sizes(inputs)
        values = [as_row_major(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        try:
            binding = self._pool.pop()
        except IndexError:
            binding = self._new_binding()
        self._bind(binding, values, state, chosen)
        self._wait()
        self._graph.session.run_with_iobinding(binding)
        results = dict(zip(self._graph.fetched, binding.get_outputs(), strict=True))
        outputs = [None if name is None else self._output(results[name], leaf) for name, leaf in self._outputs]
        if state is not None:
            state.put({name: _view(results[after], self._dtypes[name]) for name, after in self._changed.items()})
        self._wait()  # before ONNX Runtime may reuse its memory
        binding.clear_binding_outputs()
        self._pool.append(binding)  # not after an error, which may leave it half bound
        return outputs

    def _new_binding(self) -> Any:
        binding = self._graph.session.io_binding()
        for name, value in self._fixed:
            self._bind_tensor(binding, name, value, self._graph.dtypes[name])
        return binding

    def _bind(self, binding: Any, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None) -> None:
        for (name, leaf), value in zip(self._inputs, inputs, strict=True):
            if isinstance(leaf, Integer):
                binding.bind_ortvalue_input(name, as_value(np.asarray(value, np.int64), "I64"))
            elif name is not None:
                self._bind_tensor(binding, name, value, dtype_of(leaf))
        if state is not None:
            for name in self._read:
                self._bind_tensor(binding, name, state.tensors[name], self._graph.dtypes[name])
        variants = chosen.tensors if chosen is not None else {}
        for name, zeros in self._variable:
            self._bind_tensor(binding, name, variants.get(name, zeros).detach(), self._graph.dtypes[name])
        for name in self._graph.fetched:
            binding.bind_output(name, self._device, self._accelerator.index)

    def _bind_tensor(self, binding: Any, name: str, value: torch.Tensor, dtype: str) -> None:
        if not value.numel():
            binding.bind_ortvalue_input(name, value_of(b"", dtype, value.shape))
            return
        where = self._device, self._accelerator.index
        binding.bind_input(name, *where, ELEMENTS[dtype].code, list(value.shape), value.data_ptr())

    def _wait(self) -> None:
        self._accelerator.finish(self._accelerator.mark(self._accelerator.current()))

    def _output(self, value: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _view(value, torch_dtype(leaf.dtype)).to(self._accelerator.torch, copy=True)
        return int(_view(value, torch.int64)) if isinstance(leaf, Integer) else None


def _view(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the memory of one of ONNX Runtime's values."""
    return from_dlpack(value).view(dtype)
