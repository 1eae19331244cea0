"""CUDA streams that torch hands to nobody else: an application that captured in one would record our copies.

They are lent and never destroyed, because torch's allocator identifies the memory of a stream by its handle.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

_NON_BLOCKING = 1  # cudaStreamNonBlocking: not synchronized with the default stream
_spare: dict[tuple[int, int], list[torch.Stream]] = {}
_created: set[int] = set()


def lend_stream(owner: object, device: torch.device, priority: int) -> torch.Stream:
    """Lend a stream for as long as `owner` lives. If CUDA is linked into torch itself, it is one of torch's streams."""
    spare = _spare.setdefault((device.index, priority), [])
    try:
        stream = spare.pop()
    except IndexError:
        stream = _new(device, priority)
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream


def is_ours(handle: int) -> bool:
    """Return whether a handle is that of a stream that was created here."""
    return handle in _created


def _new(device: torch.device, priority: int) -> torch.Stream:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    create = getattr(ctypes.CDLL(None), "cudaStreamCreateWithPriority", None)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        if create is None or create(ctypes.byref(handle), _NON_BLOCKING, priority) or not handle.value:
            return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    _created.add(handle.value)
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]
