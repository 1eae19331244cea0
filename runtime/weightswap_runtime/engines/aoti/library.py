"""AOTInductor's compiled graphs, called through their C interface.

torch's own Python binding holds the interpreter's lock during a call; a call through ctypes does not. A library is
never unloaded (its code forbids it), so it is opened once, and creates containers in microseconds.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from threading import local
from typing import NamedTuple, NoReturn

import torch

from weightswap_runtime.errors import ArtifactError, Unsupported

_CREATE = "AOTInductorModelContainerCreateWithDevice"
_DELETE = "AOTInductorModelContainerDelete"
_RUN = "AOTInductorModelContainerRunSingleThreaded"
_BIND = "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs"
_BOUND = "AOTInductorModelContainerExtractConstantsMapEntries"
_REASON = "AOTInductorGetLastError"
_INNER, _WITHIN = "torch_exception_get_what_without_backtrace", b" API call failed at "
_COUNTS = tuple(f"AOTInductorModelContainerGetNum{what}" for what in ("Constants", "Inputs", "Outputs"))
_NAME, _FQN, _DTYPE = (f"AOTInductorModelContainerGetConstant{what}" for what in ("Name", "OriginalFQN", "Dtype"))
_FOLDED = "AOTInductorModelContainerGetConstantFromFolded"

CPU = torch.device("cpu")

_P = ctypes.c_void_p
_STEAL = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


class _Entry(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class Constant(NamedTuple):
    """A tensor that a library takes: its name in the C interface, its FQN, and its dtype's number in torch."""

    name: str
    fqn: str
    dtype: int


class Library:
    """A shared library with one compiled graph. `inputs` and `outputs` are the numbers of its tensors.

    `stream` returns the handle of the stream to run in: on a GPU the calling thread's current one, else None.
    """

    def __init__(self, raw: bytes, where: str, device: torch.device = CPU) -> None:
        """Load machine code for `device`. Raises ArtifactError, and Unsupported if it cannot be loaded here."""
        self._where = where
        self._device = device
        self.stream: Callable[[], int | None] = (lambda: None) if device.type == "cpu" else _CurrentStream(device)
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

    def _constant(self, handle: ctypes.c_void_p, index: int) -> Constant:
        texts = []
        for name in (_NAME, _FQN):
            text = ctypes.c_char_p()
            self._call(name, handle, ctypes.c_size_t(index), ctypes.byref(text))
            texts.append((text.value or b"").decode(errors="replace"))
        dtype, folded = ctypes.c_int32(), ctypes.c_bool()
        self._call(_DTYPE, handle, ctypes.c_size_t(index), ctypes.byref(dtype))
        self._call(_FOLDED, handle, ctypes.c_size_t(index), ctypes.byref(folded))
        if folded.value:
            raise ArtifactError(f"{self._where}: computes {texts[1]!r} once from weights. Compile it again")
        return Constant(texts[0], texts[1], dtype.value)


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


class Container:
    """A runner of a graph over tensors by FQN. It shares their memory, so each run reads their latest values.

    Only one thread at a time may run it.
    """

    def __init__(self, library: Library, tensors: Mapping[str, torch.Tensor]) -> None:
        self._library = library
        self._tensors = [tensors[constant.fqn] for constant in library.constants]
        self._handle = library.create()
        created: list[int] = []
        weakref.finalize(self, library.delete, self._handle, created).atexit = False
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
