"""ONNX Runtime's tensors, over memory of ours and as numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightswap_runtime.errors import MissingExtra, Unsupported
from weightswap_runtime.tensors.content import TensorBytes, array_content, is_numpys, numpy_dtype
from weightswap_runtime.tensors.dtypes import DTYPES

from .elements import ELEMENTS

try:
    from onnxruntime import OrtValue
except ImportError as error:
    raise MissingExtra("the engine `onnx`", "onnx") from error


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
