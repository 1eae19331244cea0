"""Recording the adapter: which key of `model.state_dict()` holds which weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weightswap_runtime.errors import CaptureError
from weightswap_runtime.manifest import Adapter, NamedTensor, Source

from .tables import TieKey, tie_key


def record_adapter(model: nn.Module, weights: tuple[NamedTensor, ...], state: tuple[NamedTensor, ...]) -> Adapter:
    """Match the state dict with the model's tensors by identity, so that any renaming hook is covered.

    Keys without a tensor (`_extra_state`) and keys of state are recorded as ignored. A weight that no key holds gets
    a source without keys: a hook computes it, which needs a value transform.
    """
    try:
        saved: Mapping[str, object] = model.state_dict(keep_vars=True)
    except Exception as error:
        raise CaptureError(f"model.state_dict() fails: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    weight_of: dict[TieKey, str] = {tie_key(tensors[weight.name]): weight.name for weight in weights}
    state_keys = {tie_key(tensors[item.name]) for item in state}
    keys: dict[str, list[str]] = {weight.name: [] for weight in weights}
    ignored: list[str] = []
    for key, value in saved.items():
        identity = tie_key(value) if isinstance(value, torch.Tensor) else None
        if identity is None or identity in state_keys:
            ignored.append(key)
        elif identity in weight_of:
            keys[weight_of[identity]].append(key)
    sources = tuple(Source(weight=name, keys=tuple(found)) for name, found in keys.items())
    return Adapter(sources=sources, ignored=tuple(ignored))
