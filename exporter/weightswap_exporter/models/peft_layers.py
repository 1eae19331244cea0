"""PEFT's layers in a model: the model that they were put into, and what of them a graph would fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from weightswap_runtime.errors import CaptureError

_LOADED = "_hf_peft_config_loaded"


def peft_base(model: nn.Module) -> nn.Module:
    """The model that PEFT has put its layers into, for what `get_peft_model()` returns; any other as it is."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


def _layers(model: nn.Module) -> dict[str, Any]:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, tuners.BaseTunerLayer)}


def check_active(model: nn.Module) -> None:
    """Raise CaptureError unless every layer of PEFT applies one set of its tensors, which is not merged."""
    for name, layer in _layers(model).items():
        if layer.merged:
            raise CaptureError(f"{name}: its variant is merged into the base; call unmerge_adapter() first")
        if layer.disable_adapters or len(layer.active_adapters) != 1:
            raise CaptureError(f"{name}: PEFT applies {len(layer.active_adapters)} sets of its tensors, expected one")
        if getattr(layer, "use_dora", {}).get(layer.active_adapters[0]):
            raise CaptureError(f"{name}: uses DoRA, which depends on the base's values; LoRA alone can be variable")


@contextmanager
def unscaled(model: nn.Module) -> Iterator[None]:
    """A block in which the factors of LoRA's layers are one."""
    with ExitStack() as stack:
        for layer in _layers(model).values():
            if isinstance(scaling := getattr(layer, "scaling", None), dict):
                stack.enter_context(mock.patch.dict(scaling, dict.fromkeys(scaling, 1.0)))
        yield


@contextmanager
def unwrapped_layers(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """A block in which the model has its own layers, without PEFT's: its checkpoints and its loading code fit it.

    Gives the prefixes of FQNs with PEFT's layers, each with what it is without them.
    """
    layers = _layers(model)
    prefixes = {f"{name}.base_layer.": f"{name}." for name in layers if hasattr(layers[name], "base_layer")}
    with ExitStack() as stack:
        for prefix in prefixes:
            path, _, child = prefix.removesuffix(".base_layer.").rpartition(".")
            modules = model.get_submodule(path)._modules
            inner = layers[f"{path}.{child}" if path else child].get_base_layer()
            stack.enter_context(mock.patch.dict(modules, {child: inner}))
        if prefixes and getattr(model, _LOADED, False):
            stack.enter_context(mock.patch.object(model, _LOADED, False))
        yield prefixes
