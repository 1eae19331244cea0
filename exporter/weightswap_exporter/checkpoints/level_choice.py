"""Choice of the level of a checkpoint that fits an artifact, and errors if none or several do."""

from __future__ import annotations

from collections.abc import Iterable

from weightswap_runtime.errors import MOST_PRINTED, CheckpointError, WeightsMismatch, WeightswapError
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.name_matching import Match, Reading, Readings, resolve
from weightswap_runtime.messages import lines_of, listed, plural
from weightswap_runtime.tensors.dtypes import TensorType

from .nested_state_dicts import NO_VALUES, NestedStateDict, grouped, listing
from .reading_checkpoints import Checkpoint

_OPTIMIZER_STATE = "state"  # where every optimizer of torch keeps its tensors
_PREFIX_DEPTH = 3
_LEVEL = "(--level)"
_NO_TENSOR = TensorType("no tensor", ())
_PREFIX = "(weightswap pack --prefix)"


def choose_level(checkpoint: Checkpoint, manifest: Manifest, readings: Readings) -> tuple[NestedStateDict, Match]:
    """Return the one level whose names, dtypes and shapes are those of the artifact.

    Raises CheckpointError or WeightsMismatch with every problem of the nearest level, or with the `level` or `prefix`
    that would fit; and WeightsMismatch if several levels fit and would give different weights.
    """
    where = checkpoint.where
    if manifest.weights and not any(level.tensors or level.problems for level in checkpoint.levels):
        raise no_tensors(checkpoint)
    fitting: list[tuple[NestedStateDict, Match]] = []
    refused: list[tuple[tuple[bool, int, int], NestedStateDict, WeightswapError]] = []
    for level in checkpoint.levels:
        try:
            fitting.append((level, _match(level, manifest, checkpoint, readings)))
        except (CheckpointError, WeightsMismatch) as error:
            problems = getattr(error, "problems", level.problems)
            hopeless = 2 * (len(level.tensors) + len(level.problems)) < len(manifest.weights)
            refused.append(((hopeless, len(problems), -level.path.count(".") - bool(level.path)), level, error))
    if len({_tie_keys(level, match) for level, match in fitting}) > 1:
        raise _several([level for level, _ in fitting], where)
    if not fitting:
        _, nearest, refusal = min(refused, key=lambda item: item[0])
        if manifest.adapter.untraceable:
            raise refusal
        raise _hint(nearest, checkpoint, [reading(manifest) for reading in readings]) or refusal
    return fitting[0]


def _match(level: NestedStateDict, manifest: Manifest, checkpoint: Checkpoint, readings: Readings) -> Match:
    check_tensors(level, checkpoint.where)
    states = {} if checkpoint.names else dict.fromkeys(level.extra, _NO_TENSOR)
    return resolve({**level.tensors, **states}, manifest, _where(checkpoint.where, level), readings=readings)


def check_tensors(level: NestedStateDict, where: str) -> None:
    """Raise CheckpointError for tensors in a level that have no values, or cannot be in a weight file."""
    if level.problems:
        hollow = any(NO_VALUES in text for text in level.problems)
        advice = ". Build the model outside skeleton(), load its weights, and then pack it" if hollow else ""
        raise CheckpointError(f"{_where(where, level)}: {listed(level.problems, 10, '; ')}{advice}")


def fullest_level(checkpoint: Checkpoint, chosen: str | None) -> NestedStateDict:
    """Return the chosen level, or else the one with the most tensors of its own.

    Raises CheckpointError if there are no tensors, or several such levels with different values.
    """
    levels = checkpoint.levels
    counts = [level.own if chosen is None else len(level.tensors) + len(level.problems) for level in levels]
    if not max(counts):
        raise no_tensors(checkpoint) if chosen is None else _empty(checkpoint.where, chosen)
    fullest = [level for level, count in zip(levels, counts, strict=True) if count == max(counts)]
    if len({_all_tie_keys(level) for level in fullest}) > 1:
        names = " and ".join(repr(level.path) if level.path else "its top level" for level in fullest)
        text = f"{names} have {plural(max(counts), 'tensor')} each, with different values. Say which is meant {_LEVEL}."
        raise CheckpointError(f"{checkpoint.where}: {text}")
    return fullest[0]


def _empty(where: str, chosen: str) -> CheckpointError:
    named = f"its level {chosen!r}" if chosen else "its top level"
    return CheckpointError(f"{where}: {named} holds no tensors of its own; run without --level to see what does")


def _all_tie_keys(level: NestedStateDict) -> frozenset[object]:
    return frozenset((name, values.tie_key) for name, values in level.tensors.items())


def _where(where: str, level: NestedStateDict) -> str:
    return f"{where}{f', {level.path}' if level.path else ''}{f', prefix {level.prefix!r}' if level.prefix else ''}"


def _tie_keys(level: NestedStateDict, match: Match) -> frozenset[object]:
    """Return the sources that the weights would be read from."""
    direct = {(weight, level.tensors[names[0]].tie_key) for weight, names in match.found.items()}
    computed = {(key, level.tensors[name].tie_key) for keys in match.computed.values() for key, name in keys.items()}
    return frozenset(direct | computed)


def _several(levels: list[NestedStateDict], where: str) -> WeightsMismatch:
    names = " and ".join(repr(level.path) if level.path else "its top level" for level in levels)
    both = "both" if len(levels) == 2 else "all"
    options = " or ".join(f"level={level.path!r}" for level in levels)
    return WeightsMismatch(where, [f"{names} {both} fit, with different values"], f"Say which: {options} (--level).")


def no_tensors(checkpoint: Checkpoint) -> CheckpointError:
    """Return the error for a checkpoint without tensors where a state dict is searched for."""
    where = _where(checkpoint.where, checkpoint.levels[0])
    deeper = {path: names for path, names in checkpoint.mappings().items() if names}
    if not deeper:
        return CheckpointError(f"{where}: holds no tensors; give a state dict")
    if all(_OPTIMIZER_STATE in path.split(".") for path in deeper):
        return CheckpointError(f"{where}: holds the state of an optimizer, not weights; give the model's state dict")
    option = f"level={next(iter(deeper))!r}" if len(deeper) == 1 else "one of them as level=..."
    return CheckpointError(
        f"{where}: holds no tensors where a state dict is expected. It has {listing(deeper)}: pass {option} {_LEVEL}"
    )


def _hint(nearest: NestedStateDict, checkpoint: Checkpoint, readings: list[Reading]) -> WeightsMismatch | None:
    """Return an error that names the fitting level or prefix, or None if there is none."""
    where = _where(checkpoint.where, nearest)
    prefixes = _fitting_prefixes(nearest.tensors, readings)
    if len(prefixes) > 1:
        full = " or ".join(f"prefix={nearest.prefix + prefix!r}" for prefix in prefixes)
        text = f"its names are those of the graph after each of {listed(list(map(repr, prefixes)))}"
        return WeightsMismatch(where, [text], f"Say which is meant: {full} {_PREFIX}.")
    for prefix in prefixes:
        others = sum(not name.startswith(prefix) for name in nearest.tensors)
        which = f"{plural(others, 'other')} left out" if others else "all names have it"
        full = nearest.prefix + prefix
        text = f"its names are those of the graph after {prefix!r} ({which}): pass prefix={full!r}"
        return WeightsMismatch(where, [text], f"Pass it {_PREFIX}, or rename the keys.")
    tried = {level.path for level in checkpoint.levels}
    mappings = {} if nearest.prefix else checkpoint.mappings()
    paths = [path for path, names in mappings.items() if path not in tried and _fits(names, readings)]
    if len(paths) > 1:
        text = f"the names of the graph are in each of {listed(list(map(repr, paths)))}"
        full = " or ".join(f"level={path!r}" for path in paths)
        return WeightsMismatch(checkpoint.where, [text], f"Say which is meant: {full} {_LEVEL}.")
    for path in paths:
        text = f"the names of the graph are in {path!r}, where no state dict is expected: pass level={path!r}"
        return WeightsMismatch(checkpoint.where, [text], f"Pass it {_LEVEL}, or give the state dict itself.")
    return None


def _fitting_prefixes(names: Iterable[str], readings: list[Reading]) -> list[str]:
    """Return the prefixes whose names, without them, are exactly those of a reading."""
    groups = grouped(names, _PREFIX_DEPTH)
    return [f"{prefix}." for prefix, rest in groups.items() if _fits(rest, readings)]


def _fits(names: Iterable[str], readings: list[Reading]) -> bool:
    present = dict.fromkeys(names)
    return any(reading.demands and reading.complete(present) for reading in readings if present)


def refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with the problems, if any, each once: tensors in one file can share a problem."""
    if distinct := list(dict.fromkeys(problems)):
        raise CheckpointError(*lines_of(distinct, MOST_PRINTED))
