"""PEFT directories with LoRA: the mapping from tensors of the file to those of a graph, with their factors.

A graph has room for one rank and no factor. A lower rank is padded with zeros, and the factor, which PEFT takes from
the configuration, is multiplied into B. https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from weightswap_runtime.errors import Unsupported, WeightFileError, WeightsMismatch
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import SUFFIX, StoredTensor
from weightswap_runtime.messages import listed
from weightswap_runtime.sources.location import Location, folder_behind
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.tensors.dtypes import describe

T = TypeVar("T")
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG = 256 << 10
_PREFIX = "base_model.model."
_FQN = re.compile(r"(?P<module>.*)\.(?P<part>lora_(?:embedding_)?[AB])\.[^.]+(?P<weight>\.weight)?")
_UNKNOWN = "not in the graph"
_OF_THE_BASE = "belongs to the base, not to a variant: save_pretrained(..., save_embedding_layers=False)"
_MOST_CHOICES = 3  # repetitions and groups in a pattern of a configuration: more may backtrack for ever
_MOST_ALTERNATIVES = 16
_IRRELEVANT = {  # fields about the training, and those that the names and shapes of the file repeat
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
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
        for pattern in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            choices = len(re.findall(r"[*+?{(]", pattern))
            nested = re.search(r"\)[*+?{]", pattern)
            if choices > _MOST_CHOICES or pattern.count("|") > _MOST_ALTERNATIVES or nested:
                raise Unsupported(f"{where}: the pattern {pattern!r} may take forever; name the modules instead")

    def rank(self, module: str) -> int:
        """Return the rank of a module, given its name in the base."""
        return _first_match(self.rank_pattern, module, self.r)

    def factor(self, module: str) -> float:
        """Return the factor by which PEFT multiplies a module's result."""
        rank, alpha = self.rank(module), _first_match(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _first_match(patterns: Mapping[str, T] | None, module: str, default: T) -> T:
    """Return the value of the first pattern that matches, as PEFT does."""
    matches = (value for pattern, value in (patterns or {}).items() if _pattern(pattern).match(module))
    return next(matches, default)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({text})$")


class RowSource(NamedTuple):
    """The source of a row of a graph: the tensor `key` of a file, multiplied by `factor`. key None: zeros."""

    row: NamedTensor
    key: str | None
    factor: float = 1.0


def read_config(folder: Location) -> Config | None:
    """Read the configuration in a directory; None if there is none. Raises WeightFileError and Unsupported."""
    where = f"{folder / CONFIG_NAME}"
    raw = read_small(folder / CONFIG_NAME, _MOST_CONFIG)
    if raw is None:
        return None
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        config = msgspec.convert(fields, Config)
        for pattern in (*(config.rank_pattern or ()), *(config.alpha_pattern or ())):
            _pattern(pattern)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError, re.error) as error:
        raise WeightFileError(f"{where}: is not a PEFT configuration ({error})") from error
    if not all(rank > 0 for rank in (config.r, *(config.rank_pattern or {}).values())):
        raise WeightFileError(f"{where}: has a rank below 1")
    known = set(Config.__struct_fields__)
    config.check(where, (name for name, value in fields.items() if value and name not in known))
    return config


def match_peft(
    tensors: Mapping[str, StoredTensor], rows: Iterable[NamedTensor], config: Config, where: str
) -> list[RowSource]:
    """Return the source of each row of a graph. Modules that the file does not have get zeros, so the base answers.

    Raises WeightsMismatch with the tensors of both sides.
    """
    keys = {key.removeprefix(_PREFIX): key for key in tensors}
    sources: list[RowSource] = []
    problems = [f"{key}: present both with and without {_PREFIX}" for key in sorted(tensors.keys() - keys.values())]
    for row in rows:
        parsed = _FQN.fullmatch(row.name)
        module = parsed["module"].removeprefix(_PREFIX) if parsed else ""
        key = keys.pop(f"{module}.{parsed['part']}{parsed['weight'] or ''}", None) if parsed else None
        is_b = bool(parsed) and parsed["part"].endswith("B")  # type: ignore[index]
        if key is not None:
            problems += _problems(row, tensors[key], config.rank(module), rank_axis=int(is_b))
        sources.append(RowSource(row, key, config.factor(module) if is_b else 1.0))
    problems += _missing_halves(sources)
    problems += [f"{keys[stem]}: {_OF_THE_BASE if 'lora_' not in stem else _UNKNOWN}" for stem in sorted(keys)]
    if len(keys) == len(tensors):
        problems.append(f"the graph expects tensors such as {listed([each.row.name for each in sources][:2])}")
    if problems:
        raise WeightsMismatch(
            where, problems, "Give an adapter trained for this architecture, or export with its targets and rank."
        )
    return sources


def _missing_halves(sources: Iterable[RowSource]) -> Iterator[str]:
    """Yield the problem of each module of which the file has only A or only B."""
    pairs: dict[str, list[RowSource]] = {}
    for source in sources:
        pairs.setdefault(re.sub(r"[AB](\.[^.]+(?:\.weight)?)$", r"\1", source.row.name), []).append(source)
    for pair in pairs.values():
        missing = [source.row.name for source in pair if source.key is None]
        if 0 < len(missing) < len(pair):
            yield f"{missing[0]}: missing, but its other half is present"


def _problems(row: NamedTensor, stored: StoredTensor, rank: int, rank_axis: int) -> Iterator[str]:
    expected, actual = describe(row), describe(stored)
    rest = [size for axis, size in enumerate(row.shape) if axis != rank_axis]
    if len(stored.shape) != len(row.shape) or [s for a, s in enumerate(stored.shape) if a != rank_axis] != rest:
        yield f"{row.name}: the graph expects {expected}, the file has {actual}"
    elif stored.shape[rank_axis] > row.shape[rank_axis]:
        yield (
            f"{row.name}: the graph has room for rank {row.shape[rank_axis]} ({expected}), the file has rank "
            f"{stored.shape[rank_axis]} ({actual})"
        )
    elif stored.shape[rank_axis] != rank:
        yield f"{row.name}: the configuration says rank {rank}, the file has {actual}"


def weights_in(location: Location) -> tuple[Location, Location]:
    """Return the folder of a variant, and the file with its tensors, which in a PEFT directory has a fixed name."""
    folder, name = (location.parent, location.name) if location.name.endswith(SUFFIX) else (location, WEIGHTS_NAME)
    folder = folder_behind(folder)  # a symbolic link may change between the reads of the two files
    return folder, folder / name
