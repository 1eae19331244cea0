"""Loading through the model's own code: what cannot be read by names is loaded into a model, and taken from there.

A trainer's code may do anything to a model. What it changes besides weights, a graph does not have: this is found by
comparing what the graph kept before and after, and refused.
"""

from __future__ import annotations

import copy
import json
import os
import traceback
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weightswap_exporter.capture.tracing import CheckpointTensors, Load
from weightswap_exporter.modules import libraries as huggingface
from weightswap_exporter.modules.stand_ins import first_line, frame_of, reason, within
from weightswap_exporter.modules.tensors import ModelView, describe_kind, is_fake, named_tensors
from weightswap_runtime import Artifact
from weightswap_runtime.errors import MOST_PRINTED, CheckpointError, WeightsMismatch, listed, warn
from weightswap_runtime.format.manifest import PARTS_NAME
from weightswap_runtime.format.names import Match
from weightswap_runtime.tensors import digest_of
from weightswap_runtime.torch_tensors import torch_dtype

from .nested_state_dicts import ANYWHERE, Choice, NestedStateDict
from .reading import Checkpoint, Source, from_module, open_checkpoint
from .tensor import pieces

_ADVICE = "Quantise the checkpoint as the exported model was, or export the checkpoint's model."
_NO_PLACES = {*vars(nn.Module()), huggingface.INITIALIZED}
# by model, what a graph keeps of it, from before its first loading
_kept_by: WeakKeyDictionary[nn.Module, dict[str, Hashable]] = WeakKeyDictionary()


@contextmanager
def load_into(model: nn.Module, source: Source, load: Load | None, choice: Choice = ANYWHERE) -> Iterator[Checkpoint]:
    """Load a checkpoint into a model, and give the model as the checkpoint. Memory: the model and the whole checkpoint.

    `load` gets the trainer's content, including entries that are no tensors: the whole, then the levels that have about
    as many tensors as the model, until it has loaded one (a safetensors file is one flat dict of tensors, and so is the
    whole of a distributed checkpoint). It has failed if it raises or leaves the model unchanged. If it raises after it
    has changed the model, no other level is tried. Without `load`, `model.load_state_dict()`, or for a transformers
    model its own loading, gets only the levels that have about as many tensors, if there are any.

    Raises CheckpointError with the reason, and the line in `load` or a hook, if the checkpoint cannot be loaded, and
    for wrong checksums; the model may then be partly loaded. So it does for loading code that changes what a graph has
    kept since the export, and, in a model that was loaded before, for code that adds to what the model held.
    """
    if isinstance(source, nn.Module):
        raise CheckpointError("`model` is what a checkpoint is loaded into; to pack a module, give it alone")
    is_used, kept = model in _kept_by, _kept_by.setdefault(model, _kept(model))
    with open_checkpoint(source, choice) as checkpoint:
        level = _load(model, checkpoint, load)
        if problems := list(dict.fromkeys(level.damage())):
            raise CheckpointError(*problems[:MOST_PRINTED])
        checkpoint.check_unchanged()
        changed = [path for path, value in _kept(model).items() if kept.get(path) != value]
        told = [path for path in changed if path in _of_extra_states(model)]
        if told:
            warn(
                f"{checkpoint.where}: its extra state changes {listed(told)}, but the graph keeps the values from the "
                "export. If outputs depend on them, register what a checkpoint sets as a persistent buffer, and export "
                "again"
            )
        if changed := [path for path in changed if path not in told]:
            raise CheckpointError(
                f"{checkpoint.where}: loading it changes {listed(changed)}, but the graph keeps the values from the "
                "export. Register what a checkpoint sets as a persistent buffer, and export again; what no call reads "
                "need not be set in the model"
            )
        if is_used and _adds(model, checkpoint, load):
            raise CheckpointError(
                f"{checkpoint.where}: its loading adds to what the model holds, and this model was loaded before. "
                "Build the model anew for each checkpoint"
            )
    yield from_module(model, f"{checkpoint.where}, loaded into {type(model).__qualname__}")


def _load(model: nn.Module, checkpoint: Checkpoint, load: Load | None) -> NestedStateDict:
    likely = _likely(checkpoint.levels, model)
    top = checkpoint.levels[0]
    levels = likely if load is None else (top, *(level for level in likely if level is not top))
    failures: list[_Failure] = []
    for level in levels:
        failure = _try_default(model, level) if load is None else _try(model, level, load)
        if failure is None:
            return level
        failures.append(failure)
        if failure.last:
            break
    if load is None:
        nearest = min(failures, key=lambda failure: len(failure.full))  # the shortest list of problems
    else:
        of_likely = (failure for failure in failures if any(failure.level is level for level in likely))
        nearest = next(of_likely, failures[0])
    name = "model.load_state_dict" if load is None else getattr(load, "__qualname__", "load")
    others = [failure for failure in failures if load is not None and failure is not nearest]
    texts = [f"{checkpoint.where}: {name}{_of(nearest.level)} failed: {nearest.full}"]
    texts += [f"{name}{_of(failure.level) or ' of the whole'} failed, too: {failure.short}" for failure in others]
    raise CheckpointError(*(line for text in texts for line in text.splitlines())) from nearest.error


def _likely(levels: tuple[NestedStateDict, ...], model: nn.Module) -> tuple[NestedStateDict, ...]:
    """Return the levels that have about as many tensors as the model, or all if there are none."""
    count = len(list(model.parameters()))
    return tuple(level for level in levels if 2 * (len(level.tensors) + len(level.problems)) >= count) or levels


def _of(level: NestedStateDict) -> str:
    return f" of {level.path!r}" if level.path else ""


def _try_default(model: nn.Module, level: NestedStateDict) -> _Failure | None:
    """Load a level without a `load` function of the user."""
    try:
        if huggingface.is_pretrained(model):
            huggingface.load(model, dict(level.content()))
        else:
            model.load_state_dict(level.content())
    except Exception as error:
        return _failure(level, error, last=False)
    return None


def _try(model: nn.Module, level: NestedStateDict, load: Load) -> _Failure | None:
    before = _fingerprint(model)
    try:
        load(model, {key: _copied(value) for key, value in level.content().items()})
    except Exception as error:
        return _failure(level, error, last=_fingerprint(model) != before)
    if before and _fingerprint(model) == before:  # as load_state_dict(..., strict=False) does with foreign names
        text = "it raised no error, but left the model unchanged"
        return _Failure(level, text, text, None, last=False)
    return None


class _Failure(NamedTuple):
    """Reason why a level was not loaded."""

    level: NestedStateDict
    full: str
    short: str
    error: Exception | None
    last: bool  # no other level may be tried


def _failure(level: NestedStateDict, error: Exception, *, last: bool) -> _Failure:
    frame = frame_of(error)
    failure = _Failure(level, frame + reason(error), frame + first_line(error), error, last)
    traceback.clear_frames(error.__traceback__)  # the frames refer to the level's tensors
    return failure


def _copied(value: Any) -> Any:
    """Return a copy of a level's dicts for code that may change it, as other levels may have to be tried afterwards."""
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)  # an OrderedDict may have `_metadata`
    copied.update((key, _copied(below)) for key, below in value.items())
    return copied


def _fingerprint(model: nn.Module) -> list[Hashable]:
    """Return a value that changes with the model."""
    return [_state_of(name, tensor) for name, tensor in named_tensors(model).items()]


def _state_of(name: str, tensor: Any) -> Hashable:
    if is_fake(tensor) or tensor.layout is not torch.strided:
        return object()  # such a model cannot be packed; equal to nothing
    # with a digest, as torch counts no changes through `.data`
    return name, id(tensor), tensor.data_ptr(), tensor._version, digest_of(pieces(tensor))


# What a graph has kept of a model.


def _kept(model: nn.Module) -> dict[str, Hashable]:
    """Return by path what a graph keeps of a model: numbers, texts, and tensors that checkpoints do not have."""
    return {path: value for name, module in model.named_modules() for path, value in _kept_of(name, module)}


def _kept_of(name: str, module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    places = {key: value for key, value in vars(module).items() if key not in _NO_PLACES}
    places |= {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
    for key, place in places.items():
        for path, value in within(f"{name}.{key}" if name else key, place):
            if isinstance(value, torch.Tensor):
                yield path, _digest(value)
            elif isinstance(value, bool | int | float | str | bytes):
                yield path, (type(value), value)


def _of_extra_states(model: nn.Module) -> set[str]:
    """Return the paths of what modules with an extra state keep: names of `Packed.ignored` have told of that."""
    return {
        path
        for name, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
        for path, _ in _kept_of(name, module)
    }


def _adds(model: nn.Module, checkpoint: Checkpoint, load: Load | None) -> bool:
    """Load once more, and return whether that has changed a model's tensors."""
    before = {name: _digest(tensor) for name, tensor in named_tensors(model).items()}
    _load(model, checkpoint, load)
    return any(_digest(tensor) != before.get(name) for name, tensor in named_tensors(model).items())


def _digest(tensor: torch.Tensor) -> Hashable:
    values = None if is_fake(tensor) or tensor.layout is not torch.strided else digest_of(pieces(tensor))
    return tensor.dtype, tuple(tensor.shape), values


# Kinds of tensors: plain, or composed of parts as quantised ones are.


def kinds_file(view: ModelView) -> dict[str, bytes]:
    """Return the artifact's file with the kind of each composed parameter; empty if there are none."""
    return {PARTS_NAME: json.dumps(view.kinds, indent=1).encode() + b"\n"} if view.kinds else {}


def model_problems(view: ModelView, artifact: Artifact) -> list[str]:
    """Return the parameters whose kind is not the graph's, as texts."""
    return list(_differences(artifact.kinds, view.kinds, "the model"))


def check_kinds(level: NestedStateDict, match: Match, artifact: Artifact, where: str) -> None:
    """Raise WeightsMismatch for weights that are parts of tensors whose kind is not the graph's."""
    graph_kinds = artifact.kinds
    pairs = [(weight, level.tensors[names[0]].part_of) for weight, names in match.found.items()]
    kinds = {weight.removesuffix(part.suffix): part.kind for weight, part in pairs if part is not None}
    if problems := list(_differences({name: graph_kinds.get(name) for name in kinds}, kinds, "the checkpoint")):
        raise WeightsMismatch(where, problems, _ADVICE)


def kind_mismatch(checkpoint: Checkpoint, artifact: Artifact) -> WeightsMismatch | CheckpointError | None:
    """Return an error if names differ because tensors are of another kind than the graph's, else None."""
    graph_kinds = artifact.kinds
    plain = {name for weight in artifact.manifest.weights for name in weight.names}
    plain |= {key for source in artifact.manifest.conversion.sources for key in source.keys}
    for level in checkpoint.levels:
        parts = {name: values.part_of for name, values in level.tensors.items()}
        kinds = {name.removesuffix(part.suffix): part.kind for name, part in parts.items() if part is not None}
        unsplit = graph_kinds.keys() & level.tensors.keys()
        if unsplit and (damage := level.tensors[min(unsplit)].problems()):  # a part file cannot say what it holds
            return CheckpointError(*damage)
        shared = sorted((kinds.keys() & (plain | graph_kinds.keys())) | unsplit)
        expected, actual = ({name: table.get(name) for name in shared} for table in (graph_kinds, kinds))
        if problems := list(_differences(expected, actual, "the checkpoint")):
            return WeightsMismatch(checkpoint.where, problems, _ADVICE)
    return None


def _differences(expected: Mapping[str, Any], actual: Mapping[str, Any], who: str) -> Iterator[str]:
    for name in {**expected, **actual}:
        if expected.get(name) != actual.get(name):
            one, other = describe_kind(expected.get(name)), describe_kind(actual.get(name))
            yield f"{name}: the graph has {one}, {who} has {other}"


# An example of a checkpoint, for an export that traces loading code.


def example_checkpoint(example: CheckpointTensors | str | os.PathLike[str]) -> CheckpointTensors:
    """Return the given tensors by key, or those in a path's checkpoint as meta tensors. Raises CheckpointError."""
    if isinstance(example, str | os.PathLike):
        return _from_path(Path(example))
    if not isinstance(example, Mapping):
        raise CheckpointError(f"checkpoint: expected a dict of tensors or a path, got a {type(example).__qualname__}")
    nested = [key for key, value in example.items() if isinstance(value, Mapping) and _has_tensors(value)]
    if nested and not _has_tensors(example):
        raise CheckpointError(f"checkpoint: has its tensors under {nested[0]!r}; give checkpoint[{nested[0]!r}]")
    return example


def _from_path(path: Path) -> CheckpointTensors:
    with open_checkpoint(path) as opened:
        filled = [level for level in opened.levels if level.tensors]
        levels = [level for level in filled if not level.path] or filled
        if len(levels) != 1:
            paths = ", ".join(level.path for level in levels) or "none"
            raise CheckpointError(f"{path}: expected one state dict, found {paths}; give its tensors as a dict")
        return {
            key: torch.empty(values.shape, dtype=torch_dtype(values.dtype), device="meta")
            for key, values in levels[0].tensors.items()
        }


def _has_tensors(tree: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree.values())
