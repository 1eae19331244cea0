"""The engine `onnx`: runs the ONNX graphs of an artifact with ONNX Runtime. It needs numpy, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from weightswap_runtime.engines.engine import Bound, Chosen, State
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.signature import Integer, Leaf, Tensor
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.threads.forks import renew_in_children

from .graph import OnnxGraph
from .names import dtype_of
from .values import DTYPE_NAMES, as_array, as_value, content_array, content_of, value_of


class OnnxEngine:
    """The ONNX graphs of one artifact on the CPU. Inputs and outputs are numpy arrays."""

    name = "onnx"
    tensor_type = np.ndarray
    tensor = staticmethod(content_array)
    content = staticmethod(content_of)
    default_torch_modes = staticmethod(nullcontext)  # nothing that a thread switches on changes what is computed

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        """Open the graphs. threads: that one call uses; None: one for each core. Raises ArtifactError, Unsupported."""
        self._manifest = artifact.manifest
        self.dtypes = DTYPE_NAMES
        self._graphs = {name: OnnxGraph(artifact, name, threads) for name in artifact.compiled_methods("onnx")}
        found = artifact.constants()
        self._initial = {row.name: value_of(found[row.name].data, row.dtype, row.shape) for row in self._manifest.state}
        self._absent = {row.name: value_of(bytes(row.nbytes), row.dtype, row.shape) for row in self._manifest.variable}

    @property
    def runs(self) -> dict[str, str]:
        return dict.fromkeys(self._graphs, self.name)

    @staticmethod
    def misplaced(value: Any) -> str | None:
        return "expected a plain array, got a masked one" if isinstance(value, np.ma.MaskedArray) else None

    @staticmethod
    def kind(value: Any) -> Hashable:
        return value.dtype, value.shape, type(value)

    @staticmethod
    def environment() -> None:
        """Outputs equal those of eager within tolerances alone."""

    def bind(self, arena: Arena) -> BoundOnnx:
        """Views on the arena for every weight."""
        values = _views(self._manifest.weights, arena)
        absent = {name: self._absent[row.name] for row in self._manifest.variable for name in row.names}
        calls = {name: _CpuCall(graph, values, absent) for name, graph in self._graphs.items()}
        return BoundOnnx(calls, arena, self.new_state)

    @staticmethod
    def variant(rows: Iterable[NamedTensor], arena: Arena) -> OnnxChosen:
        return OnnxChosen(_views(rows, arena), [arena])

    @staticmethod
    def joined(chosen: Iterable[OnnxChosen]) -> OnnxChosen:
        found = list(chosen)
        values = {name: value for each in found for name, value in each.values.items()}
        return OnnxChosen(values, [arena for each in found for arena in each.arenas])

    def new_state(self, saved: Mapping[str, TensorBytes] | None = None) -> OnnxState:
        values = {
            name: value_of(bytearray(content.data), content.dtype, content.shape)
            for name, content in (saved or {}).items()
        }
        return OnnxState(self._manifest.state, self._initial, values)


def _views(rows: Iterable[NamedTensor], arena: Arena) -> dict[str, Any]:
    return {
        name: value_of(arena.fetch(*arena.layout.slots[row.name]), row.dtype, row.shape)
        for row in rows
        for name in row.names
    }


class OnnxChosen(NamedTuple):
    """The tensors that a call has chosen, by FQN, and the memory that they lie in."""

    values: Mapping[str, Any]
    arenas: Sequence[Arena]


class OnnxState:
    """One copy of an artifact's state: a call takes its values, and leaves new ones.

    ONNX Runtime never writes to inputs, so that all copies share the initial values.
    """

    def __init__(self, rows: Sequence[NamedTensor], initial: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        self._dtypes = {row.name: row.dtype for row in rows}
        self._initial = initial
        self.values = {**initial, **saved}

    def reset(self) -> None:
        self.values = dict(self._initial)

    def content(self, name: str) -> TensorBytes:
        return content_of(as_array(self.values[name], self._dtypes[name]))


class _CpuCall:
    """One method over one arena. Bindings are not safe to share, so each call takes one from a pool."""

    def __init__(self, graph: OnnxGraph, values: Mapping[str, Any], absent: Mapping[str, Any]) -> None:
        """absent: what stands for tensors that a call may choose, and has not."""
        self._graph = graph
        self._variable = {name: absent[name] for name in graph.tensors if name in absent}
        fixed = {**values, **self._variable}
        self._fixed = [(name, fixed[name]) for name in graph.tensors if name in fixed]
        self._read = [name for name in graph.tensors if name not in fixed]
        self._inputs = [(name, dtype_of(leaf)) for name, leaf in zip(graph.names.inputs, graph.inputs, strict=True)]
        self._nothing = [(name, value_of(b"", dtype, (0,))) for name, dtype in self._inputs if name is not None]
        self._nothing += [(name, value_of(b"", graph.dtypes[name], (0,))) for name in self._read]
        self._outputs = list(zip(graph.names.outputs, graph.outputs, strict=True))
        self._changed = graph.after
        self.stateful = bool(self._read or self._changed)
        self._pool: list[Any] = []

    def warm_up(self) -> None:
        """Make what the first call needs."""
        self._pool.append(self._new_binding())

    def _new_binding(self) -> Any:
        binding = self._graph.session.io_binding()
        for name, value in self._fixed:
            binding.bind_ortvalue_input(name, value)
        return binding

    def __call__(self, inputs: list[Any], state: OnnxState | None, chosen: OnnxChosen | None) -> list[Any]:
        """Flat inputs to flat outputs; the state is changed at the end, so that an error leaves it as it was."""
        self._graph.check_sizes(inputs)
        try:
            binding = self._pool.pop()
        except IndexError:
            binding = self._new_binding()
        self._bind(binding, inputs, state)
        given = chosen.values if chosen is not None else {}
        variants = [(name, given[name], nothing) for name, nothing in self._variable.items() if name in given]
        for name, value, _ in variants:
            binding.bind_ortvalue_input(name, value)
        self._graph.session.run_with_iobinding(binding)
        values = dict(zip(self._graph.fetched, binding.get_outputs(), strict=True))
        binding.clear_binding_outputs()
        for name, nothing in self._nothing:  # or the binding would keep what it was given until its next call
            binding.bind_ortvalue_input(name, nothing)
        for name, _, nothing in variants:
            binding.bind_ortvalue_input(name, nothing)
        self._pool.append(binding)  # not after an error, which leaves it in doubt
        if state is not None:
            state.values.update({name: values[after] for name, after in self._changed.items()})
        return [None if name is None else _output(values[name], leaf) for name, leaf in self._outputs]

    def _bind(self, binding: Any, inputs: list[Any], state: OnnxState | None) -> None:
        for (name, dtype), value in zip(self._inputs, inputs, strict=True):
            if name is not None:
                binding.bind_ortvalue_input(name, as_value(np.asarray(value), dtype))
        if state is not None:
            for name in self._read:
                binding.bind_ortvalue_input(name, state.values[name])
        for name in self._graph.fetched:
            binding.bind_output(name)

    def _renew(self) -> None:
        """After a fork: bindings belong to sessions whose threads are gone."""
        _LOST.append(self._pool)
        self._pool = []


_LOST: list[Any] = []


def _output(value: Any, leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return as_array(value, leaf.dtype)
    return int(value.numpy()) if isinstance(leaf, Integer) else None


class BoundOnnx:
    """All methods over one arena. Safe to call from any number of threads, with a state of its own for each call."""

    def __init__(self, calls: Mapping[str, _CpuCall], arena: Arena, new_state: Callable[[], OnnxState]) -> None:
        self._calls = calls
        self._arena = arena
        self._new_state = new_state
        for call in calls.values():
            call.warm_up()
        renew_in_children(self)

    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        call = self._calls[method]
        assert chosen is None or isinstance(chosen, OnnxChosen)
        if not call.stateful:
            return call(inputs, None, chosen)
        own = state if state is not None else self._new_state()
        assert isinstance(own, OnnxState)
        return call(inputs, own, chosen)

    has_prologue = False

    def run_prologue(self) -> None:
        """Nothing: ONNX Runtime keeps nothing that depends on weights."""

    def copy_prologue_from(self, other: Bound) -> bool:
        """There is nothing to copy."""
        return True

    def keep(self) -> Callable[[], None]:
        """There is nothing to keep."""
        return lambda: None

    def _renew(self) -> None:
        """After a fork: bindings are made again."""
        for call in self._calls.values():
            call._renew()
