"""Small configurations of every model type that transformers has, made from the default ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_MOST_LAYERS = 2
_MOST_EXPERTS = 16
_MOST_TOKENS = 1000
_MOST_FRAMES = 8
_FEW_STAGES = 4  # a list of so many is one of stages, not of layers

_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LAYERS = re.compile(r"((^|_)n_?layers?|layers|(^|_)depths?|num_(hidden_)?(blocks|groups)|n_blocks|num_stack)$")
_NOT_LAYERS = re.compile(r"(feat_extract|conv)_layers$")
_EXPERTS = re.compile(r"(num|n)_.*experts$|^moe_num_experts$")
_HEADS = re.compile(r"heads$|^n_head$")
_WIDTHS = re.compile(
    r"(size|sizes|^d_\w+|dim|dims|d_model|d_ff|d_kv|d_inner|width|channels|rank|n_embd|n_inner|features|_section)$"
)
_FIXED = re.compile(
    r"vocab|image|img|patch|kernel|window|pool|stride|crop|tile|grid|codebook_size|sequence|chunk|num_|token|scale|label"
    r"|in_chans|batch|state_size|feature_size|input_size|buffer|sampling|block_size|merge|type_size|spec|in_features"
    r"|^(in|out)_channels|^n_(?!embd|inner)"
)
_FRAMES = re.compile(r"^(num_frames|frames_per_clip)$")
_VOCABULARY = re.compile(r"^(vocab_size|.*text_vocab_size|n_vocab)$")
_TOKEN = re.compile(r"token_(id|ids|index|idx)$|_(token|start|end|bos|eos|pad)_id$")
_OF_LAYERS = frozenset({"out_features", "out_indices", "stage_names"})
_WITHOUT = {"num_kv_shared_layers": 0}  # layers that use other layers' keys
_WANTED = {  # default configurations that leave these out build no model
    "default_language": "en_XX",
    "image_token_id": 900,
    "image_token_index": 900,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 1,
    "prediction_length": 8,
    "rope_theta": 10000.0,
    "video_token_id": 901,
    "video_token_index": 901,
    "vocab_size": 1000,
    "vocabulary_map": {"<image>": 900},
}


class Variant(NamedTuple):
    """What widths are divided by, and whether heads become fewer or narrower."""

    divisor: int
    fewer_heads: bool


_VARIANTS = [Variant(divisor, fewer) for divisor in (8, 4, 2) for fewer in (True, False)] + [Variant(1, False)]


def tiny(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration with two layers, few experts and tokens and narrow; wider ones follow, as not all fit."""
    return (_shrunk(config, variant) for variant in _VARIANTS)


def _shrunk(config: dict[str, Any], variant: Variant) -> dict[str, Any]:
    layers = next((config[name] for name in _COUNTS if isinstance(config.get(name), int)), 0)
    dropped = _OF_LAYERS if layers > _FEW_STAGES else ()
    given = {name: _WANTED.get(name) if value is None else value for name, value in config.items()}
    return {
        name: _smaller(str(name), value, variant, layers)
        for name, value in given.items()
        if value is not None and name not in dropped and not _is_later_layer(name)
    }


def _is_later_layer(name: Any) -> bool:
    return str(name).isdigit() and int(name) >= _MOST_LAYERS


def _smaller(name: str, value: Any, variant: Variant, layers: int) -> Any:
    if isinstance(value, dict):
        return _shrunk(value, variant)
    if name in _WITHOUT:
        return _WITHOUT[name]
    if isinstance(value, list):
        kept = value[:_MOST_LAYERS] if len(value) == layers > _FEW_STAGES else value
        return [_smaller(name, each, variant, 0) for each in kept]
    return _number(name, value, variant) if type(value) is int else value


def _number(name: str, value: int, variant: Variant) -> int:
    if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
        return _MOST_LAYERS if value > _FEW_STAGES else value
    for pattern, most in ((_VOCABULARY, _MOST_TOKENS), (_EXPERTS, _MOST_EXPERTS), (_FRAMES, _MOST_FRAMES)):
        if pattern.search(name):
            return min(value, most)
    if _TOKEN.search(name):
        return value if value < _MOST_TOKENS else _MOST_TOKENS - 1 - value % 100
    return value // variant.divisor if _is_divided(name, value, variant) else value


def _is_divided(name: str, value: int, variant: Variant) -> bool:
    if value % variant.divisor:
        return False
    if _HEADS.search(name):
        return variant.fewer_heads
    is_head = variant.fewer_heads and "head_dim" in name
    return bool(_WIDTHS.search(name)) and not _FIXED.search(name) and value >= 8 and not is_head
