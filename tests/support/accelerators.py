"""Devices that tests run on: the CPU, and the accelerator that torch finds, normally CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

_FOUND = torch.accelerator.current_accelerator(check_available=True)
ACCELERATOR = _FOUND.type if _FOUND else "cuda"
_ABSENT = pytest.mark.skipif(_FOUND is None, reason="needs a GPU, but torch finds none here")
_MARKS = [pytest.mark.cuda, _ABSENT]
on_accelerator = pytest.mark.parametrize("device", [pytest.param(ACCELERATOR, id="cuda", marks=_MARKS)])
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param(ACCELERATOR, id="cuda", marks=_MARKS)])


def moved(tree: Any, device: str) -> Any:
    return pytree.tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, tree)


def use_own_stream(device: str) -> None:
    """Let the calling thread use a stream of its own. The CPU has no streams."""
    if device != "cpu":
        torch.accelerator.set_stream(torch.Stream(device))
