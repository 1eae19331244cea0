"""The functions of native.c, where it was compiled when the package was built; whoever uses them can do without."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).with_name("libnative.so")
Offsets = npt.NDArray[np.int64]


def _open() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError:  # it was not compiled, or is for another processor or C library
        return None
    for name in ("rehash", "scatter", "gather", "copy"):
        getattr(library, name).restype = None
    return library


library = _open()  # its functions release the interpreter's lock


def address(memory: memoryview | npt.NDArray[Any]) -> ctypes.c_void_p:
    """Return where contiguous memory begins; the caller keeps it alive."""
    array = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    return ctypes.c_void_p(array.ctypes.data)


def as_bytes(array: Offsets) -> memoryview:
    """Return the bytes of an array, which are those of its memory if that is contiguous."""
    return np.ascontiguousarray(array).view(np.uint8).data
