"""Which tensor of a set is which weight: names as FQNs or as a checkpoint's keys, and patterns of names.

A set without weightswap's stamp may be either: a state dict whose loading renames nothing looks like runtime names. So
names are matched by one or more *readings*; the first that fits is taken, and if none does, the error has the problems
of the nearest one. docs/checkpoints.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from weightswap_runtime.errors import MOST_PRINTED, Unsupported, WeightsMismatch, listed, warn
from weightswap_runtime.tensors import DTYPES, FLOATING, Typed, describe, same_type

from .manifest import Manifest, NamedTensor
from .weight_set import shard_advice

# What torch.compile, activation checkpointing, FSDP, and (Distributed)DataParallel put into names. The last is tried
# last, as models have parts of that name, too.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
EXTRA_STATE = "_extra_state"  # the key of `Module.get_extra_state`
NESTING = ("state_dict", "model")  # keys under which trainers keep a model's tensors
_MOST_PAIRS = 10_000  # of names to compare for hints, each in some tenths of a millisecond
_PEFT = re.compile(r"^base_model\.model\.|\.(lora|ia3|oft|vera)_\w+\.|\.base_layer\.")

Keys = Literal["checkpoint", "fqn"]


class Match(NamedTuple):
    """Names of the weights in a set of tensors, and the problems."""

    found: dict[str, tuple[str, ...]]  # weight that is copied -> names that hold it; all must hold the same bytes
    computed: dict[str, dict[str, str]]  # weight that the conversion computes -> its inputs: checkpoint key -> name
    ignored: tuple[str, ...]
    problems: tuple[str, ...]
    advice: str  # what to do about the problems


class Demand(NamedTuple):
    """What a reading needs for one weight."""

    weight: NamedTensor
    keys: dict[str, Typed]  # with the type that each must have
    all: bool = False  # all keys are needed; otherwise any of them


class Reading(NamedTuple):
    """Way to interpret the names of a set of tensors."""

    demands: tuple[Demand, ...]
    ignored: frozenset[str]  # names that may be present
    needed: tuple[str, ...] = ()  # names that must be present, though they are not read
    part: bool = False  # any other names may be present, too

    def complete(self, names: Collection[str]) -> bool:
        """Return True if the names are exactly the demanded ones, whatever the tensors' types."""
        demanded = {key for demand in self.demands for key in demand.keys}
        return (
            all(self.part or name in demanded or name in self.ignored for name in names)
            and all((all if demand.all else any)(key in names for key in demand.keys) for demand in self.demands)
            and all(name in names for name in self.needed)
        )

    def match(self, tensors: Mapping[str, Typed]) -> Match:
        """Find every weight, and collect every problem."""
        present = {demand.weight.name: tuple(key for key in demand.keys if key in tensors) for demand in self.demands}
        used = {key for keys in present.values() for key in keys}
        extra = [key for key in tensors if key not in used]
        # an empty extra state says nothing
        ignored = [key for key in extra if key in self.ignored or (0 in tensors[key].shape and extra_state_of(key))]
        others = set(extra).difference(ignored)
        unexpected = {key: tensors[key] for key in extra if key in others and not self.part}
        missing = {key: typed for demand in self.demands for key, typed in _missing(demand, tensors).items()}
        lacking = [name for name in self.needed if name not in tensors]
        hints = _suggestions(missing, unexpected)
        problems = _interleaved(
            [text for demand in self.demands for text in _problems(demand, tensors, hints)],
            [f"{key}: unexpected{hints.get(key, '')}" for key in unexpected],
        )
        problems += [f"{name}: missing; the loading code checks whether it is present" for name in lacking]
        all_names_fit = not (missing or unexpected or lacking)
        return Match(
            found={demand.weight.name: present[demand.weight.name] for demand in self.demands if not demand.all},
            computed={demand.weight.name: {key: key for key in demand.keys} for demand in self.demands if demand.all},
            ignored=tuple(ignored),
            problems=tuple(dict.fromkeys(problems)),  # several weights may be computed from one tensor
            advice=self._advice(tensors, problems, unexpected, all_names_fit) if problems else "",
        )

    def _advice(
        self, tensors: Mapping[str, Typed], problems: Sequence[str], unexpected: Collection[str], all_names_fit: bool
    ) -> str:
        if unknown := self._without_keys(tensors):
            return unknown
        expected = [item for demand in self.demands for item in demand.keys.items() if item[0] in tensors]
        if all_names_fit and all(tuple(tensors[key].shape) == tuple(typed.shape) for key, typed in expected):
            return _dtype_advice([(typed.dtype, tensors[key].dtype) for key, typed in expected])
        if len(problems) == len(unexpected) and all(map(extra_state_of, unexpected)):
            return (
                f"Its trainer has saved more than tensors, such as {min(unexpected)}, which the exported model does "
                "not have and which may change outputs. If they do not matter, leave them out: "
                'ignore="*_extra_state*".'
            )
        more = ""
        if len(problems) == len(unexpected):
            more = (
                "It has every weight, and more. If outputs do not depend on these, as on buffers that an older version "
                f"of the model has saved, leave them out: ignore={min(unexpected)!r}. If they do: "
            )
        return (
            f"{more}Give a checkpoint of the exported architecture. For another form that the model's own code loads, "
            "export with checkpoint=, which says what checkpoints look like, or pack it with the model (weightswap "
            "pack --recipe, pack(model=...))."
        )

    def _without_keys(self, tensors: Collection[str]) -> str:
        """Return the advice for weights that no checkpoint key provides and no tensor has; otherwise an empty text."""
        unknown = [
            demand.weight.name
            for demand in self.demands
            if not demand.keys and not set(demand.weight.names) & set(tensors)
        ]
        return (
            ""
            if not unknown
            else (
                f"No checkpoint key provides {listed(unknown)}: on the build side, load the checkpoint into "
                "the model and pack the model (weightswap pack --recipe, pack(model=...))."
            )
        )


def by_fqn(manifest: Manifest) -> Reading:
    """Return the reading in which names are runtime FQNs. State, variants and ignored keys may be present."""
    demands = tuple(Demand(weight, dict.fromkeys(weight.names, weight)) for weight in manifest.weights)
    others = {name for tensor in (*manifest.state, *manifest.variable) for name in tensor.names}
    return Reading(demands, frozenset(others | set(manifest.conversion.ignored)))


def _by_assumed_fqn(manifest: Manifest) -> Reading:
    """Return the FQN reading for a file without a stamp; keys that the loading code needs must be present, too."""
    return by_fqn(manifest)._replace(needed=manifest.conversion.needed)


def by_key(manifest: Manifest) -> Reading:
    """Return the reading in which names are the checkpoint's keys, as the conversion recorded them at export."""
    weights = {weight.name: weight for weight in manifest.weights}
    inputs = {item.name: item for item in manifest.conversion.inputs if item.kind == "key"}
    demands = []
    for source in manifest.conversion.sources:
        weight = weights[source.weight]
        computed = source.transform is not None
        keys: dict[str, Typed] = {key: inputs[key] if computed else weight for key in source.keys}
        demands.append(Demand(weight, keys, all=computed))
    return Reading(tuple(demands), frozenset(manifest.conversion.ignored), manifest.conversion.needed)


Readings = tuple[Callable[[Manifest], Reading], ...]
NAMES: Readings = (by_fqn,)
KEYS: Readings = (by_key,)
KEYS_THEN_NAMES: Readings = (by_key, _by_assumed_fqn)
UNAMBIGUOUS: Readings = (_by_assumed_fqn, by_key)


def resolve(
    tensors: Mapping[str, Typed],
    manifest: Manifest,
    where: str,
    *,
    readings: Readings = UNAMBIGUOUS,
    whole: Manifest | None = None,
    advice: str = "",
) -> Match:
    """Match a set of tensors by the first reading that fits.

    whole: the manifest of which `manifest` has a part of the weights; unknown names are no problem then. advice: what
    to do if none fits, where the set knows better (`WeightSet.advice`).
    If no reading fits, the names are tried without the prefixes that wrappers add, and accepted if they are exactly
    those that a reading demands. With UNAMBIGUOUS, a set that fits both readings with different weights as the result
    is refused, because nothing in it tells which one is meant.

    Raises WeightsMismatch with every problem of the reading with the fewest problems.
    """
    if by_key in readings and (reason := _unreadable(tensors, manifest)):
        advice = "Pack it on the build side, with the model (weightswap pack --recipe, pack(model=...))."
        raise WeightsMismatch(where, [reason], advice)
    wanted = [reading(manifest)._replace(part=whole is not None) for reading in readings]
    matches = _matches(tensors, wanted)
    fitting = [match for match in matches if not match.problems]
    if whole is not None and fitting:
        _check_one_meaning(tensors, fitting[0], [reading(whole) for reading in readings], where)
    if readings is UNAMBIGUOUS and len(fitting) == 2 and _differ(*fitting):
        raise WeightsMismatch(
            where,
            ["its tensors fit both as runtime names and as checkpoint keys, and the results may differ"],
            'keys="checkpoint" loads it as the model loads its state dicts, and so does pack. keys="fqn" takes the '
            "values as they are: choose it only for those of named_parameters() and named_buffers().",
        )
    if fitting:
        return fitting[0]
    nearest = min(matches, key=lambda match: len(match.problems))
    demanded = [key for reading in wanted for demand in reading.demands for key in demand.keys]
    # also where the names are nearest, whose reading cannot tell that no checkpoint has the weight
    unknown = by_key(manifest)._without_keys(tensors) if by_key in readings else ""
    advice = _peft_advice(tensors, demanded) or advice or shard_advice(where) or unknown or nearest.advice
    raise WeightsMismatch(where, nearest.problems, advice)


def _unreadable(names: Collection[str], manifest: Manifest) -> str:
    """Return why checkpoints cannot be read as the model loads them; an empty text if they can."""
    conversion = manifest.conversion
    if conversion.untraceable:
        return f"how a checkpoint becomes weights could not be recorded at export: {conversion.untraceable}"
    unloaded = {source.weight for source in conversion.sources if not source.keys}
    ignored = [
        name
        for weight in manifest.weights
        if weight.name in unloaded
        for name in weight.names
        if name in names and name in conversion.ignored
    ]
    return f"the model's loading code does not take {listed(ignored)} from a checkpoint" if ignored else ""


def _check_one_meaning(names: Collection[str], match: Match, whole: Sequence[Reading], where: str) -> None:
    """Raise WeightsMismatch if a name that a part is read from also means another weight, without other prefixes.

    A full set has one meaning: that in which nothing is missing or left.
    """
    known = {key for reading in whole for demand in reading.demands for key in demand.keys}
    used = {name for several in match.found.values() for name in several}
    used |= {name for inputs in match.computed.values() for name in inputs.values()}
    meanings: dict[str, set[str]] = {name: {name} & known for name in used}
    if all(meanings.values()):
        return
    for stripped in _strippings(names):
        for plain, name in stripped.items():
            if name in used and plain in known:
                meanings[name].add(plain)
    if several := {name: found for name, found in meanings.items() if len(found) > 1}:
        problems = [f"{name}: may be {' or '.join(sorted(found))}" for name, found in several.items()]
        raise WeightsMismatch(where, problems, "Give the names that the model has, without what wrappers add.")


def _matches(tensors: Mapping[str, Typed], readings: Sequence[Reading]) -> list[Match]:
    if not any(reading.complete(tensors) for reading in readings):
        for names in _strippings(tensors):
            if complete := [reading for reading in readings if reading.complete(names)]:
                stripped = {name: tensors[original] for name, original in names.items()}
                return [_with_names(reading.match(stripped), names) for reading in complete]
    return [reading.match(tensors) for reading in readings]


def _strippings(names: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield maps from stripped names, without the parts that wrappers and containers add, to the original ones."""
    nested = [name.split(".") for name in names]
    while nested:
        for wrappers in (WRAPPERS[:-1], WRAPPERS):
            plain = [".".join(part for part in parts if part not in wrappers) for parts in nested]
            if len(set(plain)) == len(plain):
                yield dict(zip(plain, names, strict=True))
        first = {parts[0] for parts in nested}
        if len(first) > 1 or not first <= {*NESTING, *WRAPPERS} or any(len(parts) == 1 for parts in nested):
            return
        nested = [parts[1:] for parts in nested]
        yield dict(zip(map(".".join, nested), names, strict=True))


def _with_names(match: Match, names: Mapping[str, str]) -> Match:
    """Translate a match of stripped names back to the names of the set."""
    return match._replace(
        found={weight: tuple(names[key] for key in keys) for weight, keys in match.found.items()},
        computed={weight: {key: names[key] for key in keys} for weight, keys in match.computed.items()},
        ignored=tuple(names[key] for key in match.ignored),
    )


def _differ(one: Match, other: Match) -> bool:
    return bool(one.computed or other.computed) or any(
        keys[0] not in other.found[weight] for weight, keys in one.found.items()
    )


def _missing(demand: Demand, tensors: Mapping[str, Typed]) -> dict[str, Typed]:
    absent = {key: typed for key, typed in demand.keys.items() if key not in tensors}
    return absent if demand.all or len(absent) == len(demand.keys) else {}


def _problems(demand: Demand, tensors: Mapping[str, Typed], hints: Mapping[str, str]) -> Iterator[str]:
    if not demand.keys:
        yield f"{demand.weight.name}: the conversion has no checkpoint key for it"
    absent = _missing(demand, tensors)
    if demand.all:
        yield from (f"{key}: missing, {describe(typed)}{hints.get(key, '')}" for key, typed in absent.items())
    elif absent:
        first = next(iter(absent))
        yield f"{' or '.join(absent)}: missing, {describe(absent[first])}{hints.get(first, '')}"
    for key, typed in demand.keys.items():
        if key in tensors and not same_type(tensors[key], typed):
            yield f"{key}: expected {describe(typed)}, found {describe(tensors[key])}"


def _dtype_advice(pairs: Iterable[tuple[str, str]]) -> str:
    """Return what to do about expected and found dtypes: packing casts floats alone, and to one dtype."""
    differing = {(wanted, found) for wanted, found in pairs if wanted != found}
    wanted_dtypes = {wanted for wanted, _ in differing}
    if len(wanted_dtypes) == 1 and FLOATING.issuperset(chain.from_iterable(differing)):
        name = DTYPES[wanted_dtypes.pop()].torch
        return (
            f"Only the dtypes differ: cast when packing (weightswap pack --dtype {name}, pack(dtype={name!r})), cast "
            "tensors before they are given, or export the model in the checkpoint's dtype."
        )
    return (
        "Only the dtypes differ, but packing casts floating-point tensors alone, and to one dtype: save the checkpoint "
        "in the expected dtypes, or export the model in the checkpoint's."
    )


def _suggestions(missing: Mapping[str, Typed], unexpected: Mapping[str, Typed]) -> dict[str, str]:
    """Return hints for pairs of missing and unexpected names that are each other's nearest of their shape."""
    if len(missing) * len(unexpected) > _MOST_PAIRS:  # a wholly foreign file needs no suggestions
        return {}
    nearest_unexpected = {key: _nearest(key, typed, unexpected) for key, typed in missing.items()}
    nearest_missing = {key: _nearest(key, typed, missing) for key, typed in unexpected.items()}
    pairs = [
        (key, near) for key, near in nearest_unexpected.items() if near is not None and nearest_missing[near] == key
    ]
    return {one: f" (did you mean {other}?)" for pair in pairs for one, other in (pair, pair[::-1])}


def _nearest(name: str, tensor: Typed, candidates: Mapping[str, Typed]) -> str | None:
    fitting = [other for other, typed in candidates.items() if tuple(typed.shape) == tuple(tensor.shape)]
    return next(iter(get_close_matches(name, fitting, n=1, cutoff=0.8)), None)


def _interleaved(missing: list[str], unexpected: list[str]) -> list[str]:
    """Order problems so that the first ones, which are printed, are of both kinds."""
    first = MOST_PRINTED - min(MOST_PRINTED // 2, len(unexpected))
    return missing[:first] + unexpected[: MOST_PRINTED - first] + missing[first:] + unexpected[MOST_PRINTED - first :]


def _peft_advice(names: Collection[str], demanded: Collection[str]) -> str:
    name = next(filter(_PEFT.search, names), None)
    if name is None or any(map(_PEFT.search, demanded)):
        return ""
    return (
        f"It has names of PEFT adapters, such as {name}, but the graph has none: merge the adapter into the model "
        "first (model.merge_and_unload()), and save or pack that; or export the model with its adapter."
    )


def tied_names(manifest: Manifest) -> frozenset[str]:
    """Return the names and keys of which a file may have several for one tensor, whose values must then be equal."""
    names = (weight.names for weight in manifest.weights)
    keys = (source.keys for source in manifest.conversion.sources if source.transform is None)
    return frozenset(name for several in chain(names, keys) if len(several) > 1 for name in several)


def extra_state_of(name: object) -> str:
    """Return the extra state (`Module.get_extra_state`) that a name is of, or the empty string."""
    parts = name.split(".") if isinstance(name, str) else []
    place = next((index for index, part in enumerate(parts) if part.startswith(EXTRA_STATE)), None)
    return "" if place is None else ".".join(parts[: place + 1])


def known_as(name: str, known: Collection[str]) -> str | None:
    """Return the known name that this one is, perhaps without what wrappers and containers add; None for others."""
    for wrappers in ((), WRAPPERS[:-1], WRAPPERS):
        parts = [part for part in name.split(".") if part not in wrappers]
        while ".".join(parts) not in known and parts and parts[0] in NESTING:
            parts = parts[1:]
        if (found := ".".join(parts)) in known:
            return found
    return None


def patterns(value: str | Sequence[str], option: str = "only") -> tuple[str, ...]:
    """Return the patterns in a user's value of an option. Raises Unsupported if it is not one or more strings."""
    result = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not result or not all(isinstance(pattern, str) for pattern in result):
        raise Unsupported(f"{option}={value!r}: expected a pattern such as 'encoder.*', or several")
    return result


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


def part_of(manifest: Manifest, only: Sequence[str]) -> Manifest:
    """Return the manifest with only the weights that have a matching name. Raises Unsupported."""
    chosen = select([name for weight in manifest.weights for name in weight.names], only, "the graph")
    weights = tuple(weight for weight in manifest.weights if not chosen.isdisjoint(weight.names))
    kept = {weight.name for weight in weights}
    sources = tuple(source for source in manifest.conversion.sources if source.weight in kept)
    conversion = msgspec.structs.replace(manifest.conversion, sources=sources)
    return msgspec.structs.replace(manifest, weights=weights, conversion=conversion)


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


def ignored_names(
    names: Iterable[str], ignore: Sequence[str], where: str, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names that any pattern of `ignore=` matches. Warn about each pattern that matches none.

    kept: names that no pattern hides: which of several unlike values for one tensor is meant, it cannot say.
    """
    matched = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in ignore}
    for pattern in (pattern for pattern, matches in matched.items() if not matches):
        warn(f"ignore={pattern!r}: matches no name of {where}")
    found = dict.fromkeys(name for matches in matched.values() for name in matches)
    return tuple(name for name in found if known_as(name, kept) is None)
