"""The engine `onnx` on an accelerator. ONNX Runtime reads weights from the arena; inputs and outputs are torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from weightswap_runtime.engines.torch.device import AcceleratedEngine
from weightswap_runtime.engines.torch.graph_call import MethodCall, Tensors, load_graph
from weightswap_runtime.engines.torch.state import TorchState
from weightswap_runtime.engines.torch.variants import ChosenTensors
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Method
from weightswap_runtime.format.signature import Integer, Tensor
from weightswap_runtime.memory.device.torch_device import Accelerator
from weightswap_runtime.messages import listed
from weightswap_runtime.tensors.torch_tensors import torch_dtype

from .elements import ELEMENTS
from .graph import OnnxGraph, Provider
from .names import dtype_of
from .values import as_value, value_of


class Counterpart(NamedTuple):
    """ONNX Runtime's execution provider, device name and options for one of torch's device types."""

    provider: str
    device: str
    options: Mapping[str, str]


# computes as torch does, without TF32, and does not search for the fastest convolution in the first call of each shape
COUNTERPARTS = {
    "cuda": Counterpart(
        "CUDAExecutionProvider",
        "cuda",
        {
            "use_tf32": "0",
            "cudnn_conv_algo_search": "HEURISTIC",
            "arena_extend_strategy": "kSameAsRequested",
        },
    )
}


def provider_of(counterpart: Counterpart, index: int) -> Provider:
    """Return the execution provider for one device."""
    return Provider(counterpart.provider, {**counterpart.options, "device_id": str(index)})


class OnnxAcceleratedEngine(AcceleratedEngine):
    """The ONNX graphs of one artifact on an accelerator. Methods without one run as on the engine `torch`."""

    name = "onnx"

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        """Raises ArtifactError, and Unsupported if ONNX Runtime has no provider for the device."""
        counterpart = COUNTERPARTS.get(self.device.type)
        if counterpart is None:
            raise Unsupported(f"engine 'onnx' on the device {str(self.device)!r}: it runs on {listed(COUNTERPARTS)}")
        self._counterpart = counterpart
        provider = provider_of(counterpart, self.device.index)
        compiled = artifact.compiled_methods("onnx")
        beside = [name for name in artifact.methods if name not in compiled]
        graphs = {name: load_graph(artifact, name, prologue, self.device) for name in beside}
        return graphs | {name: OnnxGraph(artifact, name, None, provider) for name in compiled}

    def _call(self, name: str, method: Method, tensors: Tensors) -> MethodCall:
        if not isinstance(graph := self._graphs[name], OnnxGraph):
            return super()._call(name, method, tensors)
        return OnnxCall(graph, tensors, self._accelerator, self._counterpart.device)

    def environment(self) -> None:  # type: ignore[override]
        """Return None: outputs equal eager only within tolerances."""


class OnnxCall:
    """One method over one arena. Bindings are not safe to share, so each call takes one from a pool.

    ONNX Runtime works in streams of its own, so the host waits: before a call until its inputs and the weights are
    ready, and in the call until the outputs are.
    """

    past_autograd = False
    has_prologue = False

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
        self.hoisted: list[torch.Tensor] = []
        self._pool: list[Any] = []
        if dtypes := sorted({dtype for _, leaf in self._outputs if (dtype := dtype_of(leaf)).startswith("F8")}):
            raise Unsupported(f"engine 'onnx' on a device: it cannot return outputs of type {', '.join(dtypes)}")

    def run_prologue(self) -> None:
        """Do nothing: ONNX Runtime keeps nothing that depends on weights."""

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None = None) -> list[Any]:
        self._graph.check_sizes(inputs)
        values = [_row_major(value) if isinstance(value, torch.Tensor) else value for value in inputs]
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


def _row_major(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a row-major copy without lazy conjugation or negation."""
    return value.detach().resolve_conj().resolve_neg().contiguous()


def _view(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the memory of one of ONNX Runtime's values."""
    return from_dlpack(value).view(dtype)
