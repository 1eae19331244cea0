"""The engine `onnx`: runs the ONNX graphs of an artifact with ONNX Runtime. It needs numpy but not torch."""

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
    default_torch_modes = staticmethod(nullcontext)  # no mode of a thread changes the results

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        """Open the graphs. threads: for each call; None: one for each core. Raises ArtifactError and Unsupported."""
        self._manifest = artifact.manifest
        self.dtypes = DTYPE_NAMES
        self._graphs = {name: OnnxGraph(artifact, name, threads) for name in artifact.compiled_methods("onnx")}
        contents, state = artifact.constants(), self._manifest.state
        self._initial = {row.name: value_of(contents[row.name].data, row.dtype, row.shape) for row in state}
        self._zeros = {row.name: value_of(bytes(row.nbytes), row.dtype, row.shape) for row in self._manifest.variable}

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
        """Return None: outputs equal eager only within tolerances."""

    def bind(self, arena: Arena) -> BoundOnnx:
        """Bind the graphs to views of the arena's weights."""
        values = _views(self._manifest.weights, arena)
        zeros = {name: self._zeros[row.name] for row in self._manifest.variable for name in row.names}
        calls = {name: _CpuCall(graph, values, zeros) for name, graph in self._graphs.items()}
        return BoundOnnx(calls, arena, self.new_state)

    @staticmethod
    def variant(rows: Iterable[NamedTensor], arena: Arena) -> OnnxChosen:
        return OnnxChosen(_views(rows, arena), [arena])

    @staticmethod
    def joined(chosen: Iterable[OnnxChosen]) -> OnnxChosen:
        groups = list(chosen)
        values = {name: value for group in groups for name, value in group.values.items()}
        return OnnxChosen(values, [arena for group in groups for arena in group.arenas])

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
    """The tensors of the variants that a call uses, by FQN, and the arenas that hold them."""

    values: Mapping[str, Any]
    arenas: Sequence[Arena]


class OnnxState:
    """One copy of an artifact's state. A call reads its values and replaces them by new ones.

    ONNX Runtime never writes to inputs, so all copies share the initial values.
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

    def __init__(self, graph: OnnxGraph, values: Mapping[str, Any], zeros: Mapping[str, Any]) -> None:
        """zeros: values for variants that a call does not use."""
        self._graph = graph
        self._variable = {name: zeros[name] for name in graph.tensors if name in zeros}
        fixed = {**values, **self._variable}
        self._fixed = [(name, fixed[name]) for name in graph.tensors if name in fixed]
        self._read = [name for name in graph.tensors if name not in fixed]
        self._inputs = [(name, dtype_of(leaf)) for name, leaf in zip(graph.names.inputs, graph.inputs, strict=True)]
        self._empty = [(name, value_of(b"", dtype, (0,))) for name, dtype in self._inputs if name is not None]
        self._empty += [(name, value_of(b"", graph.dtypes[name], (0,))) for name in self._read]
        self._outputs = list(zip(graph.names.outputs, graph.outputs, strict=True))
        self._changed = graph.after
        self.stateful = bool(self._read or self._changed)
        self._pool: list[Any] = []

    def warm_up(self) -> None:
        """Create the binding that the first call needs."""
        self._pool.append(self._new_binding())

    def _new_binding(self) -> Any:
        binding = self._graph.session.io_binding()
        for name, value in self._fixed:
            binding.bind_ortvalue_input(name, value)
        return binding

    def __call__(self, inputs: list[Any], state: OnnxState | None, chosen: OnnxChosen | None) -> list[Any]:
        """Run on flat inputs. Return flat outputs. The state is changed last, so an error leaves it unchanged."""
        self._graph.check_sizes(inputs)
        try:
            binding = self._pool.pop()
        except IndexError:
            binding = self._new_binding()
        self._bind(binding, inputs, state)
        values = chosen.values if chosen is not None else {}
        variants = [(name, values[name], zeros) for name, zeros in self._variable.items() if name in values]
        for name, value, _ in variants:
            binding.bind_ortvalue_input(name, value)
        self._graph.session.run_with_iobinding(binding)
        results = dict(zip(self._graph.fetched, binding.get_outputs(), strict=True))
        binding.clear_binding_outputs()
        for name, empty in self._empty:  # or the binding would keep the inputs alive until its next call
            binding.bind_ortvalue_input(name, empty)
        for name, _, zeros in variants:
            binding.bind_ortvalue_input(name, zeros)
        self._pool.append(binding)  # not after an error, which may leave it half bound
        if state is not None:
            state.values.update({name: results[after] for name, after in self._changed.items()})
        return [None if name is None else _output(results[name], leaf) for name, leaf in self._outputs]

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
        """Drop the bindings after a fork: they belong to sessions whose threads are gone."""
        _LOST.append(self._pool)
        self._pool = []


_LOST: list[Any] = []


def _output(value: Any, leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return as_array(value, leaf.dtype)
    return int(value.numpy()) if isinstance(leaf, Integer) else None


class BoundOnnx:
    """All methods over one arena. Safe to call from any number of threads, if each call has a state of its own."""

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
        """Do nothing: ONNX Runtime keeps nothing that depends on weights."""

    def copy_prologue_from(self, other: Bound) -> bool:
        """Do nothing: there is no prologue."""
        return True

    def keep(self) -> Callable[[], None]:
        """Do nothing: there is no prologue."""
        return lambda: None

    def _renew(self) -> None:
        for call in self._calls.values():
            call._renew()
