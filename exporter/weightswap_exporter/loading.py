"""Checkpoints that only the model's own code can load: they are loaded, and the model is packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from weightswap_runtime.errors import CheckpointError

from . import huggingface
from .checkpoints import Checkpoint, Source, from_module, open_checkpoint
from .levels import ANYWHERE, Choice, Level
from .tracing import Load


@contextmanager
def load_into(model: nn.Module, source: Source, load: Load | None, choice: Choice = ANYWHERE) -> Iterator[Checkpoint]:
    """Load a checkpoint into a model, which then is the checkpoint. Memory: the model and the whole checkpoint.

    `load` gets what the trainer saved, with every level and with what is no tensor (a safetensors file or a distributed
    checkpoint is one flat dict of tensors); a model of the library transformers has one of its own. Without it
    `model.load_state_dict()` gets the level that it takes.

    Raises CheckpointError with the reason if the checkpoint cannot be loaded; the model may then be partly loaded.
    """
    if isinstance(source, nn.Module):
        raise CheckpointError("`model` is what a checkpoint is loaded into; to pack a module, give it alone")
    if load is None and huggingface.is_pretrained(model):
        load = huggingface.load
    with open_checkpoint(source, choice) as checkpoint:
        _load(model, checkpoint, load)
        checkpoint.check_unchanged()
    yield from_module(model, f"{checkpoint.where}, loaded into {type(model).__qualname__}")


def _load(model: nn.Module, checkpoint: Checkpoint, load: Load | None) -> None:
    name = "model.load_state_dict" if load is None else getattr(load, "__qualname__", "load")
    levels = _likely(checkpoint.levels, model) if load is None else checkpoint.levels[:1]
    failures = []
    for level in levels:
        try:
            if load is None:
                model.load_state_dict(level.content())
            else:
                load(model, dict(level.content()))
        except Exception as error:
            place = f" of {level.path!r}" if level.path else ""
            failures.append((f"{name}{place} raised {type(error).__name__}: {error}", error))
        else:
            return
    text, cause = min(failures, key=lambda failure: len(failure[0]))  # each lists what is wrong
    raise CheckpointError(f"{checkpoint.where}: {text}") from cause


def _likely(levels: tuple[Level, ...], model: nn.Module) -> tuple[Level, ...]:
    """Levels that have about as many tensors as the model, if there are any."""
    wanted = len(list(model.parameters()))
    return tuple(level for level in levels if 2 * (len(level.tensors) + len(level.problems)) >= wanted) or levels
