"""Tensors between files, engines and comparisons, and the numpy arrays that they are where numpy has the dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dtypes import DTYPES, NUMPY_NAMES
from .errors import Unsupported


class Content(NamedTuple):
    """A tensor's safetensors dtype, its shape, and its row-major, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def as_array(content: Content) -> NDArray[Any]:
    """An array over the bytes, whose memory it shares. Raises Unsupported where numpy has no such type."""
    name = DTYPES[content.dtype].numpy
    if name is None:
        raise Unsupported(f"dtype {content.dtype}: numpy has no such type")
    return np.frombuffer(content.data, np.dtype(name).newbyteorder("<")).reshape(content.shape)


def array_content(array: NDArray[Any]) -> Content:
    """The content of an array; shares its memory where that is in order already.

    Raises Unsupported for a dtype without a safetensors name.
    """
    name = NUMPY_NAMES.get(array.dtype.name)
    if name is None:
        raise Unsupported(f"numpy's {array.dtype} has no place in the safetensors format")
    rows = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return Content(name, array.shape, rows.reshape(-1).view(np.uint8).data)
