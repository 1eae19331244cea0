"""The engine `onnx`: runs the ONNX graphs of an artifact with ONNX Runtime. It needs numpy, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from weightswap_runtime.arena import Arena
from weightswap_runtime.artifact import Artifact
from weightswap_runtime.contents import Content
from weightswap_runtime.manifest import Manifest, NamedTensor
from weightswap_runtime.signature import Integer, Leaf, Tensor, leaves

from . import Bound
from .onnx_graph import OnnxGraph
from .onnx_names import dtype_of
from .onnx_values import as_array, as_value, content_array, content_of, dtype_names, value_of
from .stateful import Stateful

_NOTHING = nullcontext()


class OnnxEngine:
    """The ONNX graphs of one artifact on the CPU. Inputs and outputs are numpy arrays."""

    name = "onnx"
    tensor_type = np.ndarray

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        """Open the graphs. threads: that one call uses; None: one for each core. Raises ArtifactError, Unsupported."""
        self._manifest = artifact.manifest
        self.dtypes: Mapping[np.dtype[Any], str] = dtype_names(_dtypes(artifact.manifest))
        self._graphs = {name: OnnxGraph(artifact, name, threads) for name in artifact.methods}
        header, data = artifact.constants()
        places = {row.name: header.tensors[row.name] for row in self._manifest.state}
        self._initial = {name: data[place.begin : place.end] for name, place in places.items()}

    @staticmethod
    def misplaced(value: Any) -> str | None:
        """What is wrong with an input beside dtype and shape."""
        return "expected a plain array, got a masked one" if isinstance(value, np.ma.MaskedArray) else None

    @staticmethod
    def kind(value: Any) -> Hashable:
        """Everything about an input that its check looks at."""
        return value.dtype, value.shape, type(value)

    @staticmethod
    def tensor(content: Content) -> np.ndarray[Any, Any]:
        """An array in memory that numpy has allocated."""
        return content_array(content)

    def content(self, value: np.ndarray[Any, Any]) -> Content:
        """What is in an array, whose memory it shares where that is in order."""
        return content_of(value, self.dtypes)

    @staticmethod
    def environment() -> None:
        """Outputs equal those of eager within tolerances alone."""

    @staticmethod
    def plainly() -> AbstractContextManager[None]:
        """Nothing that a thread switches on changes what ONNX Runtime computes."""
        return nullcontext()

    def bind(self, arena: Arena) -> BoundOnnx:
        """Views on the arena for every weight, and fresh state."""
        values = {
            name: value_of(arena.fetch(*arena.layout.slots[row.name]), row.dtype, row.shape)
            for row in self._manifest.weights
            for name in row.names
        }
        states = {row.name: _State(row, self._initial[row.name]) for row in self._manifest.state}
        values |= {name: state.value for name, state in states.items()}
        return BoundOnnx({name: _Call(graph, values, states) for name, graph in self._graphs.items()}, states, arena)


def _dtypes(manifest: Manifest) -> set[str]:
    """The dtypes of all inputs and outputs."""
    signatures = [method.signature for method in manifest.methods.values()]
    nodes = [node for each in signatures for node in (*dict(each.args).values(), *dict(each.kwargs).values())]
    nodes += [each.output for each in signatures]
    return {leaf.dtype for node in nodes for leaf in leaves(node) if isinstance(leaf, Tensor)}


class _State:
    """One state tensor in memory of its own, beside its initial value."""

    def __init__(self, row: NamedTensor, initial: memoryview) -> None:
        self._initial = np.array(initial, np.uint8)
        self._live = self._initial.copy()
        self.dtype = row.dtype
        self.value = value_of(self._live, row.dtype, row.shape)

    def reset(self) -> None:
        self._live[:] = self._initial

    def put(self, new: Any) -> None:
        """Take the value after a call."""
        self._live[:] = np.ascontiguousarray(as_array(new, self.dtype)).reshape(-1).view(np.uint8)


class _Call:
    """One method over one arena. Bindings are not safe to share, so each call takes one from a pool."""

    def __init__(self, graph: OnnxGraph, values: Mapping[str, Any], states: Mapping[str, _State]) -> None:
        self._graph = graph
        self._fixed = [(name, values[name]) for name in graph.tensors]
        self._inputs = [(name, dtype_of(leaf)) for name, leaf in zip(graph.names.inputs, graph.inputs, strict=True)]
        self._nothing = [(name, value_of(b"", dtype, (0,))) for name, dtype in self._inputs if name is not None]
        self._outputs = list(zip(graph.names.outputs, graph.outputs, strict=True))
        self._states = [(after, states[name]) for name, after in graph.after.items()]
        self._fetched = [name for name, _ in (*self._outputs, *self._states) if name is not None]
        self.stateful = any(name in states for name in graph.tensors)
        self._pool: list[Any] = []

    def warm_up(self) -> None:
        """Make what the first call needs."""
        self._pool.append(self._new_binding())

    def _new_binding(self) -> Any:
        binding = self._graph.session.io_binding()
        for name, value in self._fixed:
            binding.bind_ortvalue_input(name, value)
        return binding

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs; the state is changed."""
        self._graph.check_sizes(inputs)
        try:
            binding = self._pool.pop()
        except IndexError:
            binding = self._new_binding()
        for (name, dtype), value in zip(self._inputs, inputs, strict=True):
            if name is not None:
                binding.bind_ortvalue_input(name, as_value(np.asarray(value), dtype))
        for name in self._fetched:
            binding.bind_output(name)
        self._graph.session.run_with_iobinding(binding)
        found = dict(zip(self._fetched, binding.get_outputs(), strict=True))
        binding.clear_binding_outputs()
        for name, nothing in self._nothing:  # or the binding would keep the caller's arrays until its next call
            binding.bind_ortvalue_input(name, nothing)
        self._pool.append(binding)  # not after an error, which leaves it in doubt
        for name, state in self._states:
            state.put(found[name])
        return [None if name is None else _output(found[name], leaf) for name, leaf in self._outputs]

    def _renew(self) -> None:
        """After a fork: bindings belong to sessions whose threads are gone."""
        _LOST.append(self._pool)
        self._pool = []


_LOST: list[Any] = []


def _output(value: Any, leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return as_array(value, leaf.dtype)
    return int(value.numpy()) if isinstance(leaf, Integer) else None


class BoundOnnx(Stateful):
    """All methods over one arena. Safe to call from any number of threads."""

    def __init__(self, calls: Mapping[str, _Call], states: Mapping[str, _State], arena: Arena) -> None:
        self._calls = calls
        self._states = states
        self._arena = arena
        for call in calls.values():
            call.warm_up()
        super().__init__(has_state=bool(states))

    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs, in memory of their own."""
        call = self._calls[method]
        with self._state_lock if call.stateful else _NOTHING:
            return call(inputs)

    has_prologue = False

    def prepare(self) -> None:
        """Nothing: ONNX Runtime keeps nothing that depends on weights."""

    def adopt(self, other: Bound) -> bool:
        """There is nothing to copy."""
        return True

    def keep(self) -> Callable[[], None]:
        """There is nothing to keep."""
        return lambda: None

    def _renew(self) -> None:
        """After a fork: bindings are made again, and half a call's state is undone."""
        for call in self._calls.values():
            call._renew()
        super()._renew()

    def _reset(self) -> None:
        for state in self._states.values():
            state.reset()
