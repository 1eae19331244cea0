"""Running torch without what the calling thread has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plainly() -> Iterator[None]:
    """Without gradients, autocast, inference mode and `torch.device(...)` blocks of the caller.

    What weights are, and whether they reproduce their goldens, must not depend on who swaps them in.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch._C.DisableTorchFunction(),
    ):
        yield
