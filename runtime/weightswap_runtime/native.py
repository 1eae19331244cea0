"""Functions in C, which release the interpreter's lock: those of native.c, where it was compiled when the package was
built (whoever uses them can do without), and the C library's for plain bytes."""

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
    library.has_pattern.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64)
    library.upload.restype = ctypes.c_int64
    return library


library = _open()
UPLOAD_BYTES = 8 << 20  # of page-locked memory that `upload` of native.c uses: PIECES of PIECE bytes
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def address(memory: memoryview | npt.NDArray[Any]) -> ctypes.c_void_p:
    """Return where contiguous memory begins; the caller keeps it alive."""
    array = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    return ctypes.c_void_p(array.ctypes.data)


def as_bytes(array: Offsets) -> memoryview:
    """Return the bytes of an array, which are those of its memory if that is contiguous."""
    return np.ascontiguousarray(array).view(np.uint8).data


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes between memories of the same size, releasing the interpreter's lock, unlike an assignment.

    Raises TypeError for a target that is read-only.
    """
    if len(source):
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), address(source), len(source))


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Return whether memories of the same size hold the same bytes."""
    return not len(one) or _compare(address(one), address(other), len(one)) == 0
