"""Parts of a set of tensors, named by patterns of names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import msgspec

from weightswap_runtime.errors import Unsupported

from .manifest import Manifest


def patterns(given: str | Sequence[str], option: str = "only") -> tuple[str, ...]:
    """Patterns as users give them. Raises Unsupported for what is neither a text nor several."""
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not found or not all(isinstance(pattern, str) for pattern in found):
        raise Unsupported(f"{option}={given!r}: expected a pattern such as 'encoder.*', or several")
    return found


def ignored_names(names: Iterable[str], ignore: Sequence[str], where: str) -> tuple[str, ...]:
    """The names that a pattern of `ignore=` matches. A pattern that matches none is a warning."""
    found = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in ignore}
    for pattern in (pattern for pattern, matches in found.items() if not matches):
        warnings.warn(f"ignore={pattern!r}: matches no name of {where}", stacklevel=2)
    return tuple(dict.fromkeys(name for matches in found.values() for name in matches))


def select(names: Sequence[str], only: Sequence[str], where: str) -> set[str]:
    """The names that any of the patterns matches, as `fnmatch` has them (`*`, `?`, `[a-z]`; `*` also matches dots).

    Raises Unsupported for patterns that match nothing.
    """
    matched = {pattern: {name for name in names if fnmatchcase(name, pattern)} for pattern in only}
    if empty := [pattern for pattern, matches in matched.items() if not matches]:
        near = get_close_matches(empty[0], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f", which has names such as {', '.join(names[:3])}"
        raise Unsupported(f"only={', '.join(map(repr, empty))}: matches no weight of {where}{hint}")
    return set().union(*matched.values())


def part_of(manifest: Manifest, only: Sequence[str]) -> Manifest:
    """The manifest with those weights alone of which a pattern matches a name. Raises Unsupported."""
    chosen = select([name for weight in manifest.weights for name in weight.names], only, "the graph")
    weights = tuple(weight for weight in manifest.weights if not chosen.isdisjoint(weight.names))
    kept = {weight.name for weight in weights}
    sources = tuple(source for source in manifest.adapter.sources if source.weight in kept)
    adapter = msgspec.structs.replace(manifest.adapter, sources=sources)
    return msgspec.structs.replace(manifest, weights=weights, adapter=adapter)
