"""Streams of CUDA that torch hands to nobody else: an application that captured in one of ours would record our copies.

They are lent, and never destroyed, as torch's allocator knows the memory of a stream by its handle.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

_BESIDE_OTHERS = 1  # cudaStreamNonBlocking: in no order with the default stream
_spare: dict[tuple[int, int], list[torch.Stream]] = {}
_made: set[int] = set()


def lend_stream(owner: object, device: torch.device, priority: int) -> torch.Stream:
    """A stream for as long as `owner` lives. Where torch's CUDA is a part of torch itself, it is one of torch's."""
    spare = _spare.setdefault((device.index, priority), [])
    try:
        stream = spare.pop()
    except IndexError:
        stream = _new(device, priority)
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream


def is_ours(handle: int) -> bool:
    """Whether a handle is that of a stream that was made here."""
    return handle in _made


def _new(device: torch.device, priority: int) -> torch.Stream:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    create = getattr(ctypes.CDLL(None), "cudaStreamCreateWithPriority", None)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        if create is None or create(ctypes.byref(handle), _BESIDE_OTHERS, priority) or not handle.value:
            return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    _made.add(handle.value)
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]
