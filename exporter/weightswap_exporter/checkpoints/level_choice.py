"""Choosing the level of a checkpoint that has what an artifact wants, and what to say if none or several have."""

from __future__ import annotations

from collections.abc import Iterable

from weightswap_runtime.errors import MOST_PRINTED, CheckpointError, WeightsMismatch, WeightswapError
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.name_matching import Match, Reading, Readings, resolve
from weightswap_runtime.messages import lines_of, listed, plural

from .nested_state_dicts import NO_VALUES, NestedStateDict, grouped, listing
from .reading_checkpoints import Checkpoint

_OPTIMIZER_STATE = "state"  # where every optimizer of torch keeps its tensors
_PREFIX_DEPTH = 3
_LEVEL = "(--level)"
_PREFIX = "(weightswap pack --prefix)"


def choose_level(checkpoint: Checkpoint, manifest: Manifest, readings: Readings) -> tuple[NestedStateDict, Match]:
    """The one level whose names, dtypes and shapes are those that the artifact wants.

    Raises CheckpointError or WeightsMismatch with every problem of the level that comes nearest, or with the `level` or
    `prefix` that would do; and WeightsMismatch if several levels fit and would give different weights.
    """
    where = checkpoint.where
    if manifest.weights and not any(level.tensors or level.problems for level in checkpoint.levels):
        raise no_tensors(checkpoint)
    fitting: list[tuple[NestedStateDict, Match]] = []
    refused: list[tuple[tuple[bool, int, int], NestedStateDict, WeightswapError]] = []
    for level in checkpoint.levels:
        try:
            fitting.append((level, _match(level, manifest, where, readings)))
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
        raise _named(nearest, checkpoint, [reading(manifest) for reading in readings]) or refusal
    return fitting[0]


def _match(level: NestedStateDict, manifest: Manifest, where: str, readings: Readings) -> Match:
    check_tensors(level, where)
    return resolve(level.tensors, manifest, _where(where, level), readings=readings)


def check_tensors(level: NestedStateDict, where: str) -> None:
    """Raise CheckpointError for tensors in a level that have no values, or cannot be in a weight file."""
    if level.problems:
        hollow = any(NO_VALUES in text for text in level.problems)
        advice = ". Build the model outside skeleton(), load its weights, and pack it then" if hollow else ""
        raise CheckpointError(f"{_where(where, level)}: {listed(level.problems, 10, '; ')}{advice}")


def fullest_level(checkpoint: Checkpoint, chosen: str | None) -> NestedStateDict:
    """The level that the user has chosen, or else the one with the most tensors of its own.

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
    return CheckpointError(f"{where}: {named} holds no tensors of its own; without --level you are told what does")


def _all_tie_keys(level: NestedStateDict) -> frozenset[object]:
    return frozenset((name, values.tie_key) for name, values in level.tensors.items())


def _where(where: str, level: NestedStateDict) -> str:
    return f"{where}{f', {level.path}' if level.path else ''}{f', prefix {level.prefix!r}' if level.prefix else ''}"


def _tie_keys(level: NestedStateDict, match: Match) -> frozenset[object]:
    """What the weights would be read from."""
    found = {(weight, level.tensors[names[0]].tie_key) for weight, names in match.found.items()}
    computed = {(key, level.tensors[name].tie_key) for keys in match.computed.values() for key, name in keys.items()}
    return frozenset(found | computed)


def _several(levels: list[NestedStateDict], where: str) -> WeightsMismatch:
    found = " and ".join(repr(level.path) if level.path else "its top level" for level in levels)
    both = "both" if len(levels) == 2 else "all"
    options = " or ".join(f"level={level.path!r}" for level in levels)
    return WeightsMismatch(where, [f"{found} {both} fit, with different values"], f"Say which: {options} (--level).")


def no_tensors(checkpoint: Checkpoint) -> CheckpointError:
    """What to say of a checkpoint in which nothing is where it is looked for."""
    where = _where(checkpoint.where, checkpoint.levels[0])
    deeper = {path: names for path, names in checkpoint.mappings().items() if names}
    if not deeper:
        return CheckpointError(f"{where}: holds no tensors; give a state dict")
    if all(_OPTIMIZER_STATE in path.split(".") for path in deeper):
        return CheckpointError(f"{where}: holds the state of an optimizer, and no weights; give the model's state dict")
    option = f"level={next(iter(deeper))!r}" if len(deeper) == 1 else "the one that is meant as level=..."
    return CheckpointError(
        f"{where}: holds no tensors where a state dict is looked for. It has {listing(deeper)}: pass {option} {_LEVEL}"
    )


def _named(nearest: NestedStateDict, checkpoint: Checkpoint, readings: list[Reading]) -> WeightsMismatch | None:
    """The refusal that names the level or the prefix with which the names would be those that are wanted, if one is."""
    if prefix := _fitting_prefix(nearest.tensors, readings):
        others = sum(not name.startswith(prefix) for name in nearest.tensors)
        which = f"the others, {others}, are then left out" if others else "all its names begin so"
        given = nearest.prefix + prefix
        text = f"its names are those of the graph after {prefix!r} ({which}): pass prefix={given!r}"
        return WeightsMismatch(_where(checkpoint.where, nearest), [text], f"Pass it {_PREFIX}, or rename the keys.")
    tried = {level.path for level in checkpoint.levels}
    for path, names in checkpoint.mappings().items():
        if path not in tried and not nearest.prefix and _fits(names, readings):
            text = f"the names of the graph are in {path!r}, where no state dict is looked for: pass level={path!r}"
            return WeightsMismatch(checkpoint.where, [text], f"Pass it {_LEVEL}, or give the state dict itself.")
    return None


def _fitting_prefix(names: Iterable[str], readings: list[Reading]) -> str:
    """A prefix such that the names with it are, without it, exactly what a reading wants; empty if there is none."""
    groups = grouped(names, _PREFIX_DEPTH)
    return next((f"{prefix}." for prefix, rest in groups.items() if _fits(rest, readings)), "")


def _fits(names: Iterable[str], readings: list[Reading]) -> bool:
    found = dict.fromkeys(names)
    return any(reading.demands and reading.complete(found) for reading in readings if found)


def refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with problems, if there are any; several tensors may be in one file."""
    if found := list(dict.fromkeys(problems)):
        raise CheckpointError(*lines_of(found, MOST_PRINTED))
