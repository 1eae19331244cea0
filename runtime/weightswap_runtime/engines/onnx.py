"""The engine `onnx`: ONNX Runtime on the CPU, on numpy arrays. It needs no torch.

All weights are inputs of the ONNX graph. A binding of a session holds them at their addresses in the arena, so a swap
changes only memory. State is passed through: its values are inputs, and its new values are outputs.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import onnxruntime
    from onnxruntime import OrtValue
except ImportError as error:
    raise MissingExtra("the engine `onnx`", "onnx") from error

import ctypes
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from weightswap_runtime.errors import ArtifactError, InputMismatch, Unsupported, listed
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.signature import Integer, Leaf, Tensor, input_leaves, leaves
from weightswap_runtime.jobs import renew_in_children
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors import DTYPES, TensorBytes, array_content, is_numpys, numpy_dtype

from .engine import Bound, Chosen, State
from .onnx_names import ELEMENTS, Names, dtype_of, element_of, graph_file, onnx_names, output_dtypes

_CPU = "CPUExecutionProvider"
_SILENT = 4  # logs of fatal errors alone
_FILES = "session.model_external_initializers_file_folder_path"
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1  # integers that its graphs take
_LOST: list[Any] = []  # sessions of a parent process, kept alive: ending one would wait for its threads
DTYPE_NAMES: Mapping[np.dtype[Any], str] = {numpy_dtype(name): name for name in ELEMENTS}


def _carrier(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype in which elements are passed to ONNX Runtime."""
    return numpy_dtype(dtype) if is_numpys(dtype) else np.dtype(f"uint{DTYPES[dtype].bits}")


def value_of(memory: Any, dtype: str, shape: Sequence[int]) -> OrtValue:
    """Return a value over row-major bytes, a buffer or an array of uint8, which it keeps alive. Nothing is copied."""
    flat = np.frombuffer(memory, _carrier(dtype)) if len(memory) else np.empty(0, _carrier(dtype))
    return as_value(flat.reshape(shape), dtype)


def as_value(array: np.ndarray[Any, Any], dtype: str) -> OrtValue:
    """Return a value over the memory of an array, or of a copy if the array is not contiguous or not aligned."""
    rows = np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED")).view(_carrier(dtype))
    if is_numpys(dtype):
        return OrtValue.ortvalue_from_numpy(rows)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(rows, ELEMENTS[dtype].code)


def as_array(value: OrtValue, dtype: str) -> np.ndarray[Any, Any]:
    """Return a value as an array that shares and keeps its memory; for dtypes that numpy lacks, as a copy."""
    if is_numpys(dtype):
        array: np.ndarray[Any, Any] = value.numpy()
        return array
    shape = value.shape()
    size = int(np.prod(shape)) * DTYPES[dtype].bits // 8
    return np.frombuffer(bytearray(ctypes.string_at(value.data_ptr(), size)), numpy_dtype(dtype)).reshape(shape)


def content_array(content: TensorBytes) -> np.ndarray[Any, Any]:
    """Copy content to an array that numpy allocates. Raises Unsupported for dtypes that ONNX Runtime lacks."""
    if content.dtype not in ELEMENTS:
        raise Unsupported(f"dtype {content.dtype}: ONNX Runtime has no such type")
    array = np.empty(content.shape, numpy_dtype(content.dtype))
    array.reshape(-1).view(np.uint8)[:] = content.data
    return array


def content_of(array: np.ndarray[Any, Any]) -> TensorBytes:
    """Return the content of an array; it shares row-major memory. Raises Unsupported for dtypes ONNX Runtime lacks."""
    if array.dtype not in DTYPE_NAMES:
        raise Unsupported(f"numpy's {array.dtype}: expected one of {', '.join(DTYPE_NAMES.values())}")
    return array_content(array)


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
    """The tensors of the variants that a call uses."""

    values: Mapping[str, Any]  # by FQN
    arenas: Sequence[Arena]  # which hold them


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


class BoundOnnx(Bound):
    """All methods over one arena. Safe to call from any number of threads, if each call has a state of its own.

    ONNX Runtime keeps nothing that depends on weights.
    """

    def __init__(self, calls: Mapping[str, _CpuCall], arena: Arena, new_state: Callable[[], OnnxState]) -> None:
        self._calls = calls
        self._arena = arena
        self._new_state = new_state
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

    def _renew(self) -> None:
        for call in self._calls.values():
            call._renew()


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
        self._pool = [self._new_binding()]  # so that no call after a swap has to create the first one

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


def _output(value: Any, leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return as_array(value, leaf.dtype)
    return int(value.numpy()) if isinstance(leaf, Integer) else None


class OnnxGraph:
    """A method's graph, checked against the manifest."""

    names: Names
    inputs: list[Leaf]  # of the signature
    outputs: list[Leaf]  # of the signature
    tensors: tuple[str, ...]  # FQNs of the weights, state and variants that it takes
    dtypes: dict[str, str]  # of these
    after: dict[str, str]  # the output with the new value of a state, by its FQN
    fetched: list[str]  # names of all outputs and new values, in order

    def __init__(
        self, artifact: Artifact, method: str, threads: int | None, provider: tuple[str, dict[str, str]] = (_CPU, {})
    ) -> None:
        """threads: for each call; None: one for each core. provider: an execution provider and its options.

        Raises ArtifactError and Unsupported.
        """
        manifest = artifact.manifest
        self._where = str(artifact.path / graph_file(method))
        self._raw = artifact.read(graph_file(method))  # kept, as a forked child opens it again
        self._threads = threads
        self._provider = provider
        self._session: Any = None
        signature = manifest.methods[method].signature
        self.names = onnx_names(manifest, manifest.methods[method])
        self.inputs = input_leaves(signature)
        self.outputs = leaves(signature.output)
        self._method = method
        self._dynamic = [
            (index, leaf.name)
            for index, leaf in enumerate(self.inputs)
            if isinstance(leaf, Tensor) and any(isinstance(size, str) for size in leaf.shape)
        ]
        self._integers = [(index, leaf.name) for index, leaf in enumerate(self.inputs) if isinstance(leaf, Integer)]
        inputs = {item.name: item for item in self.session.get_inputs()}
        self.tensors = tuple(name for name in self.names.tensors if name in inputs)
        outputs = self.session.get_outputs()
        output_names = [item.name for item in outputs]
        self.after = {name: after for name, after in self.names.after.items() if after in output_names}
        self.fetched = [*(name for name in self.names.outputs if name is not None), *self.after.values()]
        tables = (*manifest.weights, *manifest.state, *manifest.variable)
        rows = {name: row for row in tables for name in row.names}
        self.dtypes = {name: rows[name].dtype for name in self.tensors}
        dtypes = output_dtypes(manifest, manifest.methods[method])
        problems = [*self._input_problems(inputs, rows), *self._output_problems(outputs, dtypes)]
        if problems:
            raise ArtifactError(f"{self._where}: is not the graph of {method!r}: {listed(problems, between='; ')}")
        renew_in_children(self)

    def check_sizes(self, inputs: Sequence[Any]) -> None:
        """Raise InputMismatch if a flat input is empty along a dynamic dimension, or an integer of more than 64 bits.

        Some of ONNX Runtime's operators (LSTM, rotary embeddings) would end the process.
        """
        wide = [(name, inputs[index]) for index, name in self._integers if not _LEAST <= inputs[index] <= _MOST]
        if wide:
            problems = [f"{name}: {value} is beyond the 64 bits of the engine 'onnx'" for name, value in wide]
            raise InputMismatch(self._method, problems)
        empty = [name for index, name in self._dynamic if 0 in inputs[index].shape]
        if empty:
            raise InputMismatch(
                self._method,
                [f"{name}: is empty, which the engine 'onnx' does not accept; 'torch' does" for name in empty],
            )

    @property
    def session(self) -> Any:
        """The ONNX Runtime session. Calls on it may run concurrently."""
        if self._session is None:
            self._session = self._open()
        return self._session

    def _renew(self) -> None:
        """Drop the session after a fork: its threads are gone, so the next call opens another."""
        _LOST.append(self._session)
        self._session = None

    def _open(self) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _SILENT  # its errors say the same
        options.intra_op_num_threads = self._threads or 0
        options.add_session_config_entry(_FILES, self._where)  # a file, not a folder: there is nothing below it to read
        provider, here = self._provider[0], onnxruntime.__version__
        try:
            session = onnxruntime.InferenceSession(self._raw, options, providers=[self._provider])
        except Exception as error:
            if type(error).__name__ == "NotImplemented":
                raise Unsupported(f"{self._where}: ONNX Runtime {here} cannot run it: {error}") from error
            raise ArtifactError(
                f"{self._where}: ONNX Runtime {here} cannot open it: {error}. Compile it again."
            ) from error
        if provider not in (available := session.get_providers()):
            raise Unsupported(
                f"{self._where}: needs {provider}, but ONNX Runtime {here} offers {', '.join(available)}. Install "
                "onnxruntime-gpu for this machine's CUDA, and cuDNN"
            )
        return session

    def _input_problems(self, found: Mapping[str, Any], rows: Mapping[str, NamedTensor]) -> Iterator[str]:
        flat = [(name, leaf) for name, leaf in zip(self.names.inputs, self.inputs, strict=True) if name is not None]
        dtypes = {name: dtype_of(leaf) for name, leaf in flat}
        yield from (f"it lacks the input {name!r}" for name in dtypes if name not in found)
        for name, item in found.items():
            row = rows.get(name) if name in self.tensors else None
            dtype = row.dtype if row else dtypes.get(name)
            if dtype is None:
                yield f"it takes {name!r}, which the manifest does not list"
            elif item.type != element_of(name, dtype).text or (row and tuple(item.shape) != row.shape):
                yield f"it takes {name!r} as {item.type}{list(item.shape)}, expected {dtype}"

    def _output_problems(self, found: Sequence[Any], dtypes: Mapping[str, str]) -> Iterator[str]:
        names = [item.name for item in found]
        if names != self.fetched:
            yield f"its outputs are {names}, expected {self.fetched}"
            return
        for item in found:
            if item.type != element_of(item.name, dtypes[item.name]).text:
                yield f"it gives {item.name!r} as {item.type}, expected {dtypes[item.name]}"
