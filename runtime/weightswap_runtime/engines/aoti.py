"""The engine `aoti`: machine code that AOTInductor compiled for a kind of machine, on the weights of an arena.

A container of a library is bound once to tensors over the arena and reads what is there, so a swap changes only memory.
Machine code checks nothing, and what it is given wrong may end the process. So names, dtypes, shapes and strides are
compared with the manifest before (`read_package`, `_AotiGraph`), and inputs are made row-major in each call.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("the engine `aoti`", "torch") from error

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import local
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from weightswap_runtime.errors import ArtifactError, Unsupported, listed
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import Method
from weightswap_runtime.format.signature import Integer, Leaf, Tensor, input_leaves, leaves, sizes_of
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.device_arena import DeviceArena
from weightswap_runtime.torch_tensors import torch_dtype

from .aoti_package import BESIDE_GPUS, Package, find_targets, gpu_target, machine_name, machine_targets, read_package
from .engine import Bound
from .torch_calls import ChosenTensors, GraphCall, MethodCall, Tensors, TorchState, as_row_major, load_graph
from .torch_cpu import TorchEngine
from .torch_device import AcceleratedEngine

_CPU = torch.device("cpu")
_UNIT = torch.empty(
    1, dtype=torch.uint8
)  # machine code takes an integer as the size of a tensor: this one is expanded to it


class AotiEngine(TorchEngine):
    """The packages of one artifact for this machine. Methods without one run as on the engine `torch`."""

    name = "aoti"

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        """Raises ArtifactError and Unsupported."""
        targets = self._targets(artifact)
        methods = artifact.manifest.methods
        beside = [name for name in methods if name not in targets]
        graphs = {name: load_graph(artifact, name, prologue, self.device) for name in beside}
        may_be_empty = [name for name in targets if _may_be_empty(methods[name])]
        self._captured = {name: load_graph(artifact, name, False, self.device) for name in may_be_empty}
        packages = {name: read_package(artifact, target, name) for name, target in targets.items()}
        return graphs | {name: _AotiGraph(package, methods[name], self.device) for name, package in packages.items()}

    def _targets(self, artifact: Artifact) -> dict[str, str]:
        return find_targets(artifact)

    def _call(self, name: str, method: Method, tensors: Tensors) -> MethodCall:
        if not isinstance(graph := self._graphs[name], _AotiGraph):
            return super()._call(name, method, tensors)
        captured = self._captured.get(name)
        return _AotiCall(graph, tensors, GraphCall(captured, method.inputs, tensors) if captured else None)

    def misplaced(self, value: torch.Tensor) -> str | None:  # type: ignore[override]
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"expected a plain tensor, got a {type(value).__qualname__}"
        return super().misplaced(value)

    @staticmethod
    def kind(value: torch.Tensor) -> Hashable:
        return value.dtype, value.shape, value.device, value.layout, type(value)

    @staticmethod
    def environment() -> None:
        """Return None: fused arithmetic need not equal eager bit for bit."""


class AotiAcceleratedEngine(AotiEngine, AcceleratedEngine):
    """The packages of one artifact for this GPU. Staged weights are tried with the captured graphs.

    Machine code would load its kernels for each staging, and unload them in the commit, for which calls may wait.
    """

    def __init__(self, artifact: Artifact, device: str, *, prologue: bool = True, on_host: bool = False) -> None:
        """As for AcceleratedEngine."""
        super().__init__(artifact, device, prologue=prologue, on_host=on_host)
        self._artifact = artifact

    def bind(self, arena: Arena) -> Bound:
        """Bind machine code to arenas that serve calls, and the captured graphs to others."""
        if isinstance(arena, DeviceArena) and not arena.serves:
            return self._trial_engine.bind(arena)
        return super().bind(arena)

    @cached_property
    def _trial_engine(self) -> AcceleratedEngine:
        return AcceleratedEngine(self._artifact, str(self.device), prologue=False)

    def _targets(self, artifact: Artifact) -> dict[str, str]:
        return find_targets(artifact, target_of(self.device))


def target_of(device: torch.device) -> str:
    """Return the target of packages for a device. Raises Unsupported."""
    if device.type != "cuda" or torch.version.cuda is None:
        raise Unsupported(f"the engine 'aoti' runs on the CPU and on CUDA; {str(device)!r} is neither on this machine")
    if BESIDE_GPUS not in machine_targets():
        raise Unsupported(f"the engine 'aoti' on a GPU needs a {BESIDE_GPUS} host; this machine is {machine_name()}")
    return gpu_target(torch.cuda.get_device_capability(device))


class _AotiGraph:
    """One method's machine code, checked against the manifest."""

    def __init__(self, package: Package, method: Method, device: torch.device) -> None:
        """Raises ArtifactError."""
        self.note = package.note
        signature = method.signature
        self.inputs = input_leaves(signature)
        self.outputs = leaves(signature.output)
        self.library = Library(package.library, package.where, device)
        if problems := list(self._problems()):
            where = f"{package.where}: its machine code is not for {package.note.method!r}"
            raise ArtifactError(f"{where}: {listed(problems, between='; ')}")

    def _problems(self) -> Iterator[str]:
        noted = {tensor.fqn: tensor for tensor in self.note.tensors}
        constants = {constant.fqn: constant for constant in self.library.constants}
        yield from (f"it takes {name!r}, which is not listed" for name in sorted(constants.keys() - noted.keys()))
        yield from (f"it does not take {name!r}" for name in sorted(noted.keys() - constants.keys()))
        for name in noted.keys() & constants.keys():
            if constants[name].dtype != self.library.dtype_code(torch_dtype(noted[name].dtype)):
                yield f"it takes {name!r} with a dtype other than {noted[name].dtype}"
        counts = [len([leaf for leaf in flat if _is_tensor(leaf)]) for flat in (self.inputs, self.outputs)]
        if counts != [self.library.inputs, self.library.outputs]:
            yield f"it has {self.library.inputs} inputs and {self.library.outputs} outputs, expected {counts}"


def _may_be_empty(method: Method) -> bool:
    """Return whether the signature allows an input without elements."""
    fixed = (size for leaf in input_leaves(method.signature) for size in sizes_of(leaf))
    return 0 in fixed or any(limits.min == 0 for limits in method.signature.dims.values())


def _is_tensor(leaf: Leaf) -> bool:
    """Return whether a leaf is a tensor in the machine code; literals are in the manifest only."""
    return isinstance(leaf, Tensor | Integer)


class _AotiCall(MethodCall):
    """One method over one arena. A container runs one call at a time, so each call takes one from a pool.

    There is a pool for each choice of variants, and a state has containers of its own. Machine code for sizes from 1
    may divide by a size, which ends the process: a call with an empty input runs the captured graph instead. There is
    no prologue: constants that AOTInductor folded would be stale after a swap.
    """

    def __init__(self, graph: _AotiGraph, tensors: Tensors, captured: GraphCall | None) -> None:
        """captured: the same method without machine code; None if no input can be empty."""
        self._captured = captured
        self._library = graph.library
        bound = graph.note.tensors
        self._tensors = {item.fqn: tensors[item.kind, item.name] for item in bound if item.kind != "state"}
        self._states = {item.fqn: item.name for item in bound if item.kind == "state"}
        self.stateful = bool(self._states)
        self._variable = {item.fqn: item.name for item in bound if item.kind == "variant"}
        self._no_variants = ChosenTensors({})
        self._pools: WeakKeyDictionary[ChosenTensors, list[_Container]] = WeakKeyDictionary()
        self._by_state: WeakKeyDictionary[TorchState, WeakKeyDictionary[ChosenTensors, _Container]]
        self._by_state = WeakKeyDictionary()
        self._flat = [(index, isinstance(leaf, Tensor)) for index, leaf in enumerate(graph.inputs) if _is_tensor(leaf)]
        self._written = frozenset(graph.note.written)
        self._outputs = graph.outputs
        self._plain = all(isinstance(leaf, Tensor) for leaf in graph.outputs)
        if not self.stateful:  # so that no call after a swap has to create it
            self._pools[self._no_variants] = [_Container(self._library, self._tensors)]

    def __call__(self, inputs: list[Any], state: TorchState | None, chosen: ChosenTensors | None = None) -> list[Any]:
        tensors = [
            as_row_major(inputs[index]) if is_tensor else _UNIT.expand(inputs[index]) for index, is_tensor in self._flat
        ]
        if self._captured is not None and not all(tensor.numel() for tensor in tensors):
            return list(self._captured(inputs, state, chosen))
        choice = chosen if chosen is not None and self._variable else self._no_variants
        values = self._run(tensors, choice) if state is None else self._container_of(state, choice).run(tensors)
        if self._written:
            self._write_back(inputs, tensors)
        if self._plain:
            return values
        remaining = iter(values)
        return [_output(leaf, remaining) for leaf in self._outputs]

    def _run(self, inputs: list[torch.Tensor], choice: ChosenTensors) -> list[torch.Tensor]:
        if (pool := self._pools.get(choice)) is None:
            pool = self._pools.setdefault(choice, [])  # another thread may have added one meanwhile
        try:
            container = pool.pop()
        except IndexError:
            container = self._container(choice, {})
        values = container.run(inputs)
        pool.append(container)  # not after an error, which may leave it in any state
        return values

    def _container_of(self, state: TorchState, choice: ChosenTensors) -> _Container:
        if (containers := self._by_state.get(state)) is None:  # two calls at once with one state are refused
            containers = self._by_state[state] = WeakKeyDictionary()
        container = containers.get(choice)
        if container is None:
            state_tensors = {fqn: state.tensors[name] for fqn, name in self._states.items()}
            containers[choice] = container = self._container(choice, state_tensors)
        return container

    def _container(self, choice: ChosenTensors, state_tensors: Mapping[str, torch.Tensor]) -> _Container:
        """Create a container with the variants of a choice, and zeros for those that it lacks."""
        tensors = choice.tensors
        chosen = {fqn: tensors[name] for fqn, name in self._variable.items() if name in tensors}
        return _Container(self._library, {**self._tensors, **state_tensors, **chosen})

    def _write_back(self, inputs: list[Any], tensors: list[torch.Tensor]) -> None:
        """Copy writes of the graph from row-major copies of inputs to the inputs."""
        for (index, _), tensor in zip(self._flat, tensors, strict=True):
            if index in self._written and tensor is not inputs[index]:
                inputs[index].copy_(tensor)


def _output(leaf: Leaf, values: Iterator[torch.Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return next(values)
    return int(next(values)) if isinstance(leaf, Integer) else None


# the C interface that AOTInductor gives to each library
_CREATE = "AOTInductorModelContainerCreateWithDevice"
_DELETE = "AOTInductorModelContainerDelete"
_RUN = "AOTInductorModelContainerRunSingleThreaded"
_BIND = "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs"
_BOUND = "AOTInductorModelContainerExtractConstantsMapEntries"
_REASON = "AOTInductorGetLastError"
# an error of an operator that machine code calls, and how the library's own message of it can be told
_INNER, _WITHIN = "torch_exception_get_what_without_backtrace", b" API call failed at "
_COUNTS = tuple(f"AOTInductorModelContainerGetNum{what}" for what in ("Constants", "Inputs", "Outputs"))
_NAME, _FQN, _DTYPE = (f"AOTInductorModelContainerGetConstant{what}" for what in ("Name", "OriginalFQN", "Dtype"))
_FOLDED = "AOTInductorModelContainerGetConstantFromFolded"

_P = ctypes.c_void_p
# torch passes handles of tensors to and from Python in capsules without a name
_STEAL = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


class _Entry(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class _Constant(NamedTuple):
    """A tensor that a library takes."""

    name: str  # in the C interface
    fqn: str
    dtype: int  # its number in torch


class Library:
    """A shared library with one compiled graph."""

    constants: tuple[_Constant, ...]  # the tensors that it is bound to
    inputs: int  # number of tensors
    outputs: int  # number of tensors
    stream: Callable[[], int | None]  # returns the handle of the stream to run in: on a GPU the thread's current one

    def __init__(self, raw: bytes, where: str, device: torch.device = _CPU) -> None:
        """Load machine code for `device`. Raises ArtifactError, and Unsupported if it cannot be loaded here."""
        self._where = where
        self._device = device
        self.stream = (lambda: None) if device.type == "cpu" else _CurrentStream(device)
        try:
            self._calls = _load(raw)
            for name in (_CREATE, _DELETE, _RUN, _BIND, _BOUND, _REASON, *_COUNTS, _NAME, _FQN, _DTYPE, _FOLDED):
                getattr(self._calls, name)
        except OSError as error:
            raise Unsupported(
                f"{where}: cannot be loaded by torch {torch.__version__} ({error}). Compile it again, or let this "
                "process run machine code from memory (memfd_create) or its temporary folder (TMPDIR)"
            ) from error
        except AttributeError as error:
            raise ArtifactError(f"{where}: was not compiled by AOTInductor ({error}). Compile it again.") from error
        self._run = getattr(self._calls, _RUN)
        self._run.argtypes = (_P, _P, ctypes.c_size_t, _P, ctypes.c_size_t, _P, _P)
        handle = self.create()
        constants, self.inputs, self.outputs = (self._count(handle, name) for name in _COUNTS)
        self.constants = tuple(self._constant(handle, index) for index in range(constants))
        self._frees_handles = self._deletes_handles(handle)

    def create(self) -> ctypes.c_void_p:
        """Create a container without tensors. To run it before `bind` would end the process."""
        handle = ctypes.c_void_p()
        self._call(_CREATE, ctypes.byref(handle), ctypes.c_size_t(1), str(self._device).encode(), None)
        return handle

    def bind(self, handle: ctypes.c_void_p, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Set a container's tensors, once, in the order of `constants`. Return the handles that it created."""
        pointers = _pointers(tensors)
        try:
            rows = zip(self.constants, pointers, strict=True)
            entries = (_Entry * len(pointers))(*(_Entry(constant.name.encode(), pointer) for constant, pointer in rows))
            self._call(_BIND, handle, entries, ctypes.c_size_t(len(entries)), False, True)
        finally:
            self.forget(pointers)
        bound, count = ctypes.POINTER(_Entry)(), ctypes.c_size_t()
        self._call(_BOUND, handle, ctypes.byref(bound), ctypes.byref(count), False)
        return [bound[index].handle for index in range(count.value)]

    def delete(self, handle: ctypes.c_void_p, created: Sequence[int]) -> None:
        """Delete a container and the handles that it created, which would keep the memory of tensors."""
        self.stream()  # deleting needs a CUDA context in whatever thread this is
        self._call(_DELETE, handle)
        if not self._frees_handles:
            self.forget(created)

    def run(self, *arguments: object) -> None:
        """Run the graph. Raises RuntimeError with the library's message."""
        if self._run(*arguments):
            self._fail(_RUN)

    def dtype_code(self, dtype: torch.dtype) -> int:
        """Return the number of a dtype in the C interface."""
        code: int = getattr(self._calls, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
        return code

    def _deletes_handles(self, handle: ctypes.c_void_p) -> bool:
        """Delete a container. Return whether that deletes its handles of tensors; in torch 2.13 it does not."""
        token = torch.empty(1, device=self._device)
        before = token._use_count()  # type: ignore[attr-defined]
        created = self.bind(handle, [token] * len(self.constants))
        self._call(_DELETE, handle)
        deletes: bool = token._use_count() == before  # type: ignore[attr-defined]
        if not deletes:
            self.forget(created)
        return deletes

    def forget(self, pointers: Iterable[int]) -> None:
        """Delete handles that nothing has taken over."""
        for pointer in pointers:
            self._calls.aoti_torch_delete_tensor_object(ctypes.c_void_p(pointer))

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._calls, name)(*arguments):
            self._fail(name)

    def _fail(self, name: str) -> NoReturn:
        message = ctypes.c_char_p()
        getattr(self._calls, _REASON)(ctypes.byref(message))
        reason = message.value or b""
        if _WITHIN in reason and (inner := getattr(self._calls, _INNER, None)):  # the message of torch's own kernel
            inner.restype = ctypes.c_char_p
            reason = inner() or reason
        text = reason.decode(errors="replace").strip() or f"{name} failed"
        raise RuntimeError(text.partition("\nException raised from")[0].removeprefix("Error: "))

    def _count(self, handle: ctypes.c_void_p, name: str) -> int:
        number = ctypes.c_size_t()
        self._call(name, handle, ctypes.byref(number))
        return number.value

    def _constant(self, handle: ctypes.c_void_p, index: int) -> _Constant:
        texts = []
        for name in (_NAME, _FQN):
            text = ctypes.c_char_p()
            self._call(name, handle, ctypes.c_size_t(index), ctypes.byref(text))
            texts.append((text.value or b"").decode(errors="replace"))
        dtype, folded = ctypes.c_int32(), ctypes.c_bool()
        self._call(_DTYPE, handle, ctypes.c_size_t(index), ctypes.byref(dtype))
        self._call(_FOLDED, handle, ctypes.c_size_t(index), ctypes.byref(folded))
        if folded.value:  # it would be stale after a swap
            raise ArtifactError(f"{self._where}: computes {texts[1]!r} once from weights. Compile it again")
        return _Constant(texts[0], texts[1], dtype.value)


class _Container:
    """A runner of a graph over tensors by FQN. It shares their memory, so each run reads their latest values.

    Only one thread at a time may run it.
    """

    def __init__(self, library: Library, tensors: Mapping[str, torch.Tensor]) -> None:
        self._library = library
        self._tensors = [tensors[constant.fqn] for constant in library.constants]
        self._handle = library.create()
        created: list[int] = []
        weakref.finalize(self, library.delete, self._handle, created).atexit = False  # before `bind`, which may raise
        created += library.bind(self._handle, self._tensors)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph and return its outputs. Raises RuntimeError for an error in the graph."""
        count = self._library.outputs
        arguments, results = (_P * len(inputs))(*_pointers(inputs)), (_P * count)()
        outputs: list[torch.Tensor] = []
        try:
            self._library.run(self._handle, arguments, len(inputs), results, count, self._library.stream(), None)
            capsules = [_new_capsule(pointer, None, None) for pointer in results]
            # one step that no interrupt can divide: a handle must be taken over only once
            outputs.extend(chain.from_iterable(map(_STEAL, (capsules,))))
        finally:
            if not outputs:
                self._library.forget(pointer for pointer in results if pointer)
        return outputs


def _pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Create handles of tensors, which the receiver must take over."""
    return [_pointer(capsule, None) for capsule in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))]


class _CurrentStream:
    """A function that returns the handle of the calling thread's current stream on a GPU.

    Machine code calls CUDA's driver, which needs a context in the thread. The first call in each thread has CUDA's
    runtime create it; torch's own calls may not have done so.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = local()

    def __call__(self) -> int:
        if not hasattr(self._threads, "has_context"):
            torch.cuda.current_stream(self._device).query()
            self._threads.has_context = True
        handle: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        return handle


def _load(raw: bytes) -> ctypes.CDLL:
    """Load a library from memory, which needs no writable directory, or else from a file that is deleted at once."""
    try:
        return _from_memory(raw)
    except OSError:  # the system may not execute files in memory
        return _from_file(raw)


def _from_memory(raw: bytes) -> ctypes.CDLL:
    file = os.memfd_create("weightswap", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(raw)
        # the descriptor stays open: the loader takes a library of the same name for the same library
        return ctypes.CDLL(f"/proc/self/fd/{file}", mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except BaseException:
        os.close(file)
        raise


def _from_file(raw: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="weightswap-") as folder:
        path = Path(folder, "graph.so")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
            file.write(raw)
        return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
