"""Tensors as bytes, exchanged by files, engines and comparisons, and as arrays of numpy with ml_dtypes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import Unsupported

from .dtypes import DTYPES, TORCH_NAMES, has_fractions


class TensorBytes(NamedTuple):
    """A tensor's safetensors dtype, its shape, and its row-major, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, memory: memoryview, begin: int) -> None:
        """Fill the memory with bytes from the offset `begin` on."""
        memory[:] = self.data[begin : begin + len(memory)]


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of numpy or ml_dtypes. Raises Unsupported for elements that do not fill whole bytes."""
    name = DTYPES[dtype].torch
    if name is None:
        raise Unsupported(f"dtype {dtype}: numpy has no such type")
    return np.dtype(getattr(ml_dtypes, name, name))


def is_numpys(dtype: str) -> bool:
    """Return whether the type is numpy's own."""
    return numpy_dtype(dtype).isbuiltin == 1


def as_array(content: TensorBytes) -> NDArray[Any]:
    """Return an array that shares the bytes' memory. Raises Unsupported if numpy has no such type."""
    return np.frombuffer(content.data, _little_endian(numpy_dtype(content.dtype))).reshape(content.shape)


def array_content(array: NDArray[Any]) -> TensorBytes:
    """Return the content of an array; it shares the array's memory if that is row-major and little-endian.

    Raises Unsupported for a dtype without a safetensors name.
    """
    name = _safetensors_name(array.dtype)
    if name is None:
        raise Unsupported(f"numpy's {array.dtype} is not a dtype of the safetensors format")
    rows = np.ascontiguousarray(array, _little_endian(array.dtype))
    return TensorBytes(name, array.shape, rows.reshape(-1).view(np.uint8).data)


@functools.lru_cache
def _safetensors_name(dtype: np.dtype[Any]) -> str | None:
    return TORCH_NAMES.get(dtype.name)


@functools.lru_cache
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def as_float64(content: TensorBytes, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the elements as float64 or complex128, flat and row-major. Integers beyond 2**53 are rounded.

    out: memory for the result, of its dtype and size. Raises Unsupported for dtypes whose elements do not fill whole
    bytes.
    """
    values = as_array(content).reshape(-1)
    if DTYPES[content.dtype].bits == 8 and has_fractions(content.dtype):  # several times faster than a cast
        return np.take(_float8_values(content.dtype), values.view(np.uint8), out=out, mode="clip")
    if out is None:
        out = np.empty(len(values), np.complex128 if values.dtype.kind == "c" else np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN is made a quiet one
        np.copyto(out, values, casting="unsafe")
    return out


@functools.cache
def _float8_values(dtype: str) -> NDArray[Any]:
    """Return the values of all 256 codes."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float64)
