"""Language models of transformers as two methods, `prefill` and `decode`, with key-value caches as state.

The caches are buffers of fixed size, and the position to write at is an input. transformers' own export helpers keep
the position in the cache, as a tensor that a graph writes to, and cannot be captured twice over one state.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.manifest import TextGeneration

from .capture import MethodSpec

_TABLES = r"(?:^|\.)(?:wpe|\w*position\w*)$"  # names of embeddings of positions in transformers' models
# settings of transformers' `generate` that change tokens without being asked for, and their values that do not
_SETTINGS: dict[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "repetition_penalty": 1,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
}
_KEYS, _VALUES = "key_cache_{}", "value_cache_{}"  # buffers, by the number of the layer


def decoder(model: nn.Module, length: int, batch: int) -> tuple[nn.Module, Mapping[str, MethodSpec], TextGeneration]:
    """Prepare a causal language model of transformers, real or a skeleton, with caches of a fixed size.

    length: capacity of a context in tokens, prompt and answer together. batch: number of sequences that are generated
    side by side. `prefill(input_ids, attention_mask, position_ids, position)` takes int64 [batch, n], with n from 1 to
    `length`; int64 [batch, length], 1 where the cache holds a token or gets one in this call; int64 [batch, n]; and
    int64 [], the position of the first token in the cache. It returns the logits after the last token, [batch,
    vocabulary]. `decode` is the same for n = 1. Raises Unsupported for a model that cannot be exported so.
    """
    import transformers

    owner: Any = model
    if not isinstance(model, transformers.PreTrainedModel) or not owner.can_generate():
        raise Unsupported(f"{type(model).__qualname__}: is not a transformers language model that can generate")
    if length < 2 or batch < 1:
        raise Unsupported(f"length={length}, batch={batch}: expected a length of 2 or more, a batch of 1 or more")
    if problem := _problem(owner, length):
        raise Unsupported(problem)
    shared = _sharing(model)
    shared.__class__ = type(type(model).__name__, (_Methods, type(model)), {"cache_length": length})
    for index, shapes in enumerate(_cache_shapes(owner, batch)):
        for buffer, (shape, dtype) in zip((_KEYS, _VALUES), shapes, strict=True):
            zeros = torch.zeros(*shape[:2], length, shape[3], dtype=dtype)
            shared.register_buffer(buffer.format(index), zeros, persistent=False)
    methods = {"prefill": _method("prefill", batch, length, 2), "decode": _method("decode", batch, length, 1)}
    return shared, methods, _generation(owner, length, batch)


def _problem(owner: Any, length: int) -> str | None:
    """Return why a model cannot generate from a cache of this length, if that is known."""
    name = type(owner).__qualname__
    if owner.config.is_encoder_decoder:
        return f"{name}: is an encoder-decoder, whose answers do not continue their inputs"
    if length > (positions := _positions(owner)):
        return f"length={length}: {name} has only {positions} learned positions"
    if length > (rotated := _longest_for_rope(owner.config.get_text_config())):
        return f"length={length}: {name} rotates all keys differently beyond {rotated} tokens, including cached ones"
    if (mask := _own_mask(owner)) is not None:
        return f"{name} masks by the number of cached keys, which a cache of fixed size does not have ({mask})"
    return None


def dropped_settings(model: nn.Module) -> str | None:
    """Return a warning of a model's generation settings that its artifact does not have, if there are some."""
    settings = getattr(model, "generation_config", None)
    given = {name: getattr(settings, name, None) for name in _SETTINGS}
    dropped = [f"{name}={value!r:.40}" for name, value in given.items() if value not in (None, _SETTINGS[name])]
    if not dropped:
        return None
    return (
        f"the model's generation_config has {', '.join(dropped)}, with which transformers chooses other tokens: the "
        "artifact keeps its end tokens alone. Calls may ask for repetition_penalty and stop"
    )


def _positions(owner: Any) -> float:
    """Return the size of a table of learned positions; infinity for models that compute positions."""
    tables = [
        name for name, module in owner.named_modules() if isinstance(module, nn.Embedding) and re.search(_TABLES, name)
    ]
    limit: int | None = getattr(owner.config.get_text_config(), "max_position_embeddings", None)
    return limit if limit is not None and tables else math.inf


def _own_mask(model: nn.Module) -> str | None:
    """Return the name of a table of causal masks, [1, 1, n, n], that attention cuts by the numbers of queries and keys.

    With a full-length cache all queries would count as the last ones. Other models make masks from cache positions.
    """
    tables = ((name, each.shape) for name, each in model.named_buffers() if each.dtype == torch.bool)
    return next((name for name, shape in tables if shape == (1, 1, *shape[-1:] * 2)), None)


def _longest_for_rope(config: Any) -> float:
    """Return the number of tokens up to which keys are rotated by the same frequencies.

    longrope has other frequencies for longer texts; transformers then reads the whole text again.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one for each kind of layer
    lengths = [table["original_max_position_embeddings"] for table in tables if table.get("rope_type") == "longrope"]
    return min(lengths, default=math.inf)


def _cache_shapes(owner: Any, batch: int) -> Iterator[tuple[tuple[torch.Size, torch.dtype], ...]]:
    """Yield the shapes and dtypes of each layer's keys and values, from a call: configurations are not reliable.

    Raises Unsupported for a model that keeps anything else.
    """
    from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    other = Unsupported(f"{type(owner).__qualname__}: keeps something other than the keys and values of its layers")
    # a layer may keep keys and values, and more; one that uses those of another layer keeps nothing
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for layer in _layers(owner)):
        raise other
    mode = next((tensor.fake_mode for tensor in owner.parameters() if isinstance(tensor, FakeTensor)), nullcontext())
    with mode, torch.no_grad():
        ids, cache = torch.zeros(batch, 1, dtype=torch.int64), DynamicCache()
        owner(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
    if not cache.layers:  # it has not used the cache
        raise other
    for layer in cache.layers:
        pair = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in pair):
            raise other
        yield tuple((tensor.shape, tensor.dtype) for tensor in pair if tensor is not None)


def _layers(owner: Any) -> list[Any]:
    """Return the layers of the cache that transformers makes for a model; none if it makes them as they are used."""
    from transformers.cache_utils import DynamicCache

    try:
        return list(DynamicCache(config=owner.config).layers)
    except (AttributeError, KeyError, TypeError):  # the configuration is none of a decoder, or has layers of its own
        return []


def _generation(owner: Any, length: int, batch: int) -> TextGeneration:
    settings = owner.generation_config
    ends = settings.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    vocabulary = owner.get_input_embeddings().weight.shape[0]
    pad = next((token for token in (settings.pad_token_id, *ends) if token in range(vocabulary)), 0)
    return TextGeneration(length=length, batch=batch, vocabulary=vocabulary, ends=tuple(ends), pad=pad)


class _Methods:
    """Mixin of the methods, for a subclass of the model's own class."""

    cache_length: int

    def prefill(self, input_ids: Any, attention_mask: Any, position_ids: Any, position: Any) -> torch.Tensor:
        """Return the logits after the last token."""
        owner: Any = self
        output = owner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=_cache(owner, position),
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    decode = prefill


def _cache(owner: Any, position: torch.Tensor) -> Any:
    """Return transformers' cache over the buffers. Sliding layers have full length, as their masks keep the window."""
    from transformers.cache_utils import Cache, StaticLayer

    layers: list[Any] = []
    positions = _Positions(position)
    while hasattr(owner, _KEYS.format(len(layers))):
        index = len(layers)
        layer: Any = StaticLayer(max_cache_len=owner.cache_length)
        layer.keys, layer.values = getattr(owner, _KEYS.format(index)), getattr(owner, _VALUES.format(index))
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        layer.batch_size, layer.num_heads = layer.keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = layer.keys.shape[-1], layer.values.shape[-1]
        layer.cumulative_length = position
        layer.update = partial(_update, layer, positions)
        layer.is_initialized = True
        layers.append(layer)
    return Cache(layers=layers)


class _Positions:
    """Cache positions of a call's tokens, computed once for all layers."""

    def __init__(self, position: torch.Tensor) -> None:
        self._position = position
        self._count: Any = None

    def of(self, count: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of `count` tokens, and the length after them."""
        if self._count is None or self._count != count:
            self._count = count
            self._result = torch.arange(count, device=self._position.device) + self._position, self._position + count
        return self._result


def _update(layer: Any, positions: _Positions, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Do the same as `StaticLayer.update`, but write no length: a graph would keep one as state for each layer."""
    indices, layer.cumulative_length = positions.of(keys.shape[-2])
    layer.keys.index_copy_(2, indices, keys)
    layer.values.index_copy_(2, indices, values)
    return layer.keys, layer.values


def _method(name: str, batch: int, length: int, tokens: int) -> MethodSpec:
    one = torch.zeros(batch, tokens, dtype=torch.int64)
    args = one, torch.ones(batch, length, dtype=torch.int64), one.clone(), torch.zeros((), dtype=torch.int64)
    if tokens == 1:
        return MethodSpec(name, args)
    prompt = Dim("prompt", min=1, max=length)
    return MethodSpec(name, args, dynamic_shapes=({1: prompt}, None, {1: prompt}, None))


def _sharing(model: nn.Module) -> nn.Module:
    """Return a model of the same tensors, to which buffers can be added."""
    shared = copy.copy(model)
    for table in ("_buffers", "_modules", "_parameters", "_non_persistent_buffers_set"):
        setattr(shared, table, copy.copy(getattr(model, table)))
    return shared
