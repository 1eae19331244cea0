"""The levels of a checkpoint: a trainer may save the state dict below `model` or `state_dict`, beside other things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from weightswap_exporter.models.parts import is_composed, is_sharded, kind_of, parts_of
from weightswap_exporter.models.tensors import is_fake
from weightswap_exporter.models.user_errors import first_line
from weightswap_runtime.errors import CheckpointError
from weightswap_runtime.format.name_patterns import ignored_names
from weightswap_runtime.messages import listed, plural
from weightswap_runtime.tensors.torch_tensors import DTYPE_NAMES

from .tensor import CheckpointTensor, PartOf

WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
DEPTH = 2
MOST_DEPTH = 8
MOST_PATHS = 4
MOST_LISTED = 20
NO_VALUES = "has no values (a skeleton's or a meta tensor)"


class Choice(NamedTuple):
    """What the user has said about where the weights are.

    level: a dotted path of mappings in the checkpoint, empty for its top; None to look for it. prefix: what the names
    of the weights begin with. ignore: patterns of names, before the prefix is taken away, that are left out.
    """

    level: str | None = None
    prefix: str = ""
    ignore: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def takes(self, name: str) -> bool:
        return name.startswith(self.prefix) and not self.ignores(name)


class NestedStateDict(NamedTuple):
    """A state dict in a checkpoint. `path` is empty for the checkpoint itself, `model` or `state_dict.model` below.

    problems: what keeps the level's tensors from being packed. own: how many tensors are in the level itself, not in a
    mapping in it. content: the level as its trainer saved it, tensors
    loaded. damage: what is wrong with the values of all tensors in the content, as far as check sums tell. The names
    of tensors and content lack `prefix`; left_out: the tensors that do not have it, and those that are ignored.
    """

    path: str
    tensors: dict[str, CheckpointTensor]
    problems: tuple[str, ...]
    content: Callable[[], Mapping[str, Any]]
    damage: Callable[[], list[str]]
    prefix: str = ""
    left_out: tuple[str, ...] = ()
    own: int = 0


ANYWHERE = Choice()


Mappings = Callable[[], dict[str, list[str]]]


class Levels(NamedTuple):
    """The levels that may be meant.

    mappings: everything that could be named as a level -> the names of its tensors; empty once a level is named.
    """

    likely: tuple[NestedStateDict, ...]
    mappings: Mappings


def nested_levels(
    tree: Mapping[Any, Any],
    values_of: Callable[[torch.Tensor], CheckpointTensor],
    where: str,
    choice: Choice = ANYWHERE,
    *,
    deep: bool = True,
) -> Levels:
    """A mapping and the mappings in it that may be the state dict, or the chosen one. Raises CheckpointError.

    Entries that are no tensors are left out.
    """

    def mappings() -> dict[str, list[str]]:
        return {path: list(map(str, _tensors(below))) for path, below in _mappings("", tree, MOST_DEPTH)}

    if choice.level is None:
        trees = list(_below("", tree, DEPTH if deep else 0))
    else:
        chosen = _walk(tree, choice.level)
        if chosen is None:
            raise _unknown(where, choice.level, mappings())
        trees = [(choice.level, chosen)]
    levels = _as_chosen([_nested(path, below, values_of, choice) for path, below in trees], choice, where)
    return Levels(levels, mappings if choice.level is None else dict)


def flat_levels(
    tensors: Mapping[str, CheckpointTensor],
    where: str,
    choice: Choice = ANYWHERE,
    holders: Mapping[str, str] | None = None,
) -> Levels:
    """The same for tensors whose names hold the keys of every level, joined with dots.

    holders: the path of the mapping that each tensor was in; None where all are in the top, as far as is known: no
    other level is then looked for.
    """

    def mappings() -> dict[str, list[str]]:
        return {"": list(tensors)} | _by_depth(grouped(tensors, 2)) if holders is None else _held(tensors, holders)

    paths = [""]
    if choice.level is not None:
        paths = [choice.level]
    elif holders is not None:
        paths += [*WRAPPERS, *(f"{outer}.{inner}" for outer in WRAPPERS for inner in WRAPPERS if inner != outer)]
    levels = []
    for path in paths:
        start = f"{path}." if path else ""
        below = {name.removeprefix(start): values for name, values in tensors.items() if name.startswith(start)}
        if below or path == "":
            own = sum((holders or {}).get(start + name, "") == path for name in below)
            levels.append(_flat(path, below, choice, own))
    if not levels:
        raise _unknown(where, paths[0], mappings())
    return Levels(_as_chosen(levels, choice, where), mappings if choice.level is None else dict)


def listing(mappings: Mapping[str, Iterable[str]]) -> str:
    """`'model' (4 tensors), 'ema' (4 tensors)`."""
    counts = {path: len(list(names)) for path, names in mappings.items()}
    texts = [f"{path!r}{'' if path else ', the top'} ({plural(count, 'tensor')})" for path, count in counts.items()]
    return listed(texts, MOST_LISTED)


def _unknown(where: str, level: str, mappings: Mapping[str, list[str]]) -> CheckpointError:
    found = {path: names for path, names in mappings.items() if names} or mappings
    return CheckpointError(
        f"{where}: has no level {level!r}; it has {listing(found)}. Give one of them, or no level to have it found."
    )


def grouped(names: Iterable[str], most: int) -> dict[str, list[str]]:
    """Names by their first component, by their first two, and so on, without these."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(most + 1, len(parts))):
            groups.setdefault(".".join(parts[:depth]), []).append(".".join(parts[depth:]))
    return groups


def _by_depth(groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return dict(sorted(groups.items(), key=lambda group: group[0].count(".")))


def _held(names: Iterable[str], holders: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by the mapping that they are in, without its path."""
    held: dict[str, list[str]] = {}
    for name in names:
        path = holders[name]
        held.setdefault(path, []).append(name.removeprefix(f"{path}.") if path else name)
    return _by_depth(held)


def _below(path: str, tree: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield path, tree
    for key in WRAPPERS if depth else ():
        if isinstance(below := tree.get(key), Mapping):
            yield from _below(f"{path}.{key}" if path else key, below, depth - 1)


def _mappings(
    path: str, tree: Mapping[Any, Any], depth: int, met: Counter[int] | None = None
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """A mapping and all the mappings in it, by their paths; one that is at many paths, at the first MOST_PATHS.

    A small pickle can put a mapping into itself, or at a billion paths.
    """
    met = Counter() if met is None else met
    met[id(tree)] += 1
    yield path, tree
    for key, below in tree.items() if depth else ():
        if isinstance(below, Mapping) and met[id(below)] < MOST_PATHS:
            yield from _mappings(f"{path}.{key}" if path else str(key), below, depth - 1, met)


def _walk(tree: Mapping[Any, Any], path: str) -> Mapping[Any, Any] | None:
    """The mapping at a path. Keys may have dots in them."""
    if not path:
        return tree
    for key, below in tree.items():
        if not isinstance(below, Mapping):
            continue
        if path == str(key):
            return below
        if path.startswith(f"{key}.") and (found := _walk(below, path.removeprefix(f"{key}."))) is not None:
            return found
    return None


def _as_chosen(levels: list[NestedStateDict], choice: Choice, where: str) -> tuple[NestedStateDict, ...]:
    """The levels in which a name has the prefix. Raises CheckpointError if there is none.

    A pattern of what is ignored that matches nothing is a warning.
    """
    ignored_names([name for level in levels for name in level.left_out], choice.ignore, where)
    found = tuple(level for level in levels if level.tensors or level.problems or not level.prefix)
    if found:
        return found
    prefix = levels[0].prefix
    groups = _by_depth(grouped((name for level in levels for name in level.left_out), 2))
    starts = {f"{path}.": names for path, names in groups.items()}
    names = f"they begin with {listing(starts)}" if starts else "no name has a dot in it"
    raise CheckpointError(f"{where}: no tensor's name begins with the prefix {prefix!r}; {names}")


def _nested(
    path: str, tree: Mapping[Any, Any], values_of: Callable[[torch.Tensor], CheckpointTensor], choice: Choice
) -> NestedStateDict:
    prefix = choice.prefix
    ignored = {key: names for key in tree if (names := _ignored(key, tree[key], choice))}
    tree = _without(tree, ignored)
    left_out = (
        *(name for names in ignored.values() for name in names),
        *(str(key) for key in _tensors(tree) if not choice.takes(str(key))),
    )
    if prefix:
        names = [key for key in tree if isinstance(key, str) and key.startswith(prefix)]
        tree = {name[len(prefix) :]: tree[name] for name in names}
    tensors = _tensors(tree)
    problems = tuple(text for key, value in tensors.items() for text in _problems(key, value))
    values = {} if problems else {key: values_of(value) for key, value in tensors.items()}
    for key, part_of in _parts(tree) if values else ():
        values[key] = values[key]._replace(part_of=part_of)

    def damage() -> list[str]:
        found = [value for _, below in _mappings("", tree, MOST_DEPTH) for value in _tensors(below).items()]
        return [text for key, value in found if not any(_problems("", value)) for text in values_of(value).problems()]

    return NestedStateDict(path, values, problems, lambda: tree, damage, prefix, left_out, len(tensors))


def _ignored(key: Any, value: Any, choice: Choice) -> list[str]:
    """The names under which a tensor is left out: its own, or those of its parts, which go together."""
    if not isinstance(value, torch.Tensor):
        return []
    return [name for name in dict.fromkeys((str(key), *map(str, _separate(key, value)))) if choice.ignores(name)]


def _without(tree: Mapping[Any, Any], keys: Iterable[Any]) -> Mapping[Any, Any]:
    kept = copy(tree) if isinstance(tree, dict) else dict(tree)  # an OrderedDict may have `_metadata`
    for key in keys:
        del kept[key]
    return kept


def _flat(path: str, tensors: Mapping[str, CheckpointTensor], choice: Choice, own: int) -> NestedStateDict:
    prefix = choice.prefix
    left_out = tuple(name for name in tensors if not choice.takes(name))
    below = {name[len(prefix) :]: values for name, values in tensors.items() if choice.takes(name)}

    def content() -> Mapping[str, Any]:
        return {name: values.load() for name, values in below.items()}

    def damage() -> list[str]:
        return [text for values in below.values() for text in values.problems()]

    unknown = {name: values.dtype for name, values in below.items() if values.dtype.startswith("torch.")}
    problems = tuple(f"{name}: {dtype} cannot be written as safetensors" for name, dtype in unknown.items())
    return NestedStateDict(path, below, problems, content, damage, prefix, left_out, own)


def _tensors(tree: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Of a tensor that is made of others, its parts."""
    found = ((key, value) for key, value in tree.items() if isinstance(value, torch.Tensor))
    return {name: part for key, value in found for name, part in _separate(key, value).items()}


def _separate(key: Any, value: torch.Tensor) -> dict[Any, torch.Tensor]:
    """What a file says of such a tensor can be anything. Raises CheckpointError."""
    try:
        parts = parts_of(key, value)
        if all(isinstance(part, torch.Tensor) for part in parts.values()):
            return parts
        reason = "its parts are no tensors"
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
        yield f"has the key {key!r}; the keys of a state dict are texts"
    elif is_fake(tensor):
        yield f"{key}: {NO_VALUES}"
    elif is_sharded(tensor):
        kind = type(tensor).__qualname__
        advice = "gather it (full_tensor()), or save it with torch.distributed.checkpoint"
        yield f"{key}: is a {kind}, not a plain tensor; {advice}"
    elif tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        yield f"{key}: {tensor.dtype} {tensor.layout} cannot be written as safetensors"
