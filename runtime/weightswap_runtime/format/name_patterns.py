"""Patterns of names, which select a part of a set of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import msgspec

from weightswap_runtime.errors import Unsupported

from .manifest import Manifest
from .name_matching import is_among


def patterns(value: str | Sequence[str], option: str = "only") -> tuple[str, ...]:
    """Return the patterns in a user's value of an option. Raises Unsupported if it is not one or more strings."""
    result = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not result or not all(isinstance(pattern, str) for pattern in result):
        raise Unsupported(f"{option}={value!r}: expected a pattern such as 'encoder.*', or several")
    return result


def ignored_names(
    names: Iterable[str], ignore: Sequence[str], where: str, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names that any pattern of `ignore=` matches. Warn about each pattern that matches none.

    kept: names that no pattern hides: which of several unlike values for one tensor is meant, it cannot say.
    """
    matched = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in ignore}
    for pattern in (pattern for pattern, matches in matched.items() if not matches):
        warnings.warn(f"ignore={pattern!r}: matches no name of {where}", stacklevel=2)
    return tuple(dict.fromkeys(name for matches in matched.values() for name in matches if not is_among(name, kept)))


def select(names: Sequence[str], only: Sequence[str], where: str) -> set[str]:
    """Return the names that match any of the patterns, in fnmatch's syntax (`*`, `?`, `[a-z]`; `*` also matches dots).

    Raises Unsupported for patterns that match nothing.
    """
    matched = {pattern: {name for name in names if fnmatchcase(name, pattern)} for pattern in only}
    if empty := [pattern for pattern, matches in matched.items() if not matches]:
        near = get_close_matches(empty[0], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f", which has names such as {', '.join(names[:3])}"
        raise Unsupported(f"only={', '.join(map(repr, empty))}: matches no weight of {where}{hint}")
    return set().union(*matched.values())


def check_whole(manifest: Manifest, only: Sequence[str], composed: Iterable[str]) -> None:
    """Raise Unsupported if patterns take some of a tensor's parts. composed: FQNs of tensors that are made of others.

    The parts of a quantised tensor have no meaning without each other, such as integers with another file's scales.
    """
    for fqn in composed if only else ():
        parts = [
            weight.names for weight in manifest.weights if any(name.startswith(f"{fqn}.") for name in weight.names)
        ]
        taken = [any(fnmatchcase(name, pattern) for name in names for pattern in only) for names in parts]
        if any(taken) and not all(taken):
            left = parts[taken.index(False)][0]
            raise Unsupported(
                f"only={', '.join(map(repr, only))}: takes a part of {fqn} without {left}; take '{fqn}.*'"
            )


def part_of(manifest: Manifest, only: Sequence[str]) -> Manifest:
    """Return the manifest with only the weights that have a matching name. Raises Unsupported."""
    chosen = select([name for weight in manifest.weights for name in weight.names], only, "the graph")
    weights = tuple(weight for weight in manifest.weights if not chosen.isdisjoint(weight.names))
    kept = {weight.name for weight in weights}
    sources = tuple(source for source in manifest.adapter.sources if source.weight in kept)
    adapter = msgspec.structs.replace(manifest.adapter, sources=sources)
    return msgspec.structs.replace(manifest, weights=weights, adapter=adapter)
