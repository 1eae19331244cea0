"""Tensors in this process's memory as byte sources: torch's on any device, and numpy's.

Their owner may write to them at any time. Torch counts most writes, but not those of fused optimizers, through `.data`,
or through numpy: only a second look (`holds`) finds these.
"""

from __future__ import annotations

import sys
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges, gather
from weightswap_runtime.errors import SourceChanged
from weightswap_runtime.native import Offsets, copy_bytes, same_bytes
from weightswap_runtime.tensors import Blocks, TensorType, array_content, block_digests, nbytes, safetensors_name

from .byte_source import ByteSource

if TYPE_CHECKING:
    import torch

_STEP = "Give weights to a swap between two steps of their optimizer, or give copies of them."


class MemorySource(ByteSource):
    """A tensor as a ByteSource: its row-major bytes. `type` has its dtype and shape.

    What is not in host memory in this order is copied there at the first read, and dropped when all of it was read.
    """

    def __init__(self, where: str, value: torch.Tensor | np.ndarray) -> None:
        """Raises ValueError for what is no plain tensor with values; its text says what to give instead."""
        torch = sys.modules.get("torch")
        self.is_torchs = torch is not None and isinstance(value, torch.Tensor)
        self.value: Any = value
        self.where = where
        self.type = _type_of_tensor(value) if self.is_torchs else _type_of_array(value)
        self.size = nbytes(self.type.dtype, self.type.shape) or 0
        self._version = self._count()
        self._lock = Lock()
        self._bytes: memoryview | None = None
        self._unread = 0

    def _count(self) -> int | None:
        """Return torch's count of writes; None where nobody counts."""
        return self.value._version if self.is_torchs and not self.value.is_inference() else None

    def _open(self) -> memoryview:
        with self._lock:
            if self._bytes is None:
                self._bytes, self._unread = self._content(), self.size
            return self._bytes

    def _content(self) -> memoryview:
        if not self.is_torchs:
            return array_content(self.value).data
        from weightswap_runtime.torch_tensors import tensor_bytes

        return tensor_bytes(self._checked())

    def _checked(self) -> torch.Tensor:
        """Return torch's tensor without its gradient. Raises SourceChanged if it is no longer of this type."""
        value: torch.Tensor = self.value.detach()  # what is assigned to its `.data` from now on is another tensor's
        try:
            is_same = _type_of_tensor(value) == self.type
        except ValueError as error:  # such as memory that was freed meanwhile
            raise self.changed() from error
        if not is_same:
            raise self.changed()
        return value

    def _close(self, nbytes: int) -> None:
        with self._lock:
            self._unread -= nbytes
            if self._unread <= 0:
                self._bytes = None

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill the buffers with the bytes from `offset` on."""
        begin, content = offset, self._open()
        for buffer in buffers:
            copy_bytes(buffer, content[offset : offset + len(buffer)])
            offset += len(buffer)
        self._close(offset - begin)

    def holds(self, offset: int, memory: memoryview) -> bool:
        """Return whether the tensor's bytes from `offset` on are those in `memory`."""
        same = same_bytes(self._open()[offset : offset + len(memory)], memory)
        self._close(len(memory))
        return same

    def digests(self, start: int, stop: int) -> Blocks:
        """Return the digests of the blocks of the bytes from `start`, where a block begins, to `stop`."""
        digests = block_digests(self._open()[start:stop])
        self._close(stop - start)
        return digests

    def rows(self, ids: Offsets) -> memoryview:
        """Return a copy of rows of the first dimension, end to end. Nothing else is copied. Raises SourceChanged."""
        if self._is_row_major():
            width = self.size // self.type.shape[0]
            copy = np.empty(len(ids) * width, np.uint8).data
            gather(self._content(), ByteRanges.of_rows(ids, width, copy))
            return copy
        if not self.is_torchs:
            return array_content(self.value[ids]).data
        import torch

        from weightswap_runtime.torch_tensors import tensor_bytes

        value = self._checked()
        return tensor_bytes(value.index_select(0, torch.from_numpy(ids).to(value.device)))

    def _is_row_major(self) -> bool:
        """Return whether the host's memory has the bytes in their order."""
        value = self.value
        if not self.is_torchs:
            return bool(value.flags.c_contiguous and value.dtype.newbyteorder("<") == value.dtype)
        return bool(value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg())

    def is_of(self, value: Any) -> bool:
        """Return whether the tensor is another one, or views the same memory in the same order."""
        return _place_of(self.value) == _place_of(value)

    def await_stable_mtime(self) -> None:
        """Do nothing: there is no time by which writes are known."""

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise SourceChanged if torch has counted a write to the tensor since this source was made."""
        if self._count() != self._version:
            raise self.changed()

    def changed(self) -> SourceChanged:
        """Return the error that says so."""
        return SourceChanged(f"{self.where}: was written to while it was read. {_STEP}")

    def close(self) -> None:
        self._bytes = self.value = None


def _place_of(value: Any) -> tuple[object, ...]:
    """Return which bytes a tensor of torch or numpy has, in which order."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data, "cpu", value.shape, value.strides
    strides = tuple(step * value.element_size() for step in value.stride())
    return value.data_ptr(), str(value.device), tuple(value.shape), strides


def _type_of_array(value: object) -> TensorType:
    if type(value) not in (np.ndarray, np.memmap):
        if isinstance(value, dict):
            raise ValueError("a dict; if the tensors are in it, give that dict itself")
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"no tensor, but of the type {name}; give a torch.Tensor or a numpy.ndarray")
    assert isinstance(value, np.ndarray)
    dtype = safetensors_name(value.dtype)
    if dtype is None:
        raise ValueError(f"has numpy's dtype {value.dtype}, which no weight has")
    return TensorType(dtype, value.shape)


def _type_of_tensor(value: Any) -> TensorType:
    if problem := _problem_of(value):
        raise ValueError(problem)
    from weightswap_runtime.torch_tensors import DTYPE_NAMES

    dtype = DTYPE_NAMES.get(value.dtype)
    if dtype is None:
        raise ValueError(f"has {value.dtype}, which no weight has")
    return TensorType(dtype, tuple(value.shape))


def _problem_of(value: torch.Tensor) -> str:
    """Return why a tensor's values cannot be read as they are, and what to give instead; else an empty string."""
    torch = sys.modules["torch"]
    kind = type(value)
    if hasattr(value, "full_tensor"):
        return f"a {kind.__qualname__}, which has a part of the values; give what its full_tensor() returns"
    if value.is_meta or hasattr(value, "fake_mode") or kind.__qualname__.startswith("Uninitialized"):
        return "has no values; load or initialize the model first"
    # torchrec's is a view of the memory that several tables share, and has nothing of its own but its gradient
    is_view = kind.__module__.startswith("torchrec.") and kind.__qualname__ == "TableBatchedEmbeddingSlice"
    if not is_view and kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return (
            f"a {kind.__qualname__}, not a plain tensor; give its parts under their names in the artifact, or pack the "
            "model (weightswap_exporter.pack) and give the file"
        )
    if value.layout != torch.strided or value.is_nested:
        return "sparse or nested; give a dense tensor, such as that of to_dense()"
    if value.is_quantized:
        return f"has {value.dtype}, which no weight has"
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    needed = (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0
    if value.untyped_storage().nbytes() < needed:
        return "its memory was freed, as that of parameters which are sharded; gather them first"
    return ""
