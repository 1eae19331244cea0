"""Checkpoints of transformers' models, and their loading as in `from_pretrained`.

Files of transformers differ from the model's state dict: tied weights are left out, names change, and values are
split and joined (a file has one tensor for each expert, the model one for all). transformers does this in
`save_pretrained` and `from_pretrained`; here it is done without files and without copies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from weightswap_runtime.errors import CheckpointError, Unsupported

INITIALIZED = "_is_hf_initialized"  # an attribute that loading sets, and no call reads


def is_pretrained(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, which is not imported for this."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switch off the key-value cache of a transformers model in the block: a cache cannot be an output of a graph."""
    config: Any = model.config if is_pretrained(model) else None
    configs = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ())))
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the keys that `model.save_pretrained()` writes, with tensors of their shape and dtype on the meta device.

    The model may be real or a skeleton; its values are not read. Raises Unsupported for a quantised model and for one
    with adapters, whose files have other content.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    owner: Any = model
    _check_plain(owner)
    # transformers finds ties of meta tensors by identity, of others by address, which fake tensors lack
    state = {key: _hollow(value) for key, value in owner.state_dict().items() if isinstance(value, torch.Tensor)}
    for key in owner._keys_to_ignore_on_save or ():
        state.pop(key, None)
    state = remove_tied_weights_from_state_dict(state, owner)
    return dict(revert_weight_conversion(owner, state))


def load(model: nn.Module, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Put a checkpoint's tensors into a model as `from_pretrained` does: renamed, converted, cast, tied.

    Parameters are replaced, not written to, so that a skeleton can be loaded, and a tracer sees every operation. As in
    `from_pretrained`, unexpected keys are skipped, and tied weights may be absent. Unlike it, this refuses a checkpoint
    that does not fit: CheckpointError lists the keys that are missing, have another shape, or fail to convert. The
    model is then partly loaded.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    owner: Any = model
    _check_plain(owner)
    conversions: list[Any] = get_model_conversion_mapping(owner)
    device = next((str(tensor.device) for tensor in checkpoint.values()), "cpu")
    config = LoadStateDictConfig(weight_mapping=conversions, dtype=owner.dtype, device_map={"": device})
    # transformers converts tensors in a thread pool, which a tracer does not see
    in_this_thread = mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
    with torch.no_grad(), in_this_thread, _silent():
        report, _ = convert_and_load_state_dict_in_model(owner, dict(checkpoint), config, None)
        owner.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
        owner._adjust_missing_and_unexpected_keys(report)
    if problems := [*_problems(report), *_unscaled(report.unexpected_keys, checkpoint)]:
        head = f"{type(model).__qualname__}: cannot load the checkpoint"
        raise CheckpointError(head, *(f"  - {problem}" for problem in problems))


def _check_plain(model: Any) -> None:
    name = type(model).__qualname__
    if getattr(model, "hf_quantizer", None) is not None:
        raise Unsupported(f"{name}: is quantised by transformers; export the original, and give its checkpoints")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise Unsupported(
            f"{name}: has adapters, and its files hold only those. Export what peft.get_peft_model() returns, or "
            "merge the adapters first."
        )


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _silent() -> Iterator[None]:
    """Disable transformers' progress bars in the block."""
    from transformers.utils import logging

    previous = logging.set_tqdm_hook(lambda _, args, __: args[0])
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def _unscaled(unexpected: Collection[str], checkpoint: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield texts about skipped keys beside 8-bit floats: what `from_pretrained` casts may lack its scale."""
    coarse = {
        key.rpartition(".")[0]
        for key, value in checkpoint.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() == 1
    }
    for key in sorted(key for key in unexpected if key.rpartition(".")[0] in coarse):
        yield f"{key}: may be the scale of the 8-bit floats beside it, which this model would not apply"


def _problems(report: Any) -> Iterator[str]:
    yield from (f"{key}: missing" for key in sorted(report.missing_keys))
    for key, shape, expected in sorted(report.mismatched_keys):
        yield f"{key}: has shape {list(shape)}, the model has {list(expected)}"
    for key, text in sorted(report.conversion_errors.items()):
        yield f"{key}: cannot be converted: {text.strip().splitlines()[-1]}"
