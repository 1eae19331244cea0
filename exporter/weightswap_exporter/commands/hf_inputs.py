"""Sample inputs and dynamic sizes for transformers models, guessed and tried.

The model is called with one guess after the other, the plainest first; the first that it accepts is taken.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._export.utils import _compiling_state_context
from torch.export import Dim

from weightswap_exporter.models.huggingface import without_cache
from weightswap_exporter.models.stand_ins import restored
from weightswap_exporter.models.tensors import is_fake
from weightswap_exporter.models.user_errors import first_line, frame_of, wants_values
from weightswap_runtime.errors import RecipeError

from .hf_makers import MAKERS, Input, Subject

_STATE_SPACE = frozenset({"mamba", "mamba2", "falcon_mamba"})  # these take a mask, and have no attention
_MOST_TRIED = 40
_MOST_SINGLE = 2
_MOST_TOLD = 4
_OTHER_THAN_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_COMPANIONS = {
    "input_ids": ("attention_mask", "token_type_ids", "bbox"),
    "pixel_values": (
        *("image_grid_thw", "spatial_shapes", "target_sizes"),
        *("pixel_position_ids", "image_position_ids", "mm_token_type_ids"),
    ),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
}
_LAST = frozenset(  # tried where nothing else will do
    {
        "image_sizes",
        "pixel_attention_mask",
        "input_features_mask",
        "visual_feats",
        "visual_pos",
        "decoder_input_values",
        "encoder_hidden_states",
    }
)

Sizes = dict[str, dict[int, Any] | None]


Given = Callable[[Any], Any]
"""A function of the user's: gets the model, and returns what its `forward` takes, a tuple or a dict."""


class Inputs(NamedTuple):
    """Sample keyword arguments of `forward`, and the dimensions of each that may vary, by axis."""

    kwargs: dict[str, Any]
    sizes: Sizes


def sample_inputs(model: Any, length: int = 16, *, pictures: bool = False) -> Inputs:
    """Inputs that the eager model accepts: texts of `length` tokens, images, sound or what else it takes; two of each.

    They are a guess by the names in `forward` and by the configuration. Where the call needs values that a skeleton
    does not have, it is taken to accept them. pictures: whether a model that takes texts alone gets images, too.

    Raises RecipeError with what was tried, where the model accepts nothing.
    """
    subject = Subject(model, length)
    refused: list[tuple[Inputs, Exception]] = []
    unsure: list[Inputs] = []
    guesses = list(islice(_guesses(subject, pictures), _MOST_TRIED))
    for guess in [*guesses, *map(_single, guesses[:_MOST_SINGLE]), *_of_the_model(subject)]:
        error = _try(model, guess.kwargs)
        if error is None:
            return guess
        if wants_values(error):
            unsure.append(guess)
        refused.append((guess, error))
    if unsure:
        return unsure[0]
    raise _refusal(subject, refused)


def _single(guess: Inputs) -> Inputs:
    """The first of two alone: some models without a padding token take no more."""
    fixed: Sizes = {n: {axis: dim for axis, dim in (axes or {}).items() if axis} for n, axes in guess.sizes.items()}
    return Inputs({name: value[:1] for name, value in guess.kwargs.items()}, fixed)


def given_inputs(model: Any, function: Given) -> Inputs:
    """What the user's function returns, with a batch that may vary where all tensors share it.

    Raises RecipeError where that is not what `forward` takes, or the eager model refuses it.
    """
    who = type(model).__name__
    result = function(model)
    if not isinstance(result, tuple | Mapping):
        raise RecipeError(f"--inputs: returned a {type(result).__qualname__}; expected a tuple or a dict for forward")
    args, kwargs = (result, {}) if isinstance(result, tuple) else ((), result)
    try:
        named = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise RecipeError(f"--inputs: not what the forward of {who} takes: {error}") from error
    inputs = {name: value for name, value in named.arguments.items() if name != "kwargs"} | dict(kwargs)
    refused = _try(model, inputs)
    if refused is not None and not wants_values(refused):
        why = f"{frame_of(refused)}{first_line(refused)}"
        raise RecipeError(f"--inputs: the eager {who} refuses {describe(inputs)}: {why}") from refused
    return _batched(inputs)


def _batched(kwargs: dict[str, Any]) -> Inputs:
    """Arguments whose batch may vary, where all tensors share it."""
    sizes = {value.shape[:1] for value in kwargs.values() if isinstance(value, torch.Tensor)}
    shared = len(sizes) == 1 and all(size and size[0] > 1 for size in sizes)
    axes: dict[int, Any] = {0: Dim("batch")} if shared else {}
    return Inputs(kwargs, {name: axes if isinstance(value, torch.Tensor) else None for name, value in kwargs.items()})


def _of_the_model(subject: Subject) -> list[Inputs]:
    """What the model's class says of itself, for types that are not transformers' own."""
    try:
        own = dict(subject.model.dummy_inputs)
    except Exception:  # whatever code of the user's it is
        return []
    return [_batched(own)] if own.keys() <= set(subject.takes) else []


def _refusal(subject: Subject, refused: Sequence[tuple[Inputs, Exception]]) -> RecipeError:
    said = {f"{frame_of(error)}{first_line(error)}": guess for guess, error in reversed(refused)}
    told = [f"  - {describe(guess.kwargs)}: {text}" for text, guess in reversed(said.items())]
    who = f"{type(subject.model).__name__} (model type {subject.config.model_type!r})"
    what = "accepts no inputs that were guessed for it" if told else "what to give to its forward is not known here"
    return RecipeError(
        f"{who}: {what}; it takes {', '.join(subject.takes) or 'nothing'}",
        *told[:_MOST_TOLD],
        "Give others with --inputs FILE.py:function: a function that gets the model and returns what forward takes.",
    )


def describe(kwargs: Mapping[str, Any]) -> str:
    """`input_ids [2, 16], attention_mask [2, 16]`."""
    return ", ".join(f"{name} {list(getattr(value, 'shape', ()))}" for name, value in kwargs.items())


def _guesses(subject: Subject, pictures: bool) -> Iterator[Inputs]:
    for names in _combinations(subject, pictures):
        for made in _made(subject, [name for name in MAKERS if name in names]):
            yield Inputs({name: made[name].value for name in names}, {name: made[name].axes for name in names})


def _combinations(subject: Subject, pictures: bool) -> list[list[str]]:
    """Names of inputs to try together: a text alone, the main input, then both, then whatever is known."""
    other = [name for name in _OTHER_THAN_TEXT if name in subject.takes]
    wanted = [
        ["input_ids"],
        subject.main,
        ["input_ids", *subject.main, *other[:1]],
        ["input_ids", *subject.main, *other],
    ]
    found = [_together(subject, names) for names in wanted]
    found.append([*dict.fromkeys([*found[-1], *(name for name in subject.takes if name in _LAST)])])
    if pictures and "pixel_values" in subject.takes:
        found = [names for names in found if "pixel_values" in names]
    return [names for n, names in enumerate(found) if names and names not in found[:n] and MAKERS.keys() >= set(names)]


def _together(subject: Subject, names: Sequence[str]) -> list[str]:
    """Those of the names that the model takes, each with its companions, and what it requires."""
    wanted = [each for name in names if name in subject.takes for each in (name, *_companions(subject, name))]
    wanted += ["decoder_input_ids"] if wanted and subject.config.is_encoder_decoder else []
    return [*dict.fromkeys([*(name for name in wanted if name in subject.takes), *subject.required])]


def _companions(subject: Subject, name: str) -> list[str]:
    config = subject.config
    without = {"attention_mask"} if config.model_type in _STATE_SPACE else set()
    without |= {"token_type_ids"} if (getattr(config, "type_vocab_size", 0) or 0) < 2 else set()
    return [each for each in _COMPANIONS.get(name, ()) if each not in without]


def _made(subject: Subject, names: Sequence[str]) -> Iterator[dict[str, Input]]:
    """Every way to make these inputs, one after the other."""
    if not names:
        yield subject.made
        return
    name, *rest = names
    for each in MAKERS[name](subject):
        yield from _made(subject.having(name, each), rest)


def _try(model: nn.Module, kwargs: Mapping[str, Any]) -> Exception | None:
    """What the model raises if it is called in this way. The call leaves nothing behind, and nothing is logged.

    A skeleton is called as torch.export calls it: some operators, such as those of experts, do not know fake tensors.
    """
    with ExitStack() as stack:
        for block in (_untouched(model), _silent(), without_cache(model), torch.no_grad()):
            stack.enter_context(block)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if any(map(is_fake, model.parameters())):
            stack.enter_context(_compiling_state_context())
        try:
            model(**kwargs)
        except Exception as error:
            return error
    return None


@contextmanager
def _silent() -> Iterator[None]:
    """torch logs the trace of an operation that fails on a skeleton's parameters."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled, previous = True, logger.disabled
    try:
        yield
    finally:
        logger.disabled = previous


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with restored(model):
            yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)


def fallbacks(sizes: Sizes) -> list[tuple[str, Sizes]]:
    """What to try in turn: everything dynamic, the batch alone, nothing; each with the names that are then fixed."""
    names = {dim.__name__: axis for axes in sizes.values() for axis, dim in (axes or {}).items()}
    inner = [name for name, axis in names.items() if axis != 0]
    batch = {name: axes and {axis: dim for axis, dim in axes.items() if axis == 0} for name, axes in sizes.items()}
    tries = [("", sizes)]
    if inner:
        tries.append((", ".join(inner), batch))
    if names:
        tries.append((", ".join(names), {name: axes and {} for name, axes in sizes.items()}))
    return tries
