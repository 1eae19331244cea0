"""PEFT directories with LoRA: the mapping from tensors of the file to those of a graph, with their factors.

A graph has room for one rank and no factor. A lower rank is padded with zeros, and the factor, which PEFT takes from
the configuration, is multiplied into B. https://huggingface.co/docs/peft/developer_guides/checkpoint

Whether a file is whole follows from the configuration alone: the modules that it targets are found as PEFT finds them,
by names, their ends, and regular expressions. Those are a stranger's, so what may take forever is refused.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

from weightswap_runtime.decoding import converted, from_json
from weightswap_runtime.errors import Unsupported, WeightFileError, WeightsMismatch, listed
from weightswap_runtime.sources.location import Location, folder_behind
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.tensors import describe

from .manifest import NamedTensor
from .weight_set import PEFT_CONFIG_NAME, SUFFIX, StoredTensor

T = TypeVar("T")
_WEIGHTS_NAME = "adapter_model.safetensors"
_MOST_CONFIG = 256 << 10  # bytes
_PREFIX = "base_model.model."
_ALL_LINEAR = "all-linear"
_ROW = re.compile(r"(?P<module>.*)\.(?P<part>lora_(?:embedding_)?[AB])\.[^.]+(?P<weight>\.weight)?")
_BIAS = re.compile(r".*\.lora_B\.[^.]+\.bias")  # of LoRA's own (lora_bias): one that an adapter lacks is zeros
_BASE_WEIGHT = re.compile(r"(?P<module>.*?)(?:\.base_layer)?\.weight(?:\.[^.]+)*")
_OF_THE_BASE = (
    "belongs to the base, not to a variant: swap in a base that has its values, and leave it out here "
    "(save_pretrained(..., save_embedding_layers=False))"
)


class RowSource(NamedTuple):
    """The source of a row of a graph."""

    row: NamedTensor
    key: str | None  # the tensor in the file; None: the row is zeros
    factor: float = 1.0  # by which it is multiplied


def merged_problem(model: Any) -> str:
    """Return a message if an adapter is merged into a module's base, but still there; otherwise an empty string."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    layers = model.named_modules() if tuners is not None else ()
    merged = [name for name, layer in layers if isinstance(layer, tuners.BaseTunerLayer) and layer.merged]  # type: ignore[union-attr]
    if not merged:
        return ""
    return (
        f"{listed(merged)}: PEFT's adapter is merged into the base, and a graph that has it adds it once more: "
        "unmerge_adapter() first. For a graph without adapters give copy.deepcopy(model).merge_and_unload()"
    )


def weights_in(location: Location) -> tuple[Location, Location]:
    """Return the folder of a variant, and the file with its tensors, which in a PEFT directory has a fixed name."""
    folder, name = (location.parent, location.name) if location.name.endswith(SUFFIX) else (location, _WEIGHTS_NAME)
    folder = folder_behind(folder)  # a symbolic link may change between the reads of the two files
    return folder, folder / name


def read_config(folder: Location) -> Config | None:
    """Read the configuration in a directory; None if there is none. Raises WeightFileError and Unsupported."""
    where = f"{folder / PEFT_CONFIG_NAME}"
    raw = read_small(folder / PEFT_CONFIG_NAME, _MOST_CONFIG)
    if raw is None:
        return None
    try:
        fields = from_json(raw, dict[str, Any])
        config = converted(fields, Config)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WeightFileError(f"{where}: is not a PEFT configuration ({error})") from error
    if not all(0 < rank < 1 << 31 for rank in (config.r, *(config.rank_pattern or {}).values())):
        raise WeightFileError(f"{where}: has a rank below 1, or one that no tensor has")
    known = set(Config.__struct_fields__)
    config.check(where, (name for name, value in fields.items() if value and name not in known))
    try:
        config.compile()
    except (re.error, OverflowError, RecursionError) as error:
        raise WeightFileError(f"{where}: is not a PEFT configuration ({error})") from error
    return config


def match_peft(
    tensors: Mapping[str, StoredTensor],
    rows: Iterable[NamedTensor],
    config: Config,
    where: str,
    base: Iterable[str] = (),
) -> list[RowSource]:
    """Return the source of each row of a graph. Modules that the configuration does not target get zeros.

    base: FQNs of the base's weights. Raises WeightsMismatch with the tensors of both sides, and for modules that the
    configuration targets and the file lacks, and the other way round: PEFT warns, and computes without them.
    """
    parsed = {row: _LoraName.of(row.name) for row in rows}
    linear = {part.module: not part.name.startswith("lora_embedding") for part in parsed.values() if part}
    others = {found["module"] for name in base if (found := _BASE_WEIGHT.fullmatch(name))} - linear.keys()
    config.check_work([*linear, *others], where)
    ranks = {module: config.rank(module) for module in linear}
    groups = _groups((part, row) for row, part in parsed.items() if part)
    keys = {key.removeprefix(_PREFIX): key for key in tensors}
    sources: list[RowSource] = []
    problems = [f"{key}: present both with and without {_PREFIX}" for key in sorted(tensors.keys() - keys.values())]
    for row, part in parsed.items():
        key = keys.pop(part.stem, None) if part else None
        if key is not None and part:
            problems += _rank_problems(row, tensors[key], ranks[part.module], part, groups.get(part.module, 1))
        sources.append(
            RowSource(row, key, config.factor(part.module, ranks[part.module]) if part and part.is_b else 1.0)
        )
    problems += _missing_halves(sources)
    problems += [
        f"{row.name}: the graph takes it from variants, and a PEFT directory has none: only a file with all FQNs has it"
        for row, part in parsed.items()
        if part is None and not _BIAS.fullmatch(row.name)
    ]
    present = {part.module for source in sources if source.key and (part := parsed[source.row])}
    problems += _untargeted(config, linear, others, present)
    problems += [
        f"{keys[stem]}: {_OF_THE_BASE if 'lora_' not in stem else 'not in the graph'}" for stem in sorted(keys)
    ]
    if len(keys) == len(tensors):
        problems.append(f"the graph expects tensors such as {listed([each.row.name for each in sources][:2])}")
    if problems:
        raise WeightsMismatch(
            where,
            problems,
            "Give an adapter trained for this architecture, saved whole, or export with its targets and rank.",
        )
    return sources


class _LoraName(NamedTuple):
    """What the FQN of a graph's row says."""

    module: str  # in the base
    name: str  # lora_A, lora_B, or those of an embedding
    stem: str  # its name in a file, without the prefix that may stand before it

    @classmethod
    def of(cls, fqn: str) -> _LoraName | None:
        if (found := _ROW.fullmatch(fqn)) is None:
            return None
        module = found["module"].removeprefix(_PREFIX)
        return cls(module, found["part"], f"{module}.{found['part']}{found['weight'] or ''}")

    @property
    def is_b(self) -> bool:
        return self.name.endswith("B")


def _untargeted(
    config: Config, linear: Mapping[str, bool], others: Collection[str], present: Collection[str]
) -> Iterator[str]:
    """Yield the modules for which the configuration and the file disagree. others: those to which a graph adds none."""
    for module, is_linear in linear.items():
        targeted = config.targets(module, linear=is_linear)
        if targeted and module not in present:
            yield f"{module}: {PEFT_CONFIG_NAME} targets it, but the file has no tensors for it"
        elif module in present and not targeted:
            yield f"{module}: the file has tensors for it, but {PEFT_CONFIG_NAME} does not target it"
    for module in others:  # which of them are linear is not known
        if config.targets(module, linear=False):
            yield f"{module}: {PEFT_CONFIG_NAME} targets it, but the graph has no room for it, and the file no tensors"


def _missing_halves(sources: Iterable[RowSource]) -> Iterator[str]:
    """Yield the problem of each module of which the file has only A or only B."""
    pairs: dict[str, list[RowSource]] = {}
    for source in sources:
        pairs.setdefault(re.sub(r"[AB](\.[^.]+(?:\.weight)?)$", r"\1", source.row.name), []).append(source)
    for pair in pairs.values():
        missing = [source.row.name for source in pair if source.key is None]
        if 0 < len(missing) < len(pair):
            yield f"{missing[0]}: missing, but its other half is present"


def _groups(rows: Iterable[tuple[_LoraName, NamedTensor]]) -> dict[str, int]:
    """Return the number of groups of each module: B of a grouped convolution has a part of A's rank for each."""
    rooms: dict[str, dict[bool, int]] = {}
    for part, row in rows:
        rooms.setdefault(part.module, {})[part.is_b] = row.shape[int(part.is_b)]
    return {module: room[False] // room[True] for module, room in rooms.items() if len(room) == 2 and room[True]}


def _rank_problems(row: NamedTensor, stored: StoredTensor, rank: int, part: _LoraName, groups: int) -> Iterator[str]:
    expected, actual, rank_axis = describe(row), describe(stored), int(part.is_b)
    rest = [size for axis, size in enumerate(row.shape) if axis != rank_axis]
    if len(stored.shape) != len(row.shape) or [s for a, s in enumerate(stored.shape) if a != rank_axis] != rest:
        yield f"{row.name}: the graph expects {expected}, the file has {actual}"
    elif stored.shape[rank_axis] > row.shape[rank_axis]:
        yield (
            f"{row.name}: the graph has room for rank {row.shape[rank_axis]} ({expected}), the file has rank "
            f"{stored.shape[rank_axis]} ({actual})"
        )
    elif groups > 1 and stored.shape[rank_axis] != row.shape[rank_axis]:  # zeros at its end would move its groups
        yield (
            f"{row.name}: the graph expects {expected}, the file has {actual}; an adapter of a grouped convolution has "
            "the rank of the export"
        )
    elif stored.shape[rank_axis] != (rank // groups if part.is_b else rank):
        yield f"{row.name}: the configuration says rank {rank}, the file has {actual}"


_IRRELEVANT = {  # fields about the training, and those that the names and shapes of the file repeat
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Config(msgspec.Struct, kw_only=True):
    """The fields of `adapter_config.json` that determine what a variant computes."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str = True
    target_modules: str | frozenset[str] | None = None
    exclude_modules: str | frozenset[str] | None = None
    layers_to_transform: int | frozenset[int] | None = None
    layers_pattern: str | list[str] | None = None
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    target_parameters: list[str] | None = None
    alora_invocation_tokens: list[int] | None = None
    layer_replication: list[list[int]] | None = None

    def check(self, where: str, others: Iterable[str]) -> None:
        """Raise Unsupported for features that a graph with LoRA does not have. others: names of other fields set."""
        used = [f"peft_type {self.peft_type}"] if self.peft_type != "LORA" else []
        used += [f"bias {self.bias!r}"] if self.bias != "none" else []
        names = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")
        used += [name for name in (*names, "alora_invocation_tokens", "layer_replication") if getattr(self, name)]
        if str(self.init_lora_weights).lower().startswith(_CHANGE_THE_BASE):
            used.append(f"init_lora_weights {self.init_lora_weights!r}, which changes the base")
        used += sorted(set(others) - _IRRELEVANT)
        if used:
            raise Unsupported(f"{where}: uses {listed(used)}; a variant can only be LoRA's A and B")
        if not self.target_modules:
            raise Unsupported(f"{where}: has no target_modules, so that nothing tells whether its file is whole")
        for pattern in self._patterns:
            if not _PLAIN.fullmatch(pattern):
                _check_pattern(pattern, where)
        self.check_work((), where)

    @property
    def _patterns(self) -> list[str]:
        """All regular expressions."""
        found = [*(self.rank_pattern or ()), *(self.alpha_pattern or ()), *_listed(self.layers_pattern)]
        return found + [each for each in (self.target_modules, self.exclude_modules) if isinstance(each, str)]

    def check_work(self, modules: Collection[str], where: str) -> None:
        """Raise Unsupported if to compare its patterns with the names of modules could take long."""
        longest = max(map(len, modules), default=0)
        steps = sum(_COMPILED_STEPS + len(modules) * _steps(each, longest) for each in self._patterns)
        steps -= sum(_COMPILED_STEPS for each in self._patterns if _PLAIN.fullmatch(each))
        if steps > _MOST_STEPS:
            raise Unsupported(
                f"{where}: its {len(self._patterns)} patterns may take forever with {len(modules)} modules; name the "
                "modules instead, without what the default gives them"
            )

    def rank(self, module: str) -> int:
        """Return the rank of a module, given its name in the base."""
        return _first_match(self.rank_pattern, module, self.r)

    def factor(self, module: str, rank: int) -> float:
        """Return the factor by which PEFT multiplies a module's result."""
        alpha = _first_match(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str, *, linear: bool) -> bool:
        """Return whether PEFT puts LoRA at a module, given its name in the base, and whether it is no embedding."""
        names = self.target_modules or ""
        if self.exclude_modules and _is_named(self.exclude_modules, module):
            return False
        if isinstance(names, str):
            return linear if names == _ALL_LINEAR else _is_named(names, module)
        return module in names or (_is_named(names, module) and self._has_layer(module))

    def _has_layer(self, module: str) -> bool:
        """Return whether `layers_to_transform` takes the layer that a module is in: the first number in its name."""
        layers = self.layers_to_transform
        if layers is None or layers == frozenset():
            return True
        found = next(filter(None, (each.match(module) for each in self._layer_patterns())), None)
        return found is not None and int(found["index"]) in (layers if isinstance(layers, frozenset) else {layers})

    def _layer_patterns(self) -> list[re.Pattern[str]]:
        starts = [rf"(?:^|.*?\.){each}" for each in _listed(self.layers_pattern)] or [r".*?\.[^.]*"]
        return [_compiled(rf"{start}\.(?P<index>\d+)\.") for start in starts]

    def compile(self) -> None:
        """Compile all patterns. Raises re.error and OverflowError."""
        for pattern in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            if not _PLAIN.fullmatch(pattern):
                _compiled(_ending(pattern))
        for whole in (self.target_modules, self.exclude_modules):
            if isinstance(whole, str):
                _compiled(whole)
        self._layer_patterns()


def _listed(value: str | Sequence[str] | None) -> Sequence[str]:
    return ([value] if value else []) if isinstance(value, str) else value or ()


def _is_named(names: str | frozenset[str], module: str) -> bool:
    """Return whether a pattern, or a list of names or their ends, has a module."""
    if isinstance(names, str):
        return _compiled(names).fullmatch(module) is not None
    parts = module.split(".")
    return any(".".join(parts[begin:]) in names for begin in range(len(parts)))


def _first_match(patterns: Mapping[str, T] | None, module: str, default: T) -> T:
    """Return the value of the first pattern that matches, as PEFT does."""
    matches = (value for pattern, value in (patterns or {}).items() if _matches(pattern, module))
    return next(matches, default)


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern matches a name or its end. A plain one is not compiled: there may be thousands."""
    if not _PLAIN.fullmatch(pattern):
        return _compiled(_ending(pattern)).match(module) is not None
    end = module[-len(pattern) :]
    if len(end) < len(pattern) or (len(module) > len(end) and module[-len(end) - 1] != "."):
        return False
    return end == pattern or (
        "." in pattern and all(each in (".", char) for each, char in zip(pattern, end, strict=True))
    )


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


# `re` backtracks: a pattern may try all places for each repetition, and all alternatives of each group. So the steps of
# all patterns with all names of modules are estimated before any is tried.
_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")  # a name, which costs next to nothing: there may be thousands
_MOST_REPETITIONS, _MOST_ALTERNATIVES, _LONGEST_PATTERN = 4, 64, 1000  # of a pattern; its length in characters
_MOST_STEPS = 100_000_000  # about a second
_PLAIN_STEPS, _COMPILED_STEPS = 100, 30_000  # to look for a plain name, and to compile a pattern
_compiled = lru_cache(maxsize=10_000)(re.compile)  # as many as `_MOST_STEPS` allows


def _check_pattern(pattern: str, where: str) -> None:
    repetitions, alternatives = _choices(pattern)
    nested = re.search(r"\)[*+?{]", pattern) or len(pattern) > _LONGEST_PATTERN
    if repetitions > _MOST_REPETITIONS or alternatives > _MOST_ALTERNATIVES or nested:
        raise Unsupported(f"{where}: the pattern {pattern!r:.200} may take forever; name the modules instead")


def _steps(pattern: str, length: int) -> int:
    """Return about how many steps a pattern takes at most with a name of a length."""
    if _PLAIN.fullmatch(pattern):
        return _PLAIN_STEPS
    repetitions, alternatives = _choices(pattern)
    return 100 + int(length**repetitions) // math.factorial(repetitions) * alternatives


def _choices(pattern: str) -> tuple[int, int]:
    """Return the number of repetitions in a pattern, and in how many ways its alternatives may all match."""
    plain = pattern.replace("(?", "(")
    return len(re.findall(r"[*+?{]", plain)), math.prod(map(_ways, re.split("[()]", plain)))


def _ways(group: str) -> int:
    """Return how many alternatives may match at one place: of words that do not begin with each other, one."""
    words = sorted(group.split("|"))
    if re.fullmatch(r"[\w|-]*", group) and not any(after.startswith(word) for word, after in pairwise(words)):
        return 1
    return len(words)
