"""Makers of sample inputs for transformers models, by input name: tensors of the shapes that the configuration implies.

A name may mean several things (an image, its patches, a clip; a waveform or a spectrogram): a maker then yields all of
them, the likeliest first. An input is made after those that it depends on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from copy import copy
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.export import Dim

_BATCH = 2  # samples of an input
_SOUND_FRAMES = 8  # frames of features in a sample waveform
_SAMPLES = 15360  # samples of a waveform if any number will do: whole frames of the usual codecs
_SPECTRA = 200  # frames of a spectrogram
_IMAGE_SIZE = 224  # pixels, for a model whose configuration names no size
_SECTIONS = {  # words in the names of sub-configurations that come before the whole for a kind of input
    "text": ("text", "decoder"),
    "vision": ("vision", "image", "vit", "visual", "backbone"),
    "audio": ("audio", "speech", "acoustic", "encoder"),
}


class Input(NamedTuple):
    """A sample tensor and its dynamic dimensions, by axis."""

    value: torch.Tensor
    axes: dict[int, Any]


class Subject:
    """A model, the names of its inputs, those made so far, and the length of sample texts in tokens."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.config = model.config
        self.length = length
        self.made: dict[str, Input] = {}
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(model.forward).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        self.takes = list(parameters)
        self.required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        main = model.main_input_name
        self.main = [name for name in ([main] if isinstance(main, str) else main) if name in parameters]

    def find(self, kind: str, *names: str, default: Any = None) -> Any:
        """Return the first of these values in the configuration: in its parts for this kind, the whole, then others."""
        parts = sorted(_parts(self.config, ""), key=lambda part: not any(word in part[0] for word in _SECTIONS[kind]))
        values = (getattr(part, name, None) for _, part in parts for name in names)
        return next((value for value in values if value is not None), default)

    def having(self, name: str, made: Input) -> Subject:
        other = copy(self)
        other.made = self.made | {name: made}
        return other

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(_BATCH, *shape, dtype=self.model.dtype)


Maker = Callable[[Subject], Iterator[Input]]


def _parts(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, config
    for name in config.sub_configs:
        if hasattr(part := getattr(config, name, None), "sub_configs"):
            yield from _parts(part, f"{path}.{name}")


def _batch() -> dict[int, Any]:
    return {0: Dim("batch")}


# Text


def _ids(subject: Subject) -> Iterator[Input]:
    """Yield token ids, with one image token for each feature of the images if there are any."""
    length = _length("length", subject.model)
    ids = _tokens(subject, length)
    if count := _image_tokens(subject):
        token = subject.find("text", "image_token_id", "image_token_index", default=0)
        images = torch.full((_BATCH, count), token)
        yield Input(torch.cat([ids.value[:, :1], images, ids.value[:, 1:]], dim=1), ids.axes)
    elif "MultipleChoice" in type(subject.model).__name__:
        yield Input(ids.value[:, None].repeat(1, 4, 1), {0: Dim("batch"), 2: length})
    else:
        yield ids


def _image_tokens(subject: Subject) -> int:
    """Return how many tokens of each text the model replaces with image features."""
    embed = getattr(subject.model, "get_image_features", None)
    token = subject.find("text", "image_token_id", "image_token_index")
    if "pixel_values" not in subject.made or embed is None or token is None:
        return 0
    parameters = inspect.signature(embed).parameters
    try:
        output = embed(**{name: made.value for name, made in subject.made.items() if name in parameters})
    except Exception:  # the call of the whole model fails in the same way, and that error is reported
        return 0
    features = getattr(output, "pooler_output", output)
    parts = [features] if isinstance(features, torch.Tensor) else features
    return sum(part.numel() // part.shape[-1] for part in parts) // _BATCH


def _tokens(subject: Subject, length: Any) -> Input:
    return Input(torch.zeros(_BATCH, min(subject.length, length.max), dtype=torch.int64), _batch() | {1: length})


def _decoder_ids(subject: Subject) -> Iterator[Input]:
    most = getattr(subject.config, "max_target_positions", None)
    if "input_ids" in subject.takes:
        yield _tokens(subject, _length("decoder_length", subject.model))
    else:
        yield _tokens(subject, Dim("length", max=most) if most else Dim("length"))


def _length(name: str, model: Any) -> Any:
    """Return a dimension for positions in a text, with the model's number of positions as its maximum."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return Dim(name)
    # as in RoBERTa: positions start after the padding index of the table
    tables = (module for path, module in model.named_modules() if path.endswith("position_embeddings"))
    padding = max(
        (table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), default=0
    )
    return Dim(name, max=most - padding)


def _like_ids(value: int) -> Maker:
    def make(subject: Subject) -> Iterator[Input]:
        ids, axes = subject.made["input_ids"] if "input_ids" in subject.made else next(_ids(subject))
        yield Input(torch.full_like(ids, value), axes)

    return make


def _modalities(subject: Subject) -> Iterator[Input]:
    """Yield 1 for each image token, 0 for others."""
    ids, axes = subject.made["input_ids"]
    yield Input((ids == subject.find("text", "image_token_id", "image_token_index", default=-1)).long(), axes)


def _boxes(subject: Subject) -> Iterator[Input]:
    """Yield bounding boxes: two corners in pixels, two in fractions of the page, or all four in fractions."""
    ids, axes = subject.made["input_ids"]
    for size, dtype in ((4, torch.int64), (4, subject.model.dtype), (8, subject.model.dtype)):
        yield Input(torch.zeros(*ids.shape, size, dtype=dtype), axes)


def _vectors(*names: str, default: int = 1) -> Maker:
    """Return a maker of one vector per token. names: entries of the configuration; the first found is its width."""

    def make(subject: Subject) -> Iterator[Input]:
        yield Input(subject.zeros(subject.length, subject.find("text", *names, default=default)), _batch())

    return make


_hidden = _vectors("hidden_size", "d_model", "n_embd")


# Images


class _Image(NamedTuple):
    """Sizes of an image and its patches in pixels, the frames in a patch, and the patches in a row that are merged."""

    height: int
    width: int
    channels: int
    patch: int
    frames: int
    merged: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in a small image."""
        return 2 * self.merged, 4 * self.merged

    @property
    def flat_patch(self) -> int:
        return self.channels * self.frames * self.patch**2


def _image(subject: Subject) -> _Image:
    size = subject.find("vision", "image_size", "img_size", "input_size") or _IMAGE_SIZE
    size = (size["height"], size["width"]) if isinstance(size, dict) else size
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    patch = subject.find("vision", "patch_size", default=16)
    return _Image(
        height=height,
        width=width,
        channels=subject.find("vision", "num_channels", "in_channels", "in_chans", default=3),
        patch=patch if isinstance(patch, int) else patch[-1],
        frames=subject.find("vision", "temporal_patch_size", default=1),
        merged=subject.find("vision", "spatial_merge_size", "pooling_kernel_size", default=2),
    )


def _pixels(subject: Subject) -> Iterator[Input]:
    """Yield patches of small images, images of the size in the configuration, then several images for each text."""
    image = _image(subject)
    towers = hasattr(subject.model, "get_text_features") and hasattr(subject.model, "get_image_features")
    axes = {0: Dim("images" if towers else "batch")}
    if _GRIDS & set(subject.takes):
        patches = math.prod(image.grid)
        yield Input(subject.zeros(patches, image.flat_patch).flatten(0, 1), {})
        yield Input(subject.zeros(patches, 2 * image.flat_patch).flatten(0, 1), {})  # of two frames
        yield Input(subject.zeros(patches, image.flat_patch), axes)
        yield Input(subject.zeros(patches, image.channels, image.patch, image.patch).flatten(0, 1), {})
    if frames := getattr(subject.config, "num_frames", None):
        yield Input(subject.zeros(frames, *image.shape), axes)
    yield Input(subject.zeros(*image.shape), axes)
    for count in (1, 2, 3, 5):
        yield Input(subject.zeros(count, *image.shape), axes)


def _patches(subject: Subject) -> Iterator[Input]:
    image = _image(subject)
    yield Input(subject.zeros(math.prod(image.grid), image.flat_patch).flatten(0, 1), {})


def _clips(subject: Subject) -> Iterator[Input]:
    frames = subject.find("vision", "frames_per_clip", "num_frames", default=4)
    yield Input(subject.zeros(frames, *_image(subject).shape), _batch())


def _sizes(of: Callable[[_Image], Any]) -> Maker:
    """Return a maker of integers that describe the size or the patch grid of each image."""

    def make(subject: Subject) -> Iterator[Input]:
        yield Input(torch.tensor([of(_image(subject))] * _BATCH), {})

    return make


_grid = _sizes(lambda image: (1, *image.grid))
_shapes = _sizes(lambda image: image.grid)


def _patch_positions(subject: Subject) -> Iterator[Input]:
    rows, columns = _image(subject).grid
    yield Input(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).repeat(_BATCH, 1, 1), _batch())


def _pixel_mask(subject: Subject) -> Iterator[Input]:
    pixels, axes = subject.made["pixel_values"]
    are_patches = pixels.dim() == 3
    shape = pixels.shape[:2] if are_patches else (*pixels.shape[:-3], *pixels.shape[-2:])
    yield Input(torch.ones(shape, dtype=torch.int64), axes)


# Audio

_BINS = (
    *("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_feat_size", "mel_dim"),
    *("feature_projection_input_dim", "num_mel_channels", "model_in_channels", "input_dim", "input_size"),
)

_USUAL_BINS = (80, 128)  # of a spectrogram, for a model whose configuration names no number


def _spectra(subject: Subject) -> Iterator[Input]:
    """Yield spectrograms as bins by frames, frames by bins, and with a channel, as long as the model has positions."""
    bin_count = subject.find("audio", *_BINS)
    positions = subject.find("audio", "max_source_positions")
    lengths = (2 * positions, positions) if positions else (_SPECTRA,)
    for bins, frames in product((bin_count,) if bin_count else _USUAL_BINS, lengths):
        for shape in ((bins, frames), (frames, bins), (1, frames, bins)):
            yield Input(subject.zeros(*shape), _batch())


def _frames_mask(subject: Subject) -> Iterator[Input]:
    features, axes = subject.made["input_features" if "input_features" in subject.made else "audio_mel"]
    yield Input(torch.ones(_BATCH, max(features.shape[1:]), dtype=torch.bool), axes)


def _sound(subject: Subject) -> Iterator[Input]:
    """Yield features of the configured size, waveforms without and with a channel, then hidden states."""
    bins, frames = (getattr(subject.config, name, None) for name in ("num_mel_bins", "max_length"))
    if bins and frames:
        yield Input(subject.zeros(frames, bins), _batch())
    if hasattr(subject.config, "conv_kernel"):
        time = Dim("time", min=_samples(subject.config, 2))
        yield Input(subject.zeros(_samples(subject.config, _SOUND_FRAMES)), _batch() | {1: time})
    yield Input(subject.zeros(_SAMPLES), _batch())
    yield Input(subject.zeros(1, _SAMPLES), _batch())
    yield from _hidden(subject)


def _samples(config: Any, frames: int) -> int:
    """Return how many audio samples the convolutions turn into `frames` frames."""
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames


# Time series


def _series(*widths: str | int, dtype: torch.dtype | None = None) -> Maker:
    """Return a maker of series as long as the model looks back. A step has the first known width, or is a number."""

    def make(subject: Subject) -> Iterator[Input]:
        steps = subject.find("text", "context_length", default=subject.length)
        steps += max(subject.find("text", "lags_sequence", default=[0]))
        entries = [width if isinstance(width, int) else getattr(subject.config, width, None) for width in widths]
        sizes = [size for size in entries if size is not None]
        is_scalar = "input_size" in widths and getattr(subject.config, "input_size", None) == 1
        shape = (steps,) if is_scalar else (steps, *sizes[:1])
        yield Input(subject.zeros(*shape).to(dtype or subject.model.dtype), _batch())

    return make


def _frequencies(_: Subject) -> Iterator[Input]:
    yield Input(torch.zeros(_BATCH, 1, dtype=torch.int64), _batch())


_GRIDS = {"grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes", "pixel_position_ids", "image_position_ids"}

MAKERS: dict[str, Maker] = {
    "pixel_values": _pixels,
    "pixel_values_videos": _clips,
    "prompt_pixel_values": _pixels,
    "prompt_masks": _pixels,
    "hidden_states": _patches,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "merge_sizes": _sizes(lambda image: image.merged),
    "spatial_shapes": _shapes,
    "target_sizes": _shapes,
    "image_sizes": _sizes(lambda image: image.shape[1:]),
    "pixel_position_ids": _patch_positions,
    "image_position_ids": _patch_positions,
    "pixel_attention_mask": _pixel_mask,
    "input_features": _spectra,
    "audio_mel": _spectra,
    "input_features_mask": _frames_mask,
    "audio_mel_mask": _frames_mask,
    "input_values": _sound,
    "decoder_input_values": _hidden,
    "past_values": _series("input_size", "num_input_channels"),
    "past_observed_mask": _series("input_size", "num_input_channels", dtype=torch.bool),
    "past_time_features": _series("num_time_features"),
    "past_values_padding": _series(),
    "freq": _frequencies,
    "states": _series("state_dim"),
    "actions": _series("act_dim"),
    "rewards": _series(1),
    "returns_to_go": _series(1),
    "timesteps": _series(dtype=torch.int64),
    "visual_feats": _vectors("visual_feat_dim"),
    "visual_pos": _vectors("visual_pos_dim", default=4),
    "inputs": _hidden,
    "query_embeds": _hidden,
    "encoder_hidden_states": _vectors("encoder_hidden_size", "hidden_size", "d_model"),
    "inputs_embeds": _hidden,
    "input_ids": _ids,
    "qformer_input_ids": _like_ids(0),
    "attention_mask": _like_ids(1),
    "token_type_ids": _like_ids(0),
    "mm_token_type_ids": _modalities,
    "bbox": _boxes,
    "decoder_input_ids": _decoder_ids,
}
"""Makers by input name, in the order in which inputs are made."""
