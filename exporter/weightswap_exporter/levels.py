"""The levels of a checkpoint: a trainer may save the state dict below `model` or `state_dict`, beside other things."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightswap_runtime.adapter import Match, Readings, resolve
from weightswap_runtime.dtypes import TORCH_NAMES
from weightswap_runtime.errors import CheckpointError, WeightsMismatch, WeightswapError
from weightswap_runtime.manifest import Manifest

from .skeletons import is_fake
from .values import Values

WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
DEPTH = 2


class Level(NamedTuple):
    """A state dict in a checkpoint. `path` is empty for the checkpoint itself, `model` or `state_dict.model` below.

    problems: what keeps the level's tensors from being packed. content: the level as its trainer saved it, tensors
    loaded.
    """

    path: str
    tensors: dict[str, Values]
    problems: tuple[str, ...]
    content: Callable[[], Mapping[str, Any]]


def nested_levels(
    tree: Mapping[Any, Any], values_of: Callable[[torch.Tensor], Values], *, deep: bool = True
) -> tuple[Level, ...]:
    """A mapping and the mappings in it that may be the state dict. Entries that are no tensors are left out."""
    return tuple(_level(path, below, values_of) for path, below in _below("", tree, DEPTH if deep else 0))


def flat_levels(tensors: Mapping[str, Values]) -> tuple[Level, ...]:
    """The same for tensors whose names hold the keys of every level, joined with dots."""
    paths = ["", *WRAPPERS, *(f"{outer}.{inner}" for outer in WRAPPERS for inner in WRAPPERS if inner != outer)]
    levels = []
    for path in paths:
        prefix = f"{path}." if path else ""
        below = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        if below or not path:
            levels.append(Level(path, below, tuple(_dtype_problems(below)), _loading(below)))
    return tuple(levels)


def choose_level(levels: tuple[Level, ...], manifest: Manifest, where: str, readings: Readings) -> tuple[Level, Match]:
    """The one level whose names, dtypes and shapes are those that the artifact wants.

    Raises CheckpointError or WeightsMismatch with every problem of the level that comes nearest, and WeightsMismatch if
    several levels fit and would give different weights.
    """
    if not any(level.tensors or level.problems for level in levels):
        raise CheckpointError(f"{where}: holds no tensors{_hint(levels[0])}; give the state dict itself")
    fitting: list[tuple[Level, Match]] = []
    refused: list[tuple[tuple[bool, int, int], WeightswapError]] = []
    for level in levels:
        try:
            fitting.append((level, _match(level, manifest, where, readings)))
        except (CheckpointError, WeightsMismatch) as error:
            problems = getattr(error, "problems", level.problems)
            hopeless = 2 * (len(level.tensors) + len(level.problems)) < len(manifest.weights)
            refused.append(((hopeless, len(problems), -level.path.count(".") - bool(level.path)), error))
    if len({_places(level, match) for level, match in fitting}) > 1:
        found = " and ".join(repr(level.path) if level.path else "its top level" for level, _ in fitting)
        raise WeightsMismatch(where, [f"{found} both fit, with different values"], "Give the one that is meant.")
    if not fitting:
        raise min(refused, key=lambda item: item[0])[1]
    return fitting[0]


def _match(level: Level, manifest: Manifest, where: str, readings: Readings) -> Match:
    where = f"{where}, {level.path}" if level.path else where
    if level.problems:
        more = f"; and {len(level.problems) - 10} more" if len(level.problems) > 10 else ""
        raise CheckpointError(f"{where}: {'; '.join(level.problems[:10])}{more}")
    return resolve(level.tensors, manifest, where, readings=readings)


def _places(level: Level, match: Match) -> frozenset[object]:
    """What the weights would be read from."""
    found = {(weight, level.tensors[names[0]].place) for weight, names in match.found.items()}
    computed = {(key, level.tensors[name].place) for keys in match.computed.values() for key, name in keys.items()}
    return frozenset(found | computed)


def _hint(top: Level) -> str:
    nested = [key for key, value in top.content().items() if isinstance(value, Mapping)]
    return f" (a state dict may be under {nested[0]!r})" if nested else ""


def _below(path: str, tree: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield path, tree
    for key in WRAPPERS if depth else ():
        if isinstance(below := tree.get(key), Mapping):
            yield from _below(f"{path}.{key}" if path else key, below, depth - 1)


def _level(path: str, tree: Mapping[Any, Any], values_of: Callable[[torch.Tensor], Values]) -> Level:
    tensors = {key: value for key, value in tree.items() if isinstance(value, torch.Tensor)}
    problems = tuple(text for key, value in tensors.items() for text in _problems(key, value))
    values = {} if problems else {key: values_of(value) for key, value in tensors.items()}
    return Level(path, values, problems, lambda: tree)


def _problems(key: object, tensor: Any) -> Iterator[str]:
    if not isinstance(key, str):
        yield f"has the key {key!r}; the keys of a state dict are texts"
    elif is_fake(tensor):
        yield f"{key}: has no values (a skeleton's or a meta tensor)"
    elif is_traceable_wrapper_subclass(tensor):
        yield (
            f"{key}: is a {type(tensor).__qualname__}, not a plain tensor; gather a sharded one (full_tensor()), or "
            "save it with torch.distributed.checkpoint"
        )
    elif tensor.layout is not torch.strided or str(tensor.dtype).removeprefix("torch.") not in TORCH_NAMES:
        yield f"{key}: {tensor.dtype} {tensor.layout} cannot be written as safetensors"


def _dtype_problems(tensors: Mapping[str, Values]) -> Iterator[str]:
    for name, values in tensors.items():
        if values.dtype.startswith("torch."):
            yield f"{name}: {values.dtype} cannot be written as safetensors"


def _loading(tensors: Mapping[str, Values]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {name: values.load() for name, values in tensors.items()}
