"""Finding each weight in a set of named tensors: under its FQN, or under a checkpoint's keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, Protocol

from .dtypes import describe
from .errors import WeightsMismatch
from .manifest import Manifest, NamedTensor


class Typed(Protocol):
    """Anything with a safetensors dtype and a shape."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Match(NamedTuple):
    """`found` maps each weight to the names that hold it: the first is read, all must hold the same bytes."""

    found: dict[str, tuple[str, ...]]
    ignored: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]


Reading = Callable[[Mapping[str, Typed], Manifest], Match]


def match_names(tensors: Mapping[str, Typed], manifest: Manifest) -> Match:
    """Match by runtime FQN. State and keys that the adapter ignores may be present."""
    wanted = {weight.name: weight.names for weight in manifest.weights}
    ignored = {name for tensor in manifest.state for name in tensor.names} | set(manifest.adapter.ignored)
    return _match(tensors, manifest.weights, wanted, ignored)


def match_keys(tensors: Mapping[str, Typed], manifest: Manifest) -> Match:
    """Match by the checkpoint keys that the adapter recorded at export."""
    wanted = {source.weight: source.keys for source in manifest.adapter.sources}
    return _match(tensors, manifest.weights, wanted, set(manifest.adapter.ignored))


NAMES = (match_names,)
KEYS_THEN_NAMES = (match_keys, match_names)
UNAMBIGUOUS = (match_names, match_keys)


def resolve(
    tensors: Mapping[str, Typed], manifest: Manifest, where: str, *, readings: Sequence[Reading] = UNAMBIGUOUS
) -> Match:
    """Choose how to read a set of tensors. Raises WeightsMismatch with every problem of the nearest reading.

    The first of `readings` that fits is taken. With UNAMBIGUOUS a set that fits both ways, with different weights as
    the result, is refused: nothing in it can tell which is meant.
    """
    matches = [reading(tensors, manifest) for reading in readings]
    fitting = [match for match in matches if not match.problems]
    if readings is UNAMBIGUOUS and len(fitting) == 2 and _differ(*fitting):
        raise WeightsMismatch(
            where,
            ["its tensors fit both as runtime names and as checkpoint keys, with different results"],
            "Pack the checkpoint with weightswap pack: a weight file says which it is.",
        )
    if fitting:
        return fitting[0]
    nearest = min(matches, key=lambda match: len(match.problems))
    raise WeightsMismatch(where, nearest.problems, _advice(nearest, tensors, manifest))


def _advice(match: Match, tensors: Mapping[str, Typed], manifest: Manifest) -> str:
    shapes = {weight.name: weight.shape for weight in manifest.weights}
    only_dtypes = not match.unexpected and all(
        keys and all(tuple(tensors[key].shape) == shapes[name] for key in keys) for name, keys in match.found.items()
    )
    if only_dtypes:
        return "Only the dtypes differ: convert the checkpoint, or export the model in the checkpoint's dtype."
    return "Give a checkpoint of the architecture that was exported, or export the architecture of this one."


def _differ(one: Match, other: Match) -> bool:
    return any(keys[0] not in other.found[weight] for weight, keys in one.found.items())


def _match(
    tensors: Mapping[str, Typed],
    weights: Sequence[NamedTensor],
    wanted: Mapping[str, tuple[str, ...]],
    ignored: Collection[str],
) -> Match:
    found = {name: tuple(key for key in keys if key in tensors) for name, keys in wanted.items()}
    used = {key for keys in found.values() for key in keys}
    extra = [key for key in tensors if key not in used]
    unexpected = {key: tensors[key] for key in extra if key not in ignored}
    missing = {keys[0]: weight for weight in weights if not found[weight.name] and (keys := wanted[weight.name])}
    problems = []
    for weight in weights:
        keys = found[weight.name]
        if not keys:
            problems.append(_missing(wanted[weight.name], weight, unexpected))
        problems += [
            f"{key}: expected {describe(weight.dtype, weight.shape)}, "
            f"found {describe(tensors[key].dtype, tensors[key].shape)}"
            for key in keys
            if (tensors[key].dtype, tuple(tensors[key].shape)) != (weight.dtype, weight.shape)
        ]
    problems += [f"{key}: unexpected{_suggest(key, tensor, missing)}" for key, tensor in unexpected.items()]
    return Match(found, tuple(key for key in extra if key in ignored), tuple(unexpected), tuple(problems))


def _missing(keys: tuple[str, ...], weight: NamedTensor, unexpected: Mapping[str, Typed]) -> str:
    if not keys:
        return f"{weight.name}: no checkpoint key gives it without a value transform"
    expected = describe(weight.dtype, weight.shape)
    return f"{' or '.join(keys)}: missing, {expected}{_suggest(keys[0], weight, unexpected)}"


def _suggest(name: str, tensor: Typed, candidates: Mapping[str, Typed]) -> str:
    """The nearest name of a tensor of the same shape."""
    # difflib is quadratic in the number of names: a wholly foreign file needs no suggestions
    if len(candidates) > 500:
        return ""
    fitting = [other for other, typed in candidates.items() if tuple(typed.shape) == tuple(tensor.shape)]
    near = get_close_matches(name, fitting, n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""
