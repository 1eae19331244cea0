"""The bytes of a tensor's values."""

from __future__ import annotations

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major, little-endian bytes. A view of the tensor's own memory where that is on the CPU and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
