"""Tensors that are compared: stored, in memory, or computed when they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from weightswap_runtime.tensors.content import TensorBytes
from weightswap_tools.tensor_set import SetTensor


class Readable(Protocol):
    """A tensor whose bytes several threads may read."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...

    def read_into(self, memory: memoryview, begin: int) -> None:
        """Fill the memory with its row-major bytes from `begin` on. Raises WeightswapError."""
        ...


class Computed(NamedTuple):
    """A tensor that takes memory for all of it: one that an adapter computes, or that can only be read whole."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    compute: Callable[[], TensorBytes]


Tensor = SetTensor | TensorBytes | Computed
