"""Running torch without what the calling thread has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOCAST = ("cpu", "cuda")


@contextmanager
def default_torch_modes() -> Iterator[None]:
    """Without gradients, autocast, inference mode and `torch.device(...)` blocks of the caller.

    What weights are, and whether they reproduce their goldens, must not depend on who swaps them in. Torch's own
    blocks are written in Python: an interrupt in the middle of one leaves the thread in its mode.
    """
    before = [torch.is_autocast_enabled(device) for device in _AUTOCAST]
    try:
        # the first guard switches gradients on, and puts their mode back in the end
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(False)
            _set_autocast([False for _ in _AUTOCAST])
            yield
    finally:
        _set_autocast(before)


def _set_autocast(enabled: list[bool]) -> None:
    for device, on in zip(_AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(device, on)
