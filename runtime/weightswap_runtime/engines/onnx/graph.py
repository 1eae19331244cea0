"""One method's ONNX graph, opened by ONNX Runtime and checked against the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weightswap_runtime.errors import ArtifactError, InputMismatch, MissingExtra, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.signature import Tensor, input_leaves, leaves
from weightswap_runtime.messages import listed
from weightswap_runtime.threads.forks import renew_in_children

from .elements import element_of
from .names import dtype_of, graph_file, onnx_names, output_dtypes

try:
    import onnxruntime
except ImportError as error:
    raise MissingExtra("the engine `onnx`", "onnx") from error

_CPU = "CPUExecutionProvider"
_SILENT = 4
_FILES = "session.model_external_initializers_file_folder_path"
_LOST: list[Any] = []  # sessions of a parent process, kept alive: ending one would wait for its threads


class Provider(NamedTuple):
    """An execution provider of ONNX Runtime and its options."""

    name: str = _CPU
    options: Mapping[str, str] = {}


_ON_CPU = Provider()


class OnnxGraph:
    """A method's graph. `tensors` are the FQNs of the weights, state and variants that it takes, with their `dtypes`.

    `inputs` and `outputs` are the leaves of the signature. `after` maps a state's FQN to the output with its new
    value; `fetched` are the names of all outputs and new values, in order.
    """

    def __init__(self, artifact: Artifact, method: str, threads: int | None, provider: Provider = _ON_CPU) -> None:
        """threads: for each call; None: one for each core. Raises ArtifactError and Unsupported."""
        manifest = artifact.manifest
        self._where = str(artifact.path / graph_file(method))
        self._raw = artifact.read(graph_file(method))
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
        """Raise InputMismatch if a flat input is empty along a dynamic dimension.

        Some of ONNX Runtime's operators (LSTM, rotary embeddings) would end the process.
        """
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
        provider, here = self._provider.name, onnxruntime.__version__
        try:
            session = onnxruntime.InferenceSession(
                self._raw, options, providers=[(provider, dict(self._provider.options))]
            )
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
