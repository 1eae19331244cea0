"""The configuration of a transformers model: its checkpoints have one, which says what the weights are computed with.

Two models of the same shapes may differ in it: the number of heads, the base of rotary positions, a norm's epsilon. A
graph has these as numbers, so weights of another configuration give wrong answers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from weightswap_runtime.errors import WeightFileError, WeightsMismatch
from weightswap_runtime.sources.location import Location
from weightswap_runtime.sources.opening import read_small

if TYPE_CHECKING:
    from torch import nn

CONFIG_NAME = "config.json"  # of transformers' save_pretrained
_MOST = 1 << 20  # bytes of that file
_ADVICE = (
    "Export the model that these weights belong to. Where these settings change nothing in what it computes, give the "
    "path of the weight file, or of the index, in this folder."
)
_DEEPEST = 4  # levels of configurations within others, such as that of the text model
# settings on which no output of a graph depends: of training, of generation, and what describes the file
_WITHOUT_EFFECT = re.compile(
    r"""_.* | architectures | auto_map | model_type | name_or_path | transformers_version | (torch_)?dtype
    | torchscript | tokenizer_class | attn_implementation | use_cache | use_bfloat16 | quantization_config
    | gradient_checkpointing | chunk_size_feed_forward | pruned_heads | max_position_embeddings | is_decoder
    | is_encoder_decoder | .*drop.* | .*loss_coef | do_mask_input | tie_word_embeddings | initializer_(range|factor)
    | init_std | apply_spec_augment | mask_(time|feature)_.* | output_.* | return_dict.* | problem_type | id2label
    | label2id | finetuning_task | task_specific_params | tf_legacy_loss | .*_token_ids? | do_sample
    | early_stopping | (min|max)_length | max_new_tokens | num_beams | num_beam_groups | num_return_sequences
    | (diversity|length|repetition)_penalty | temperature | top_k | top_p | typical_p
    | (encoder_)?no_repeat_ngram_size | bad_words_ids | (begin_)?suppress_tokens | remove_invalid_values | prefix
    | exponential_decay_length_penalty""",
    re.VERBOSE,
)
# None where they follow from others: some models and versions of transformers write down what follows
_DERIVED = ("head_dim", "num_key_value_heads", "audio_vocab_size", "num_buckets", "num_ln_in_parallel_attn")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")  # the first has the others in transformers 5


def config_of(module: nn.Module) -> dict[str, Any]:
    """Return the settings of the transformers model that a module is, or holds; empty if there is none, or several."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None:
        return {}
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, models.PreTrainedModel)]
    if not found or not all(name.startswith(f"{found[0][0]}." if found[0][0] else "") for name, _ in found[1:]):
        return {}
    config: Any = found[0][1].config
    return settings(msgspec.json.decode(config.to_json_string(use_diff=False), type=dict[str, Any]))  # as in files


def check_config(folder: Location, ours: Mapping[str, Any]) -> None:
    """Raise WeightsMismatch if the configuration in a checkpoint's folder, if there is one, is not that of a graph.

    ours: the settings of the graph's model. Raises WeightFileError for a configuration that cannot be read.
    """
    if not ours or (raw := read_small(folder / CONFIG_NAME, _MOST)) is None:
        return
    try:
        theirs = settings(msgspec.json.decode(raw, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WeightFileError(f"{folder / CONFIG_NAME}: is not a model's configuration ({error})") from error
    if problems := list(config_problems(ours, theirs)):
        raise WeightsMismatch(str(folder), problems, _ADVICE)


def settings(config: Mapping[str, Any], depth: int = _DEEPEST) -> dict[str, Any]:
    """Return the settings of a configuration on which outputs depend."""
    found = {}
    unused = ("sliding_window", "max_window_layers") if config.get("use_sliding_window") is False else ()
    for name, value in config.items():
        if name in _ROPE or name in unused or _WITHOUT_EFFECT.fullmatch(name):
            continue
        if not isinstance(value, dict):
            found[name] = value
        elif depth:
            found[name] = settings(value, depth - 1)
    return {**found, **_rope(config)}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how positions are rotated, as transformers 5 writes it."""
    if not any(config.get(name) is not None for name in _ROPE):
        return {}
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = {**rope} if isinstance(rope, dict) else {}
    if any(isinstance(value, dict) for value in rope.values()):  # by the kinds of layers
        return {"rope_parameters": rope}
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    kind = rope.pop("type", None)  # of older versions
    return {"rope_parameters": {**rope, "rope_type": rope.get("rope_type") or kind or "default"}}


def config_problems(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield how settings differ from those of a graph. One that only one of both has is a default of the other; a list
    and its only value may say the same."""
    for name, value in ours.items():
        if name not in theirs:
            continue
        found = theirs[name]
        if isinstance(value, dict) and isinstance(found, dict):
            yield from config_problems(value, found, f"{path}{name}.")
        elif value != found and not _may_be_same(name, value, found):
            yield f"{CONFIG_NAME}: {path}{name}: {value!r:.80} in the graph, {found!r:.80} of these weights"


def _may_be_same(name: str, value: object, found: object) -> bool:
    if value is None or found is None:
        return name in _DERIVED
    return isinstance(value, list | dict) != isinstance(found, list | dict)
