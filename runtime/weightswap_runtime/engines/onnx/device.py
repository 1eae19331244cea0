"""The engine `onnx` on an accelerator: ONNX Runtime reads weights where the arena has them. Tensors are torch's."""

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
    """What ONNX Runtime calls the accelerator that torch calls by another name, and what computes there."""

    provider: str
    device: str
    options: Mapping[str, str]


# as torch computes: no TF32, and no search for the fastest convolution in the first call of each shape
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
    """What computes on one device."""
    return Provider(counterpart.provider, {**counterpart.options, "device_id": str(index)})


class OnnxAcceleratedEngine(AcceleratedEngine):
    """The ONNX graphs of one artifact on an accelerator. Methods that have none run as on the engine `torch`."""

    name = "onnx"

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        """Raises ArtifactError, and Unsupported where ONNX Runtime has no provider for the device."""
        found = COUNTERPARTS.get(self.device.type)
        if found is None:
            raise Unsupported(f"engine 'onnx' on the device {str(self.device)!r}: it serves on {listed(COUNTERPARTS)}")
        self._counterpart = found
        provider = provider_of(found, self.device.index)
        compiled = artifact.compiled_methods("onnx")
        beside = [name for name in artifact.methods if name not in compiled]
        graphs = {name: load_graph(artifact, name, prologue, self.device) for name in beside}
        return graphs | {name: OnnxGraph(artifact, name, None, provider) for name in compiled}

    def _call(self, name: str, method: Method, tensors: Tensors) -> MethodCall:
        if not isinstance(graph := self._graphs[name], OnnxGraph):
            return super()._call(name, method, tensors)
        return OnnxCall(graph, tensors, self._accelerator, self._counterpart.device)

    def environment(self) -> None:  # type: ignore[override]
        """Outputs equal those of eager within tolerances alone."""


class OnnxCall:
    """One method over one arena. ONNX Runtime works in streams of its own, so that the host waits: before a call for
    what its inputs and the weights wait for, and in it until the outputs are there.

    Bindings are not safe to share, so each call takes one from a pool.
    """

    past_autograd = False
    has_prologue = False

    def __init__(self, graph: OnnxGraph, tensors: Tensors, accelerator: Accelerator, device: str) -> None:
        """device: what ONNX Runtime calls it. Raises Unsupported for outputs of dtypes that DLPack lacks."""
        self._graph = graph
        self._accelerator = accelerator
        self._device = device
        known = {name: value for (_, name), value in tensors.items()}
        self._fixed = [(name, known[name].detach()) for name in graph.tensors if name in known]
        self._read = [name for name in graph.tensors if name not in known]
        variable = {name for kind, name in tensors if kind == "variant"}
        self._variable = [(name, value) for name, value in self._fixed if name in variable]
        self._inputs = list(zip(graph.names.inputs, graph.inputs, strict=True))
        self._outputs = list(zip(graph.names.outputs, graph.outputs, strict=True))
        self._changed = graph.after
        self._dtypes = {name: torch_dtype(graph.dtypes[name]) for name in self._changed if name in graph.dtypes}
        self.stateful = bool(self._read or self._changed)
        self.hoisted: list[torch.Tensor] = []
        self._pool: list[Any] = []
        if foreign := sorted({dtype for _, leaf in self._outputs if (dtype := dtype_of(leaf)).startswith("F8")}):
            raise Unsupported(f"engine 'onnx' on a device: it cannot hand over outputs of {', '.join(foreign)}")

    def run_prologue(self) -> None:
        """Nothing: ONNX Runtime keeps nothing that depends on weights."""

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None = None) -> list[Any]:
        self._graph.check_sizes(inputs)
        given = [_in_order(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        try:
            binding = self._pool.pop()
        except IndexError:
            binding = self._new_binding()
        self._bind(binding, given, state, chosen)
        self._wait()
        self._graph.session.run_with_iobinding(binding)
        found = dict(zip(self._graph.fetched, binding.get_outputs(), strict=True))
        values = [None if name is None else self._output(found[name], leaf) for name, leaf in self._outputs]
        if state is not None:
            state.put({name: _view(found[after], self._dtypes[name]) for name, after in self._changed.items()})
        self._wait()  # before ONNX Runtime has its memory again
        binding.clear_binding_outputs()
        self._pool.append(binding)  # not after an error, which leaves it in doubt
        return values

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
        given = chosen.tensors if chosen is not None else {}
        for name, nothing in self._variable:
            self._bind_tensor(binding, name, given.get(name, nothing).detach(), self._graph.dtypes[name])
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


def _in_order(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where its memory is not what its elements are in order."""
    return value.detach().resolve_conj().resolve_neg().contiguous()


def _view(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """The memory of one of ONNX Runtime's values as a tensor."""
    return from_dlpack(value).view(dtype)
