"""Sample inputs and dynamic sizes for transformers models, found by trial.

The eager model is called with one guess after another, the plainest first; the first that it accepts is used.
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

from weightswap_exporter.modules.libraries import without_cache
from weightswap_exporter.modules.stand_ins import first_line, frame_of, quiet, restored, wants_values
from weightswap_exporter.modules.tensors import is_fake
from weightswap_runtime.errors import Unsupported

from .hf_makers import MAKERS, Input, Subject

_STATE_SPACE = frozenset({"mamba", "mamba2", "falcon_mamba"})  # take a mask although they have no attention
_MOST_TRIED = 40  # guesses, each a call of the model
_MOST_SINGLE = 2  # guesses that are tried again with one sample alone
_MOST_SHOWN = 4  # refusals in the error
# inputs beside the text of a model of several kinds
_OTHER_THAN_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
# inputs that are given with another
_COMPANIONS = {
    "input_ids": ("attention_mask", "token_type_ids", "bbox"),
    "pixel_values": (
        *("image_grid_thw", "spatial_shapes", "target_sizes"),
        *("pixel_position_ids", "image_position_ids", "mm_token_type_ids"),
    ),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
}
_LAST = frozenset(  # tried only after everything else
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

InputFunction = Callable[[Any], Any]
"""A function of the user that gets the model and returns the inputs of its `forward`, a tuple or a dict."""


class Inputs(NamedTuple):
    """Sample keyword arguments of `forward`, and the dynamic dimensions of each, by axis."""

    kwargs: dict[str, Any]
    sizes: Sizes


def sample_inputs(model: Any, length: int = 16, *, pictures: bool = False) -> Inputs:
    """Return inputs that the eager model accepts: two texts of `length` tokens, images, waveforms or others.

    They are guessed from the parameter names of `forward` and the configuration. If a call needs values that a skeleton
    lacks, the inputs count as accepted. pictures: also give images to a model that takes text alone.

    Raises Unsupported with the inputs that were tried if the model accepts none of them.
    """
    subject = Subject(model, length)
    refused: list[tuple[Inputs, Exception]] = []
    unsure: list[Inputs] = []
    guesses = list(islice(_guesses(subject, pictures), _MOST_TRIED))
    for guess in [*guesses, *map(_batch_of_one, guesses[:_MOST_SINGLE]), *_dummy_inputs(subject)]:
        error = _try(model, guess.kwargs)
        if error is None:
            return guess
        if wants_values(error):
            unsure.append(guess)
        refused.append((guess, error))
    if unsure:
        return unsure[0]
    raise _refusal(subject, refused)


def _batch_of_one(guess: Inputs) -> Inputs:
    """Return the first of the two samples: some models without a padding token take one at a time."""
    fixed: Sizes = {n: {axis: dim for axis, dim in (axes or {}).items() if axis} for n, axes in guess.sizes.items()}
    return Inputs({name: value[:1] for name, value in guess.kwargs.items()}, fixed)


def inputs_of_user(model: Any, function: InputFunction) -> Inputs:
    """Return the inputs that the user's function gives, with a dynamic batch if all tensors share it.

    Raises Unsupported if `forward` does not take such arguments, or the eager model refuses them.
    """
    who = type(model).__name__
    result = function(model)
    if not isinstance(result, tuple | Mapping):
        raise Unsupported(f"--inputs: returned a {type(result).__qualname__}; expected a tuple or a dict for forward")
    args, kwargs = (result, {}) if isinstance(result, tuple) else ((), result)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise Unsupported(f"--inputs: not what the forward of {who} takes: {error}") from error
    inputs = {name: value for name, value in bound.arguments.items() if name != "kwargs"} | dict(kwargs)
    raised = _try(model, inputs)
    if raised is not None and not wants_values(raised):
        why = f"{frame_of(raised)}{first_line(raised)}"
        raise Unsupported(f"--inputs: the eager {who} refuses {describe(inputs)}: {why}") from raised
    return _batched(inputs)


def _batched(kwargs: dict[str, Any]) -> Inputs:
    sizes = {value.shape[:1] for value in kwargs.values() if isinstance(value, torch.Tensor)}
    shared = len(sizes) == 1 and all(size and size[0] > 1 for size in sizes)
    axes: dict[int, Any] = {0: Dim("batch")} if shared else {}
    return Inputs(kwargs, {name: axes if isinstance(value, torch.Tensor) else None for name, value in kwargs.items()})


def _dummy_inputs(subject: Subject) -> list[Inputs]:
    """Return the `dummy_inputs` of the model's class, which model types outside transformers may define."""
    try:
        inputs = dict(subject.model.dummy_inputs)
    except Exception:  # the property runs the user's code
        return []
    return [_batched(inputs)] if inputs.keys() <= set(subject.takes) else []


def _refusal(subject: Subject, refused: Sequence[tuple[Inputs, Exception]]) -> Unsupported:
    first_guesses = {f"{frame_of(error)}{first_line(error)}": guess for guess, error in reversed(refused)}
    lines = [f"  - {describe(guess.kwargs)}: {text}" for text, guess in reversed(first_guesses.items())]
    who = f"{type(subject.model).__name__} (model type {subject.config.model_type!r})"
    what = "accepts none of the inputs that were guessed" if lines else "what to give to its forward is not known here"
    return Unsupported(
        f"{who}: {what}; it takes {', '.join(subject.takes) or 'nothing'}",
        *lines[:_MOST_SHOWN],
        "Give others with --inputs FILE.py:function: a function that gets the model and returns what forward takes.",
    )


def describe(kwargs: Mapping[str, Any]) -> str:
    """Return names with shapes, as `input_ids [2, 16], attention_mask [2, 16]`."""
    return ", ".join(f"{name} {list(getattr(value, 'shape', ()))}" for name, value in kwargs.items())


def _guesses(subject: Subject, pictures: bool) -> Iterator[Inputs]:
    for names in _combinations(subject, pictures):
        for inputs in _variations(subject, [name for name in MAKERS if name in names]):
            yield Inputs({name: inputs[name].value for name in names}, {name: inputs[name].axes for name in names})


def _combinations(subject: Subject, pictures: bool) -> list[list[str]]:
    """Return names of inputs to try together: text alone, the main input, both, then all that are known."""
    other = [name for name in _OTHER_THAN_TEXT if name in subject.takes]
    groups = [
        ["input_ids"],
        subject.main,
        ["input_ids", *subject.main, *other[:1]],
        ["input_ids", *subject.main, *other],
    ]
    groups = [_together(subject, names) for names in groups]
    groups.append([*dict.fromkeys([*groups[-1], *(name for name in subject.takes if name in _LAST)])])
    if pictures and "pixel_values" in subject.takes:
        groups = [names for names in groups if "pixel_values" in names]
    return [
        names for n, names in enumerate(groups) if names and names not in groups[:n] and MAKERS.keys() >= set(names)
    ]


def _together(subject: Subject, names: Sequence[str]) -> list[str]:
    """Return the names that the model takes, each with its companions, and the names that it requires."""
    group = [each for name in names if name in subject.takes for each in (name, *_companions(subject, name))]
    group += ["decoder_input_ids"] if group and subject.config.is_encoder_decoder else []
    return [*dict.fromkeys([*(name for name in group if name in subject.takes), *subject.required])]


def _companions(subject: Subject, name: str) -> list[str]:
    config = subject.config
    without = {"attention_mask"} if config.model_type in _STATE_SPACE else set()
    without |= {"token_type_ids"} if (getattr(config, "type_vocab_size", 0) or 0) < 2 else set()
    return [each for each in _COMPANIONS.get(name, ()) if each not in without]


def _variations(subject: Subject, names: Sequence[str]) -> Iterator[dict[str, Input]]:
    """Yield every combination of values for these inputs."""
    if not names:
        yield subject.made
        return
    name, *rest = names
    for value in MAKERS[name](subject):
        yield from _variations(subject.having(name, value), rest)


def _try(model: nn.Module, kwargs: Mapping[str, Any]) -> Exception | None:
    """Call the model and return the exception that it raises, if any. Buffers are restored, and nothing is logged.

    A skeleton is called as torch.export does: else some operators, such as those of experts, refuse fake tensors.
    """
    with ExitStack() as stack:
        # torch logs a stack trace when an operator fails on a skeleton's parameters
        no_log = quiet("torch._subclasses.fake_tensor", level=logging.CRITICAL)
        for block in (_restored_buffers(model), no_log, without_cache(model), torch.no_grad()):
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
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with restored(model):
            yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)


def fallbacks(sizes: Sizes) -> list[tuple[str, Sizes]]:
    """Return the sizes to try in turn: all dynamic, the batch alone, none; each with the names of the fixed ones."""
    names = {dim.__name__: axis for axes in sizes.values() for axis, dim in (axes or {}).items()}
    inner = [name for name, axis in names.items() if axis != 0]
    batch = {name: axes and {axis: dim for axis, dim in axes.items() if axis == 0} for name, axes in sizes.items()}
    tries = [("", sizes)]
    if inner:
        tries.append((", ".join(inner), batch))
    if names:
        tries.append((", ".join(names), {name: axes and {} for name, axes in sizes.items()}))
    return tries
