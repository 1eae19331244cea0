"""PEFT's layers in a model: checks, scaling factors, and the base model without them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from weightswap_runtime.errors import CaptureError
from weightswap_runtime.messages import listed

_LOADED = "_hf_peft_config_loaded"


def peft_base(model: nn.Module) -> nn.Module:
    """Return the base model of a model by `get_peft_model()`; any other model itself."""
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
    """Raise CaptureError unless each layer of PEFT applies exactly one set of tensors, unmerged and without DoRA."""
    for name, layer in _layers(model).items():
        if layer.merged:
            raise CaptureError(f"{name}: its variant is merged into the base; call unmerge_adapter() first")
        if layer.disable_adapters or len(layer.active_adapters) != 1:
            raise CaptureError(f"{name}: PEFT applies {len(layer.active_adapters)} sets of its tensors, expected one")
        if getattr(layer, "use_dora", {}).get(layer.active_adapters[0]):
            raise CaptureError(f"{name}: uses DoRA, which depends on the base's values; only LoRA can be variable")


def check_whole(model: nn.Module, variable: Collection[str]) -> None:
    """Raise CaptureError if a layer of PEFT has tensors of its own that are not variable: the base lacks them."""
    for name, layer in _layers(model).items():
        own = [f"{name}.{key}" for key in layer.state_dict() if not key.startswith("base_layer.")]
        if undeclared := [fqn for fqn in own if fqn not in variable]:
            raise CaptureError(f"variants: {listed(undeclared)} would belong to the base; declare all that PEFT added")


@contextmanager
def unscaled(model: nn.Module) -> Iterator[None]:
    """Set the scaling factors of LoRA's layers to 1 in the block."""
    with ExitStack() as stack:
        for layer in _layers(model).values():
            if isinstance(scaling := getattr(layer, "scaling", None), dict):
                stack.enter_context(mock.patch.dict(scaling, dict.fromkeys(scaling, 1.0)))
        yield


@contextmanager
def unwrapped_layers(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """Remove PEFT's layers in the block, so that the base model's checkpoints and loading code fit the model.

    Gives a mapping from prefixes of FQNs with PEFT's layers to those without them.
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
