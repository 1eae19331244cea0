"""Running torch without the modes that the calling thread has enabled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_AUTOCAST = ("cpu", "cuda")
_DENORMAL, _ONE = np.float32(1e-40), np.float32(1)


@contextmanager
def default_torch_modes() -> Iterator[None]:
    """Run the block without the modes of the calling thread.

    These are gradients, autocast, inference mode, `torch.device(...)` contexts and the flushing of denormal numbers.
    The weights, and whether they reproduce their goldens, must not depend on the caller of the swap. Torch's own
    context managers are written in Python: an interrupt in the middle of one leaves the thread in its mode.
    """
    before = [torch.is_autocast_enabled(device) for device in _AUTOCAST]
    flushes = not _DENORMAL * _ONE  # torch does not tell
    try:
        # the first guard enables gradients, and restores their mode at the end
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(False)
            _set_autocast([False for _ in _AUTOCAST])
            if flushes:
                torch.set_flush_denormal(False)
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)
        _set_autocast(before)


def _set_autocast(enabled: list[bool]) -> None:
    for device, on in zip(_AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(device, on)
