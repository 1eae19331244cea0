"""Sample inputs and dynamic sizes for transformers models, chosen by what the model's forward takes.

A kind of model is known by its main input, the other inputs of its `forward`, and its configuration; the classes
themselves are too many to list. What no kind fits is refused rather than guessed.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.export import Dim

from weightswap_runtime.errors import RecipeError

_BATCH = 2
_FRAMES = 8  # of features, in a sample waveform
_IMAGE_SIZE = 224  # where any size will do
_STATE_SPACE = frozenset({"mamba", "mamba2", "falcon_mamba"})  # these take a mask, and have no attention
_MORE_THAN_TEXT = frozenset({"pixel_values", "input_features", "input_values", "bbox", "mems"})
_MORE_THAN_IMAGES = frozenset({"decoder_input_ids", "input_ids", "input_points", "noise"})

Sizes = dict[str, dict[int, Any]]


class Inputs(NamedTuple):
    """Sample keyword arguments of `forward`, and the dimensions of each that may vary, by axis."""

    kwargs: dict[str, torch.Tensor]
    sizes: Sizes


class _Subject(NamedTuple):
    """A model with what its kind is known by, and the wanted length of sample texts."""

    model: Any
    config: Any
    takes: frozenset[str]
    length: int


def sample_inputs(model: Any, length: int = 16) -> Inputs:
    """Inputs for a transformers model: texts of `length` tokens, images, both, or sound; two of each.

    Raises RecipeError for a model of another kind.
    """
    takes = frozenset(inspect.signature(model.forward).parameters)
    subject = _Subject(model, model.config, takes, length)
    for kind in (_texts_and_images, _texts, _images, _spectrograms, _waveforms):
        if (found := kind(subject)) is not None:
            return found
    raise RecipeError(
        f"{type(model).__name__} (model type {model.config.model_type!r}): what to give to its forward is not known "
        f"here; it takes {', '.join(sorted(takes - {'kwargs'}))}. Write a recipe that gives `kwargs` and "
        "`dynamic_shapes`: a function that returns what export() takes, as file.py:function."
    )


def _texts(subject: _Subject) -> Inputs | None:
    """Language models, encoders and classifiers; with `decoder_input_ids`, also sequence to sequence."""
    model, config, takes, _ = subject
    if model.main_input_name != "input_ids" or takes & _MORE_THAN_TEXT or "MultipleChoice" in type(model).__name__:
        return None
    length = _length("length", model)
    found = _tokens(subject, length)
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        decoded = _length("decoder_length", model)
        found.kwargs["decoder_input_ids"] = _ids(subject, decoded)
        found.sizes["decoder_input_ids"] = {0: Dim("batch"), 1: decoded}
    return found


def _texts_and_images(subject: _Subject) -> Inputs | None:
    """Two towers, as in CLIP: texts and images in numbers of their own."""
    model, config, takes, _ = subject
    towers = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    if not towers or not {"input_ids", "pixel_values"} <= takes:
        return None
    texts = _tokens(subject, _length("length", model))
    images = _pixels(config.vision_config, model.dtype)
    return Inputs(texts.kwargs | {"pixel_values": images}, texts.sizes | {"pixel_values": {0: Dim("images")}})


def _images(subject: _Subject) -> Inputs | None:
    """Images of the one size in the configuration."""
    model, config, takes, _ = subject
    if model.main_input_name != "pixel_values" or takes & _MORE_THAN_IMAGES or hasattr(config, "num_frames"):
        return None
    return Inputs({"pixel_values": _pixels(config, model.dtype)}, {"pixel_values": {0: Dim("batch")}})


def _spectrograms(subject: _Subject) -> Inputs | None:
    """Whisper: features of one fixed length, and the tokens decoded so far."""
    model, config, takes, _ = subject
    if config.model_type != "whisper" or model.main_input_name != "input_features":
        return None
    features = torch.zeros(_BATCH, config.num_mel_bins, 2 * config.max_source_positions, dtype=model.dtype)
    found = Inputs({"input_features": features}, {"input_features": {0: Dim("batch")}})
    if "decoder_input_ids" in takes:
        decoded = Dim("length", max=config.max_target_positions)
        found.kwargs["decoder_input_ids"] = _ids(subject, decoded)
        found.sizes["decoder_input_ids"] = {0: Dim("batch"), 1: decoded}
    return found


def _waveforms(subject: _Subject) -> Inputs | None:
    """wav2vec 2.0 and its kin: sound as it is, of any length that gives two frames of features."""
    model, config, _, _ = subject
    if model.main_input_name != "input_values" or not hasattr(config, "conv_kernel"):
        return None
    time = Dim("time", min=_samples(config, 2))
    sound = torch.zeros(_BATCH, _samples(config, _FRAMES), dtype=model.dtype)
    return Inputs({"input_values": sound}, {"input_values": {0: Dim("batch"), 1: time}})


def _tokens(subject: _Subject, length: Any) -> Inputs:
    """Token ids, with a mask and token types where the model looks at them."""
    config, takes = subject.config, subject.takes
    kwargs = {"input_ids": _ids(subject, length)}
    if "attention_mask" in takes and config.model_type not in _STATE_SPACE:
        kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
    if "token_type_ids" in takes and getattr(config, "type_vocab_size", 0) > 1:
        kwargs["token_type_ids"] = torch.zeros_like(kwargs["input_ids"])
    return Inputs(kwargs, {name: {0: Dim("batch"), 1: length} for name in kwargs})


def _ids(subject: _Subject, length: Any) -> torch.Tensor:
    return torch.zeros(_BATCH, min(subject.length, length.max), dtype=torch.int64)


def _length(name: str, model: Any) -> Any:
    """A dimension for positions in a text, up to what the model has positions for."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is None or most < 1:
        return Dim(name)
    # as in RoBERTa: a table with a padding index starts to count behind it
    tables = (module for path, module in model.named_modules() if path.endswith("position_embeddings"))
    padding = max(
        (table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), default=0
    )
    return Dim(name, max=most - padding)


def _pixels(config: Any, dtype: torch.dtype) -> torch.Tensor:
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(_BATCH, getattr(config, "num_channels", 3), height, width, dtype=dtype)


def _samples(config: Any, frames: int) -> int:
    """How many samples of sound the convolutions turn into so many frames."""
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames


def fallbacks(sizes: Sizes) -> list[tuple[str, Sizes]]:
    """What to try in turn: everything dynamic, the batch alone, nothing; each with the names that are then fixed."""
    names = {dim.__name__: axis for axes in sizes.values() for axis, dim in axes.items()}
    inner = [name for name, axis in names.items() if axis != 0]
    batch = {name: {0: axes[0]} for name, axes in sizes.items()}
    tries = [("", sizes)]
    if inner:
        tries.append((", ".join(inner), batch))
    tries.append((", ".join(names), {name: {} for name in sizes}))
    return tries
