"""The configuration of a transformers model: its checkpoints have one, which says what their weights are computed with.

Two models of the same shapes may differ in it: the number of heads, the base of rotary positions, a norm's epsilon. A
graph has these as numbers, so weights of another configuration would give wrong answers. Compared are the settings that
are known to change outputs, and no others: files have all kinds, and fine-tuning changes many that mean nothing here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import msgspec

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import WeightFileError, WeightsMismatch

if TYPE_CHECKING:
    from torch import nn

CONFIG_NAME = "config.json"  # of transformers' save_pretrained
MOST_CONFIG = 16 << 20  # bytes of that file: 20,000 labels take 2 MB
_ADVICE = (
    "Export the model that these weights belong to. Where these settings change nothing in what it computes, give the "
    "weights without the configuration: the path of a file in the folder, or the state dict of a module."
)
_FACTORS, _ADAPTERS, _SETTINGS = "peft_scaling", "peft_adapters", "peft_settings"
_PEFT_PREFIX = "base_model.model."
_DEEPEST = 4  # levels of configurations within others, such as that of the text model
_COMPARED = re.compile(
    r"""(num|n)_.*heads? | n_head | (encoder|decoder)_attention_heads
    | .*_act | .*activation | activation_function | .*eps | .*epsilon
    | (use_)?sliding_window | attention_window | layer_types | position_embedding_type | alibi
    | .*softcapping | .*_multiplier | query_pre_attn_scalar | logits?_scal(e|ing) | routed_scaling_factor
    | scale_(embedding|attn_weights|attn_by_inverse_layer_idx) | num_experts_per_tok(en)? | norm_topk_prob
    | parallel_attn | use_parallel_residual | apply_residual_connection_post_layernorm | do_layer_norm_before""",
    re.VERBOSE,
)
_ROTATION = (
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
    *("rotary_emb_base", "rotary_pct", "partial_rotary_factor"),
)
_COMPARED_OF_PEFT = re.compile(  # beside what follows from tensors' shapes, and from the factors
    r"""random_loc_seed | (trainable_)?token_indices | alora_invocation_tokens | .*group_size | topk | top_k_lora
    | (use|num)_cayley_neumann.* | cayley_neumann_eps | wavelet_family | use_idwt | act_fn | variant | stride_A
    | para | decomposition_method | use_(dora|qalora|effective_conv2d) | n_splits | softmax_temperature
    | enable_softmax(_topk)? | scaling_pass_value | global_scaling_weight""",
    re.VERBOSE,
)
_MOST_VALUE, _MOST_NAME = 64 << 10, 100  # bytes, letters
_NO_NUMBERS = re.compile(rb"(?<=[\s:,\[])(-?Infinity|NaN)(?=[\s,\]}])")  # in files of transformers 4; JSON has none
_MAY_BE_NONE = re.compile("sliding_window|.*softcapping")  # for none; of all others it means what follows from the rest
_KINDS = {"swish": "silu", "su": "longrope"}  # older names of functions and of rotations


def config_of(module: nn.Module, *, scaled: bool = True) -> dict[str, Any]:
    """Return the settings of the transformers model that a module is, or holds, none if it holds several; and the
    adapters that PEFT's layers apply, with their settings, unless calls choose those (`scaled` is False)."""
    layers = _peft_layers(module) if scaled else {}
    applied = {name: _applied(layer) for name, layer in layers.items()}
    found = {
        _FACTORS: {name: factors for name, layer in layers.items() if (factors := _factors_of(layer))},
        _ADAPTERS: applied,
        _SETTINGS: _peft_settings(module, {each for names in applied.values() for each in names}),
    }
    return _config_of(module) | {name: value for name, value in found.items() if value}


def _peft_layers(module: nn.Module) -> dict[str, Any]:
    """Return what PEFT has put around a module's layers, by the layer's name in the base model."""
    tuners, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    if tuners is None or others is None:
        return {}
    kinds = (tuners.BaseTunerLayer, getattr(others, "AuxiliaryTrainingWrapper", ()))  # PEFT 0.14 has no such class
    layers = ((name, each) for name, each in module.named_modules() if isinstance(each, kinds))
    return {name.removeprefix(_PEFT_PREFIX): layer for name, layer in layers}


def _applied(layer: Any) -> list[str]:
    """Return the names of the adapters that a layer applies, which no tensor tells: it may have others as well."""
    available = getattr(layer, "_get_available_adapters", lambda: layer.active_adapters)()  # as above
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in available]


def _factors_of(layer: Any) -> list[float]:
    """Return the factors of the adapters that a layer applies. They are numbers of a graph: no tensor has them.

    They follow from `lora_alpha` and the rank, or from the setting `scaling` of a kind that names them after itself.
    """
    named = (value for name, value in vars(layer).items() if name == "scaling" or name.endswith("_scaling"))
    scaling = next(named, None)
    if getattr(layer, "merged", False) or not isinstance(scaling, dict) or layer.disable_adapters:
        return []
    try:
        return [float(scaling[name]) for name in layer.active_adapters if name in scaling]
    except (RuntimeError, TypeError, ValueError):  # tensors without values, or of several numbers
        return []


def _peft_settings(module: nn.Module, applied: Set[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of adapters that no tensor tells, by the path of their model and their name."""
    found = {}
    for path, part in module.named_modules():  # a model inside PEFT's has its configurations, too
        # X-LoRA's is of no layer: it weighs the adapters that layers apply. `peft_config` has a copy, which its setters
        # leave alone
        weighing = {"xlora": vars(part)["xlora_config"]} if "xlora_config" in vars(part) else {}
        configs = {**(vars(part).get("peft_config") or {}), **weighing}
        for name, config in configs.items() if applied else ():
            if name in applied or name in weighing:
                found[id(config)] = f"{path}.".removeprefix(_PEFT_PREFIX) + name, config
    return {name: settings for name, config in found.values() if (settings := _compared_of_peft(config))}


def _compared_of_peft(config: Any) -> dict[str, Any]:
    named = config.to_dict() if hasattr(config, "to_dict") else {}
    if "top_k_lora" in named:  # None is all of them, and no default that follows from the rest
        named = named | {"top_k_lora": named["top_k_lora"] or 0}
    return {name: value for name, value in named.items() if _COMPARED_OF_PEFT.fullmatch(name) and value is not None}


def _config_of(module: nn.Module) -> dict[str, Any]:
    models = sys.modules.get("transformers.modeling_utils")
    if models is None:
        return {}
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, models.PreTrainedModel)]
    if not found or not all(name.startswith(f"{found[0][0]}." if found[0][0] else "") for name, _ in found[1:]):
        return {}
    config: Any = found[0][1].config
    try:
        text = config.to_json_string(use_diff=False)
    except (TypeError, ValueError):  # it has other objects
        return {}
    return read_config(text.encode(), type(module).__qualname__)


def check_config(raw: bytes | None, ours: Mapping[str, Any], where: str) -> None:
    """Raise WeightsMismatch if the configuration beside weights is not that of a graph's model.

    raw: the content of its file; None if there is none. ours: the settings of the graph's model; empty if it is none of
    transformers. Raises WeightFileError for what is no configuration.
    """
    if raw is not None and ours and (problems := config_problems(ours, read_config(raw, f"{where}: {CONFIG_NAME}"))):
        raise WeightsMismatch(where, problems, _ADVICE)


def read_config(raw: bytes, where: str) -> dict[str, Any]:
    """Return the settings in the content of a configuration's file. Raises WeightFileError."""
    try:
        return _settings(_NO_NUMBERS.sub(b"null", raw), _DEEPEST)
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{where}: is not a model's configuration ({error})") from error


def _settings(raw: bytes, depth: int) -> dict[str, Any]:
    """Return the settings that are compared, with the model's type. Nothing else is decoded: a file of 1 MB may have a
    million lists. Raises ValueError."""
    found: dict[str, Any] = {}
    rotation: dict[str, Any] = {}
    for name, value in from_json(raw, dict[str, msgspec.Raw]).items():
        text = bytes(value)
        if name.endswith("config") and text.startswith(b"{"):
            found |= {name: _settings(text, depth - 1)} if depth else {}
        elif len(text) > _MOST_VALUE or len(name) > _MOST_NAME:
            continue
        elif name in _ROTATION:
            rotation[name] = msgspec.json.decode(text)
        elif name == "model_type" or _COMPARED.fullmatch(name):
            content = msgspec.json.decode(text)
            found[name] = _KINDS.get(content, content) if isinstance(content, str) else content
    if found.get("use_sliding_window") is False:
        found.pop("sliding_window", None)
    if found.get("model_type") == "gemma":  # transformers takes this one, whatever the file says
        found.pop("hidden_act", None)
    return {**found, **_rotation(rotation)}


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how positions are rotated, as transformers 5 writes it for all layers or for each kind."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = {**rope} if isinstance(rope, dict) else {}
    older = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base")),
        "partial_rotary_factor": config.get("partial_rotary_factor", config.get("rotary_pct")),
    }
    if isinstance(full := rope.get("full_attention"), dict):
        sliding = rope.get("sliding_attention")
        local = sliding.get("rope_theta") if isinstance(sliding, dict) else None
        rope = {**full}
    else:
        local = config.get("rope_local_base_freq")
        rope = {**{name: value for name, value in older.items() if value is not None}, **rope}
    if not rope:
        return {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    numbers = {name: value for name, value in rope.items() if isinstance(value, int | float | list)}
    numbers |= {"local_rope_theta": local} if isinstance(local, int | float) else {}
    return {"rope": {**numbers, "rope_type": _KINDS.get(kind, kind) if isinstance(kind, str) else ""}}


def config_problems(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return how settings differ from those of a graph's model. Those of a part are compared with that part's."""
    part = _of_type(ours.get("model_type"), theirs)
    return [f"configuration: {text}" for text in _differences(ours, part)] if part is not None else []


def _of_type(kind: object, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if config.get("model_type", kind) == kind:
        return config
    parts = (_of_type(kind, part) for part in config.values() if isinstance(part, dict) and "model_type" in part)
    return next((part for part in parts if part is not None), None)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in ours.items():
        if name not in theirs:  # a default, which other versions do not write down
            continue
        found = theirs[name]
        if isinstance(value, dict) and isinstance(found, dict):
            yield from _differences(value, found, f"{path}{name}.")
        elif not _is_same(name, value, found):
            yield f"{path}{name}: {value!r:.80} in the graph, {found!r:.80} of these weights"


def _is_same(name: str, value: object, found: object) -> bool:
    if value is None or found is None:
        return value is found or not _MAY_BE_NONE.fullmatch(name)
    several, single = (value, found) if isinstance(value, list) else (found, value)
    if isinstance(several, list) and not isinstance(single, list):  # one for each layer
        return all(each == single for each in several)
    return value == found
