"""Levels of a checkpoint: a trainer may save the state dict below `model` or `state_dict`, beside other entries.

Pickles have trees of mappings (`nested_levels`); safetensors files and distributed checkpoints have flat names, which
join the keys of all levels with dots (`flat_levels`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from weightswap_exporter.modules.stand_ins import first_line
from weightswap_exporter.modules.tensors import (
    is_composed,
    is_empty_state,
    is_fake,
    is_sharded,
    kind_of,
    parts_of,
    plain_bits,
)
from weightswap_runtime.errors import CheckpointError, listed, plural
from weightswap_runtime.format.names import extra_state_of, ignored_names, known_as
from weightswap_runtime.torch_tensors import DTYPE_NAMES

from .tensor import CheckpointTensor, PartOf

NESTED = "a nested tensor (torch.nested) cannot be written as safetensors"
_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
_DEPTH = 2  # of wrappers in wrappers that are searched for the weights
_MOST_DEPTH = 8  # of mappings that a user can choose
_MOST_PATHS = 4  # at which one mapping is looked at
_MOST_LISTED = 20  # mappings that an error names
NO_VALUES = "has no values (a skeleton's or a meta tensor)"


class Choice(NamedTuple):
    """User's choice of the weights in a checkpoint."""

    level: str | None = None  # dotted path of a mapping in the checkpoint, empty for its top; None to search for it
    prefix: str = ""  # of the weights' names
    ignore: tuple[str, ...] = ()  # patterns of names, with the prefix, to leave out
    kept: frozenset[str] = frozenset()  # names, without the prefix, that are not left out

    @property
    def depth(self) -> int:
        """The depth of the deepest mapping that may be the level."""
        return _DEPTH if self.level is None else min(len(self.level.split(".")), _MOST_DEPTH)

    def ignores(self, name: str) -> bool:
        is_kept = known_as(name.removeprefix(self.prefix), self.kept) is not None
        return not is_kept and any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def takes(self, name: str) -> bool:
        return name.startswith(self.prefix) and not self.ignores(name)


ANYWHERE = Choice()


class NestedStateDict(NamedTuple):
    """State dict in a checkpoint."""

    path: str  # empty for the checkpoint itself, and for example `state_dict.model` below
    tensors: dict[str, CheckpointTensor]
    problems: tuple[str, ...]  # reasons why the level's tensors cannot be packed
    content: Callable[[], Mapping[str, Any]]  # the level as its trainer saved it, with tensors loaded
    damage: Callable[[], list[str]]  # wrong checksums of all tensors in the content
    prefix: str = ""  # which the names of tensors, content and extra lack
    left_out: tuple[str, ...] = ()  # names of tensors without the prefix, and of ignored ones
    own: int = 0  # number of tensors in the level itself, without mappings in it
    extra: tuple[str, ...] = ()  # names of extra states (`Module.get_extra_state`) that are no tensors and not empty


# of a checkpoint: all paths that a user could choose, with the names of their tensors; empty if one is chosen
Mappings = Callable[[], dict[str, list[str]]]
Levels = tuple[tuple[NestedStateDict, ...], Mappings]  # those that may have the weights


def nested_levels(
    tree: Mapping[Any, Any],
    values_of: Callable[[torch.Tensor], CheckpointTensor],
    where: str,
    choice: Choice = ANYWHERE,
    *,
    deep: bool = True,
) -> Levels:
    """Return the mappings in a checkpoint that may be the state dict, or the chosen one. Raises CheckpointError.

    Entries that are no tensors are left out, but extra states are named.
    """

    def mappings() -> dict[str, list[str]]:
        return {path: list(map(str, _tensors(below))) for path, below in _mappings("", tree, _MOST_DEPTH)}

    if choice.level is None:
        trees = list(_below("", tree, _DEPTH if deep else 0))
    else:
        chosen = _walk(tree, choice.level)
        if chosen is None:
            raise _unknown(where, choice.level, mappings())
        trees = [(choice.level, chosen)]
    levels = _with_prefix([_nested(path, below, values_of, choice) for path, below in trees], choice, where)
    return levels, mappings if choice.level is None else dict


def flat_levels(
    tensors: Mapping[str, CheckpointTensor],
    where: str,
    choice: Choice = ANYWHERE,
    holders: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> Levels:
    """Return the levels of a checkpoint of tensors whose names are the keys of all levels, joined with dots.

    holders: path of the mapping that each tensor was in; None if unknown: then only the top is searched. extra: names
    of extra states that are no tensors.
    """

    def mappings() -> dict[str, list[str]]:
        return {"": list(tensors)} | _by_depth(grouped(tensors, 2)) if holders is None else _by_holder(tensors, holders)

    paths = [""]
    if choice.level is not None:
        paths = [choice.level]
    elif holders is not None:
        paths += [*_WRAPPERS, *(f"{outer}.{inner}" for outer in _WRAPPERS for inner in _WRAPPERS if inner != outer)]
    levels = []
    for path in paths:
        start = f"{path}." if path else ""
        below = {name.removeprefix(start): values for name, values in tensors.items() if name.startswith(start)}
        if below or path == "":
            own = sum((holders or {}).get(start + name, "") == path for name in below)
            states = [name.removeprefix(start) for name in extra if name.startswith(start)]
            levels.append(_flat(path, below, choice, own, states))
    if not levels:
        raise _unknown(where, paths[0], mappings())
    return _with_prefix(levels, choice, where), mappings if choice.level is None else dict


def listing(mappings: Mapping[str, Iterable[str]]) -> str:
    """Return a text such as `'model' (4 tensors), 'ema' (4 tensors)`."""
    counts = {path: len(list(names)) for path, names in mappings.items()}
    texts = [f"{path!r}{'' if path else ', the top'} ({plural(count, 'tensor')})" for path, count in counts.items()]
    return listed(texts, _MOST_LISTED)


def grouped(names: Iterable[str], most: int) -> dict[str, list[str]]:
    """Group names by their first component, their first two, and so on, and remove these from the names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(most + 1, len(parts))):
            groups.setdefault(".".join(parts[:depth]), []).append(".".join(parts[depth:]))
    return groups


def _unknown(where: str, level: str, mappings: Mapping[str, list[str]]) -> CheckpointError:
    known = {path: names for path, names in mappings.items() if names} or mappings
    return CheckpointError(
        f"{where}: has no level {level!r}; it has {listing(known)}. Give one of them, or none to have it found."
    )


def _by_depth(groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return dict(sorted(groups.items(), key=lambda group: group[0].count(".")))


def _by_holder(names: Iterable[str], holders: Mapping[str, str]) -> dict[str, list[str]]:
    """Group names by the mapping that they are in, and remove its path from the names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        path = holders[name]
        groups.setdefault(path, []).append(name.removeprefix(f"{path}.") if path else name)
    return _by_depth(groups)


def _below(path: str, tree: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield path, tree
    for key in _WRAPPERS if depth else ():
        if isinstance(below := tree.get(key), Mapping):
            yield from _below(f"{path}.{key}" if path else key, below, depth - 1)


def _mappings(
    path: str, tree: Mapping[Any, Any], depth: int, visits: Counter[int] | None = None
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield a mapping and all mappings in it, by path; each object at most at _MOST_PATHS paths.

    A small pickle can put a mapping into itself, or at a billion paths.
    """
    visits = Counter() if visits is None else visits
    visits[id(tree)] += 1
    yield path, tree
    for key, below in tree.items() if depth else ():
        if isinstance(below, Mapping) and visits[id(below)] < _MOST_PATHS:
            yield from _mappings(f"{path}.{key}" if path else str(key), below, depth - 1, visits)


def _walk(tree: Mapping[Any, Any], path: str) -> Mapping[Any, Any] | None:
    """Return the mapping at a path, or None. Keys may contain dots."""
    if not path:
        return tree
    for key, below in tree.items():
        if not isinstance(below, Mapping):
            continue
        if path == str(key):
            return below
        if path.startswith(f"{key}.") and (inner := _walk(below, path.removeprefix(f"{key}."))) is not None:
            return inner
    return None


def _with_prefix(levels: list[NestedStateDict], choice: Choice, where: str) -> tuple[NestedStateDict, ...]:
    """Return the levels with a name that has the prefix. Raises CheckpointError if there is none.

    A pattern in `choice.ignore` that matches nothing causes a warning.
    """
    names = [name for level in levels for name in (*level.left_out, *(f"{level.prefix}{key}" for key in level.tensors))]
    ignored_names(names, choice.ignore, where)
    matching = tuple(level for level in levels if level.tensors or level.problems or not level.prefix)
    if matching:
        return matching
    prefix = levels[0].prefix
    groups = _by_depth(grouped((name for level in levels for name in level.left_out), 2))
    starts = {f"{path}.": names for path, names in groups.items()}
    found = f"they begin with {listing(starts)}" if starts else "no name contains a dot"
    raise CheckpointError(f"{where}: no tensor name begins with the prefix {prefix!r}; {found}")


def _flat(
    path: str, tensors: Mapping[str, CheckpointTensor], choice: Choice, own: int, extra: Sequence[str]
) -> NestedStateDict:
    prefix = choice.prefix
    left_out = tuple(name for name in (*tensors, *extra) if not choice.takes(name))
    extra = tuple(name[len(prefix) :] for name in extra if choice.takes(name))
    below = {name[len(prefix) :]: values for name, values in tensors.items() if choice.takes(name)}

    def content() -> Mapping[str, Any]:
        return {name: values.load() for name, values in below.items()}

    def damage() -> list[str]:
        return [text for values in below.values() for text in values.problems()]

    unknown = {name: values.dtype for name, values in below.items() if values.dtype.startswith("torch.")}
    problems = tuple(f"{name}: {dtype} cannot be written as safetensors" for name, dtype in unknown.items())
    return NestedStateDict(path, below, problems, content, damage, prefix, left_out, own, extra)


def _nested(
    path: str, tree: Mapping[Any, Any], values_of: Callable[[torch.Tensor], CheckpointTensor], choice: Choice
) -> NestedStateDict:
    prefix = choice.prefix
    ignored = {key: names for key in tree if (names := _ignored(key, tree[key], choice))}
    tree = _without(tree, ignored)
    left_out = (
        *(name for names in ignored.values() for name in names),
        *(str(key) for key in (*_tensors(tree), *_extra(tree)) if not choice.takes(str(key))),
    )
    if prefix:
        names = [key for key in tree if isinstance(key, str) and key.startswith(prefix)]
        tree = {name[len(prefix) :]: tree[name] for name in names}
    nested = [f"{key}: {NESTED}" for key, value in tree.items() if isinstance(value, torch.Tensor) and value.is_nested]
    tensors = {} if nested else _tensors(tree)  # the parts of a nested tensor are not those of a quantised one
    problems = (*nested, *(text for key, value in tensors.items() for text in _problems(key, value)))
    values = {} if problems else {key: values_of(value) for key, value in tensors.items()}
    for key, part_of in _parts(tree) if values else ():
        values[key] = values[key]._replace(part_of=part_of)

    def damage() -> list[str]:
        entries = [value for _, below in _mappings("", tree, _MOST_DEPTH) for value in _tensors(below).values()]
        return [text for value in entries if not any(_problems("", value)) for text in values_of(value).problems()]

    return NestedStateDict(path, values, problems, lambda: tree, damage, prefix, left_out, len(tensors), _extra(tree))


def _ignored(key: Any, value: Any, choice: Choice) -> list[str]:
    """Return the ignored names of a tensor: its own, and those of its parts, which are only left out together."""
    if not isinstance(value, torch.Tensor):
        return [key] if extra_state_of(key) and choice.ignores(key) else []
    return [name for name in dict.fromkeys((str(key), *map(str, _separate(key, value)))) if choice.ignores(name)]


def _without(tree: Mapping[Any, Any], keys: Iterable[Any]) -> Mapping[Any, Any]:
    copied = copy(tree) if isinstance(tree, dict) else dict(tree)  # an OrderedDict may have `_metadata`
    for key in keys:
        del copied[key]
    return copied


def _tensors(tree: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return the tensors of a mapping; for composed ones, their parts."""
    tensors = ((key, value) for key, value in tree.items() if isinstance(value, torch.Tensor))
    return {name: part for key, value in tensors for name, part in _separate(key, value).items()}


def _extra(tree: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the keys of extra states that are no tensors, without those that say nothing."""
    states = ((key, value) for key, value in tree.items() if extra_state_of(key))
    return tuple(key for key, value in states if not isinstance(value, torch.Tensor) and not is_empty_state(value))


def _separate(key: Any, value: torch.Tensor) -> dict[Any, torch.Tensor]:
    """Return the parts of a tensor. Raises CheckpointError if they are none: an untrusted file can claim anything."""
    try:
        parts = parts_of(key, plain_bits(value))
        if all(isinstance(part, torch.Tensor) for part in parts.values()):
            return parts
        reason = "its parts are not tensors"
    except Exception as error:
        reason = first_line(error)
    raise CheckpointError(f"{key}: is a {type(value).__qualname__} that cannot be taken apart: {reason}")


def _parts(tree: Mapping[Any, Any]) -> Iterator[tuple[str, PartOf]]:
    for key, value in tree.items():
        if isinstance(value, torch.Tensor) and is_composed(value):
            kind = kind_of(value)
            yield from ((name, PartOf(name.removeprefix(key), kind)) for name in parts_of(key, value))


def _problems(key: object, tensor: Any) -> Iterator[str]:
    if not isinstance(key, str):
        yield f"has the key {key!r}; the keys of a state dict must be strings"
    elif is_fake(tensor):
        yield f"{key}: {NO_VALUES}"
    elif is_sharded(tensor):
        kind = type(tensor).__qualname__
        advice = "gather it (full_tensor()), or save it with torch.distributed.checkpoint"
        yield f"{key}: is a {kind}, not a plain tensor; {advice}"
    elif tensor.is_nested:
        yield f"{key}: {NESTED}"
    elif tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        yield f"{key}: {tensor.dtype} {tensor.layout} cannot be written as safetensors"
