"""Running torch without the modes that the calling thread has enabled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOCAST = ("cpu", "cuda")


@contextmanager
def default_torch_modes() -> Iterator[None]:
    """Run the block without the caller's gradients, autocast, inference mode and `torch.device(...)` contexts.

    The weights, and whether they reproduce their goldens, must not depend on the caller of the swap. Torch's own
    context managers are written in Python: an interrupt in the middle of one leaves the thread in its mode.
    """
    before = [torch.is_autocast_enabled(device) for device in _AUTOCAST]
    try:
        # the first guard enables gradients, and restores their mode at the end
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(False)
            _set_autocast([False for _ in _AUTOCAST])
            yield
    finally:
        _set_autocast(before)


def _set_autocast(enabled: list[bool]) -> None:
    for device, on in zip(_AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(device, on)
