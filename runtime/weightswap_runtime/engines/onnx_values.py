"""Tensors as ONNX Runtime has them, over memory of ours and as numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from weightswap_runtime.contents import Content
from weightswap_runtime.dtypes import DTYPES
from weightswap_runtime.errors import MissingExtra, Unsupported

from .onnx_elements import ELEMENTS

try:
    from onnxruntime import OrtValue
except ImportError as error:
    raise MissingExtra("the engine `onnx`", "onnx") from error


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype, from ml_dtypes where numpy has none of its own. Raises MissingExtra."""
    element = ELEMENTS[dtype]
    if element.ml_dtype is None:
        return np.dtype(DTYPES[dtype].numpy)
    try:
        kinds: Any = import_module("ml_dtypes")
    except ImportError as error:
        raise MissingExtra(f"{dtype} in numpy (ml_dtypes)", "onnx") from error
    found: np.dtype[Any] = np.dtype(getattr(kinds, element.ml_dtype))
    return found


def dtype_names(dtypes: Iterable[str]) -> Mapping[np.dtype[Any], str]:
    """Safetensors names by numpy dtype: of all that numpy has, and of those of `dtypes` that it lacks."""
    own = [name for name, element in ELEMENTS.items() if element.ml_dtype is None]
    return {numpy_dtype(name): name for name in [*own, *dtypes] if name in ELEMENTS}


def _carrier(dtype: str) -> np.dtype[Any]:
    """What numpy, and ONNX Runtime from it, takes the elements for."""
    numpy = DTYPES[dtype].numpy
    return np.dtype(numpy or f"uint{DTYPES[dtype].bits}")


def value_of(memory: Any, dtype: str, shape: Sequence[int]) -> OrtValue:
    """A value over row-major bytes: a buffer or an array of uint8, which it keeps alive. Nothing is copied."""
    flat = np.frombuffer(memory, _carrier(dtype)) if len(memory) else np.empty(0, _carrier(dtype))
    return as_value(flat.reshape(shape), dtype)


def as_value(array: np.ndarray[Any, Any], dtype: str) -> OrtValue:
    """A value over the memory of an array, or over that of a copy where its elements are scattered or misaligned."""
    rows = np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED")).view(_carrier(dtype))
    if ELEMENTS[dtype].ml_dtype is None:
        return OrtValue.ortvalue_from_numpy(rows)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(rows, ELEMENTS[dtype].code)


def as_array(value: OrtValue, dtype: str) -> np.ndarray[Any, Any]:
    """A value as an array of its own memory, which lives as long as the array; a copy where numpy lacks the dtype."""
    if ELEMENTS[dtype].ml_dtype is None:
        array: np.ndarray[Any, Any] = value.numpy()
        return array
    shape = value.shape()
    size = int(np.prod(shape)) * DTYPES[dtype].bits // 8
    return np.frombuffer(bytearray(ctypes.string_at(value.data_ptr(), size)), numpy_dtype(dtype)).reshape(shape)


def content_array(content: Content) -> np.ndarray[Any, Any]:
    """An array in memory that numpy has allocated. Raises Unsupported for what ONNX Runtime lacks, and MissingExtra."""
    if content.dtype not in ELEMENTS:
        raise Unsupported(f"dtype {content.dtype}: ONNX Runtime has no such type")
    array = np.empty(content.shape, numpy_dtype(content.dtype))
    array.reshape(-1).view(np.uint8)[:] = content.data
    return array


def content_of(array: np.ndarray[Any, Any], names: Mapping[np.dtype[Any], str]) -> Content:
    """What is in an array, whose memory it shares where that is in order; `names` are those of `dtype_names`.

    Raises Unsupported for another dtype.
    """
    if array.dtype not in names:
        raise Unsupported(f"numpy's {array.dtype} is none of {', '.join(names.values())}")
    return Content(names[array.dtype], array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
