"""transformers models: what their checkpoints look like, and how `from_pretrained` turns one into a model's tensors.

Files of transformers differ from the model's state dict: tied weights are left out, names change, and values are
split and joined (a file has one tensor for each expert, the model one for all). transformers does this in
`save_pretrained` and `from_pretrained`; both directions are here without a disk and without memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from weightswap_runtime.errors import CheckpointError, Unsupported


def is_pretrained(model: nn.Module) -> bool:
    """Whether transformers saves and loads the model. It is not imported where it is not in use."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers ask for no key-value cache meanwhile: a cache cannot be the output of a graph."""
    config: Any = model.config if is_pretrained(model) else None
    configs = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ())))
    asking = [config for config in configs if getattr(config, "use_cache", False)]
    try:
        for config in asking:
            config.use_cache = False
        yield
    finally:
        for config in asking:
            config.use_cache = True


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `model.save_pretrained()` writes: its keys, with tensors of the right shape and dtype on the meta device.

    The model may be real or a skeleton; its values are not looked at. Raises Unsupported for a quantised model and for
    one with adapters, whose files hold something else.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    owner: Any = model
    _check_plain(owner)
    # on the meta device transformers knows ties by the parameters' identity, else by addresses, which fakes lack
    state = {key: _hollow(value) for key, value in owner.state_dict().items() if isinstance(value, torch.Tensor)}
    for key in owner._keys_to_ignore_on_save or ():
        state.pop(key, None)
    state = remove_tied_weights_from_state_dict(state, owner)
    return dict(revert_weight_conversion(owner, state))


def load(model: nn.Module, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Put a checkpoint's tensors into a model as `from_pretrained` does: renamed, converted, cast, tied.

    Parameters are replaced, not written into, so that a skeleton can be loaded, and a tracer sees every operation. As
    with `from_pretrained`, keys that the model has no use for are left out, and tied weights may be absent. Unlike it,
    a checkpoint that does not fit is refused: CheckpointError lists the keys that are missing, of another shape, or
    fail to convert. The model is then left partly loaded.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    owner: Any = model
    _check_plain(owner)
    conversions: list[Any] = get_model_conversion_mapping(owner)
    device = next((str(tensor.device) for tensor in checkpoint.values()), "cpu")
    config = LoadStateDictConfig(weight_mapping=conversions, dtype=owner.dtype, device_map={"": device})
    # transformers converts in a pool of threads, where a tracer would not see it
    in_this_thread = mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
    with torch.no_grad(), in_this_thread, _silent():
        found, _ = convert_and_load_state_dict_in_model(owner, dict(checkpoint), config, None)
        owner.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
        owner._adjust_missing_and_unexpected_keys(found)
    if problems := list(_problems(found)):
        head = f"{type(model).__qualname__}: cannot load the checkpoint"
        raise CheckpointError(head, *(f"  - {problem}" for problem in problems))


def _check_plain(model: Any) -> None:
    name = type(model).__qualname__
    if getattr(model, "hf_quantizer", None) is not None:
        raise Unsupported(f"{name}: is quantised by transformers; pack it, or export what it was made from")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise Unsupported(
            f"{name}: has adapters, and its files hold those alone. Export what peft.get_peft_model() returns, or "
            "merge the adapters first."
        )


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _silent() -> Iterator[None]:
    """No progress bar, whatever the process has set up."""
    from transformers.utils import logging

    previous = logging.set_tqdm_hook(lambda _, args, __: args[0])
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def _problems(found: Any) -> Iterator[str]:
    yield from (f"{key}: missing" for key in sorted(found.missing_keys))
    for key, shape, expected in sorted(found.mismatched_keys):
        yield f"{key}: has shape {list(shape)}, the model {list(expected)}"
    for key, text in sorted(found.conversion_errors.items()):
        yield f"{key}: cannot be converted: {text.strip().splitlines()[-1]}"
