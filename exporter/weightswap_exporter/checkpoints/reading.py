"""Opening any checkpoint, and the level that fits.

A path says by its name, a folder by its files, who wrote it. Trainers put the weights beside other things and below
names of their own: each mapping that may have them is a level, and the one is taken whose names, dtypes and shapes are
those of the artifact. If several fit, or none does, the error names what the user could choose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from weightswap_exporter.modules.tensors import Kind, ModelView, extra_states
from weightswap_runtime.errors import (
    MOST_PRINTED,
    CheckpointError,
    Unsupported,
    WeightsMismatch,
    WeightswapError,
    lines_of,
    listed,
    plural,
)
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import Match, Reading, Readings, resolve
from weightswap_runtime.format.peft import merged_problem
from weightswap_runtime.format.weight_set import (
    INDEX_SUFFIX,
    SUFFIX,
    StoredTensor,
    check_no_peft,
    lost_index,
    open_weights,
    peft_alone,
)
from weightswap_runtime.sources.location import check_scheme, is_url, printable
from weightswap_runtime.tensors import TensorType, array_content, digest_of, nbytes, safetensors_name
from weightswap_runtime.torch_tensors import copied_tensor, torch_dtype
from weightswap_tools.tensor_set import Opener as SetOpener
from weightswap_tools.tensor_set import SetRequest, SetTensor, TensorSet

from . import torch_files as pickled
from .dcp import CHUNKS_SUFFIX, METADATA_NAME, open_dcp
from .nested_state_dicts import (
    ANYWHERE,
    NO_VALUES,
    Choice,
    Mappings,
    NestedStateDict,
    flat_levels,
    grouped,
    listing,
    nested_levels,
)
from .tensor import CheckpointTensor, Files, PartOf, copy_part, pieces, values_of

_PICKLED_NAMES = ("pytorch_model.bin", f"pytorch_model{pickled.INDEX_SUFFIX}")
_KINDS = f"{SUFFIX}, {INDEX_SUFFIX}, {', '.join(pickled.SUFFIXES)}, {pickled.INDEX_SUFFIX}"
_FOLDERS = (
    f"{METADATA_NAME} (torch.distributed.checkpoint), *{SUFFIX} or *{INDEX_SUFFIX}, {' or '.join(_PICKLED_NAMES)}"
)
_OPTIMIZER_STATE = "state"  # where every optimizer of torch keeps its tensors
_NO_TENSOR = TensorType("no tensor", ())  # an extra state, which fits no weight
_PREFIX_DEPTH = 3  # components of a prefix that is suggested
_LEVEL = "(--level)"
_PREFIX = "(weightswap pack --prefix)"
_TORCHAO_NAMES = "tensor_names"  # key of the metadata that only torchao writes
Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]


class Checkpoint(NamedTuple):
    """Open checkpoint."""

    where: str
    levels: tuple[NestedStateDict, ...]  # state dicts in it that may have the weights
    mappings: Mappings
    names: bool = False  # its tensors certainly have runtime FQNs; else they may have checkpoint keys
    # raises CheckpointError or WeightFileError if one of its files was written to since it was opened
    check_unchanged: Callable[[], None] = lambda: None
    graph_id: str = ""  # of the graph that it was packed for, if any
    advice: str = ""  # as of a `WeightSet`


@contextmanager
def open_checkpoint(source: Source, choice: Choice = ANYWHERE) -> Iterator[Checkpoint]:
    """Open a module, a state dict or a path; values are read later. Raises CheckpointError and WeightFileError."""
    if isinstance(source, nn.Module):
        yield from_module(source, choice=choice)
    elif isinstance(source, Mapping):
        tree = _in_torch(source, choice.depth)
        yield Checkpoint("the state dict", *nested_levels(tree, values_of, "the state dict", choice))
    elif isinstance(source, str | os.PathLike):
        check_scheme(source)
        if is_url(source):
            raise Unsupported(f"{printable(source)}: checkpoints are packed from local files; copy it here")
        path = Path(source)
        with _opener(path)(path, choice) as checkpoint:
            yield checkpoint
    else:
        raise CheckpointError(f"expected a module, a state dict or a path, got a {type(source).__qualname__}")


def _in_torch(state: Mapping[Any, Any], depth: int) -> Mapping[Any, Any]:
    """Return a state dict with copies of its numpy arrays as tensors; those of other dtypes stay what they are.

    depth: of the mappings in it whose arrays are converted, too, as of {"model": {...}}.
    """

    def converted(value: Any) -> Any:
        if type(value) in (np.ndarray, np.memmap) and safetensors_name(value.dtype) is not None:
            return copied_tensor(array_content(value))
        return _in_torch(value, depth - 1) if depth and isinstance(value, Mapping) else value

    values = {key: converted(value) for key, value in state.items()}
    return state if all(values[key] is value for key, value in state.items()) else values


def from_module(model: nn.Module, where: str | None = None, choice: Choice = ANYWHERE) -> Checkpoint:
    """Return a live module's parameters and persistent buffers, under their FQNs, without a copy.

    Its extra states are only named: its graph has what they were at the export. Raises CheckpointError for a merged
    adapter of PEFT.
    """
    where = where or type(model).__qualname__
    if problem := merged_problem(model):
        raise CheckpointError(f"{where}: {problem}")
    tree = {**ModelView(model).saved, **extra_states(model)}
    return Checkpoint(where, *nested_levels(tree, values_of, where, choice, deep=False), names=True)


def choose_level(checkpoint: Checkpoint, manifest: Manifest, readings: Readings) -> tuple[NestedStateDict, Match]:
    """Return the one level whose names, dtypes and shapes are those of the artifact.

    Raises CheckpointError or WeightsMismatch with every problem of the nearest level, or with the `level` or `prefix`
    that would fit; and WeightsMismatch if several levels fit and would give different weights.
    """
    where = checkpoint.where
    if manifest.weights and not any(level.tensors or level.problems for level in checkpoint.levels):
        raise _no_tensors(checkpoint)
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
        if manifest.conversion.untraceable:
            raise refusal
        raise _hint(nearest, checkpoint, [reading(manifest) for reading in readings]) or refusal
    return fitting[0]


def refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with the problems, if any, each once: tensors in one file can share a problem."""
    if distinct := list(dict.fromkeys(problems)):
        raise CheckpointError(*lines_of(distinct, MOST_PRINTED))


def reader(path: Path) -> SetOpener | None:
    """Return an opener for a checkpoint that `pack` takes; None for other files. See `weightswap_tools.tensor_set`.

    Raises CheckpointError for a folder without a checkpoint, and for a file that is only part of one.
    """
    return partial(_open, path) if _find_opener(path) else None


# Opening a path, by its name or by the files in it.


_Opener = Callable[[Path, Choice], AbstractContextManager[Checkpoint]]


def _find_opener(path: Path) -> _Opener | None:
    """Return an opener for a path by its name, or for a folder by its files; None if it is no checkpoint.

    Raises CheckpointError for a folder without a checkpoint, and for a file that is only part of one.
    """
    if path.is_dir():
        return _folder_opener(path)
    if not path.is_file():
        return None
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return _safetensors
    if path.name.endswith(pickled.INDEX_SUFFIX):
        return partial(_pickled, pickled.open_pickled_shards)
    if path.name.endswith(pickled.SUFFIXES):
        return partial(_pickled, pickled.open_pickled)
    if path.name == METADATA_NAME:
        return lambda metadata, choice: _dcp(metadata.parent, choice)
    if path.suffix == CHUNKS_SUFFIX:
        raise CheckpointError(f"{path}: one file of a distributed checkpoint; give its folder")
    return None


def _opener(path: Path) -> _Opener:
    if opener := _find_opener(path):
        return opener
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file. Give a checkpoint: {_KINDS}, or a folder with one.")
    raise CheckpointError(f"{path}: unknown kind of checkpoint; expected {_KINDS}, or a folder")


def _folder_opener(path: Path) -> _Opener:
    names = sorted(entry.name for entry in path.iterdir())
    if METADATA_NAME in names:
        return _dcp
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        return _safetensors
    for name in _PICKLED_NAMES:
        if name in names:
            check_no_peft(path, names, name)
            return lambda folder, choice: _opener(folder / name)(folder / name, choice)
    if lost := lost_index([name for name in names if name.endswith(".bin")]):
        raise CheckpointError(f"{path}: {lost}")
    if conversion := peft_alone(names):
        raise CheckpointError(f"{path}: {conversion}")
    content = f"it holds {listed(names)}" if names else "it is empty"
    raise CheckpointError(f"{path}: no checkpoint in this folder ({content}); expected {_FOLDERS}")


@contextmanager
def _safetensors(path: Path, choice: Choice) -> Iterator[Checkpoint]:
    with open_weights(path) as weights:
        digests = weights.stamp.digests if weights.stamp else {}
        tensors = {name: _stored(name, stored, digests.get(name)) for name, stored in weights.tensors.items()}
        metadata = {name: text for file in weights.files for name, text in file.header.metadata.items()}
        tensors = _named_as_parts(tensors, metadata, weights.where)
        levels = flat_levels(tensors, weights.where, choice)
        graph_id = weights.stamp.graph_id if weights.stamp else ""
        yield Checkpoint(weights.where, *levels, bool(graph_id), weights.check_unchanged, graph_id, weights.advice)


def _stored(name: str, tensor: StoredTensor, digest: str | None) -> CheckpointTensor:
    def load() -> torch.Tensor:
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8)
        tensor.source.read_into([memory.numpy().data], tensor.offset)
        return memory.view(torch_dtype(tensor.dtype)).view(tensor.shape)

    def problems() -> list[str]:
        if digest is None or digest_of(pieces(load())) == digest:
            return []
        return [f"{tensor.source.where}: {name} is damaged: its bytes do not match its digest. Copy the file again."]

    return CheckpointTensor(tensor.dtype, tensor.shape, (id(tensor.source), tensor.offset), load, problems)


@contextmanager
def _pickled(open_files: Callable[[Path, Files], Any], path: Path, choice: Choice) -> Iterator[Checkpoint]:
    files = Files()
    with open_files(path, files) as opened:
        levels = nested_levels(opened.tree, opened.values_of, str(path), choice)
        yield Checkpoint(str(path), *levels, False, files.check_unchanged)


@contextmanager
def _dcp(folder: Path, choice: Choice) -> Iterator[Checkpoint]:
    files = Files()
    tensors, holders, extra = open_dcp(folder, files)
    levels = flat_levels(tensors, str(folder), choice, holders, extra)
    yield Checkpoint(str(folder), *levels, False, files.check_unchanged)


# torchao writes a quantised tensor to safetensors as its parts, and says in the metadata what they are of.


def _named_as_parts(
    tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str], where: str
) -> dict[str, CheckpointTensor]:
    """Return a file's tensors, with parts of a quantised one named `NAME.PART`. Raises CheckpointError."""
    renamed = dict(tensors)
    for name in metadata if _TORCHAO_NAMES in metadata else ():
        for stored, part, kind in _parts(name, metadata[name], where):
            if stored not in tensors:
                continue
            if stored not in renamed or f"{name}.{part}" in renamed:
                raise CheckpointError(f"{where}: has {name}.{part} twice. Save it again.")
            renamed[f"{name}.{part}"] = renamed.pop(stored)._replace(part_of=PartOf(f".{part}", kind))
    return renamed


def _parts(name: str, text: str, where: str) -> list[tuple[str, str, Kind]]:
    """Return, for each part, its name in the file, its own name, and the kind of the whole."""
    if not text.startswith("{"):
        return []
    try:
        entry = json.loads(text)
        kind = _plain(entry)
        parts = [str(part) for part in entry.get("_tensor_data_names", ())]
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: the metadata of {name} is not torchao's ({error}). Save it again.") from error
    module, dot, leaf = name.rpartition(".")
    return [(f"{module}{dot}_{leaf}_{part}", part, kind) for part in parts]


def _plain(value: Any) -> Any:
    """Return a value in the form of `modules.tensors.kind_of`."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "_type" not in value:
        return {name: _plain(item) for name, item in value.items()}
    content = value.get("_data")
    return {"type": value["_type"]} | _plain(content) if isinstance(content, dict) else content


# Which level fits, and what to say if none does.


def _match(level: NestedStateDict, manifest: Manifest, checkpoint: Checkpoint, readings: Readings) -> Match:
    _check_tensors(level, checkpoint.where)
    states = {} if checkpoint.names else dict.fromkeys(level.extra, _NO_TENSOR)
    where = _where(checkpoint.where, level)
    return resolve({**level.tensors, **states}, manifest, where, readings=readings, advice=checkpoint.advice)


def _check_tensors(level: NestedStateDict, where: str) -> None:
    """Raise CheckpointError for tensors in a level that have no values, or cannot be in a weight file."""
    if level.problems:
        hollow = any(NO_VALUES in text for text in level.problems)
        advice = ". Build the model outside skeleton(), load its weights, and then pack it" if hollow else ""
        raise CheckpointError(f"{_where(where, level)}: {listed(level.problems, 10, '; ')}{advice}")


def _tie_keys(level: NestedStateDict, match: Match) -> frozenset[object]:
    """Return the sources that the weights would be read from."""
    direct = {(weight, level.tensors[names[0]].tie_key) for weight, names in match.found.items()}
    computed = {(key, level.tensors[name].tie_key) for keys in match.computed.values() for key, name in keys.items()}
    return frozenset(direct | computed)


def _several(levels: list[NestedStateDict], where: str) -> WeightsMismatch:
    both = "both" if len(levels) == 2 else "all"
    options = " or ".join(f"level={level.path!r}" for level in levels)
    return WeightsMismatch(
        where, [f"{_named(levels)} {both} fit, with different values"], f"Say which: {options} (--level)."
    )


def _no_tensors(checkpoint: Checkpoint) -> CheckpointError:
    where = _where(checkpoint.where, checkpoint.levels[0])
    deeper = {path: names for path, names in checkpoint.mappings().items() if names}
    if not deeper:
        return CheckpointError(f"{where}: holds no tensors with names; give a state dict")
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
    if prefixes and checkpoint.names and not checkpoint.graph_id:  # a live module
        parts = " or ".join(f"model.{prefix[:-1]}" for prefix in prefixes)
        text = f"the names of the graph are those of its part {' or '.join(repr(prefix[:-1]) for prefix in prefixes)}"
        return WeightsMismatch(where, [text], f"Give that part of the model instead: {parts}.")
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


def _named(levels: Iterable[NestedStateDict]) -> str:
    return " and ".join(repr(level.path) if level.path else "its top level" for level in levels)


def _where(where: str, level: NestedStateDict) -> str:
    return f"{where}{f', {level.path}' if level.path else ''}{f', prefix {level.prefix!r}' if level.prefix else ''}"


# For tools that compare and show checkpoints.


@contextmanager
def _open(path: Path, request: SetRequest) -> Iterator[TensorSet]:
    with open_checkpoint(path, Choice(request.level)) as checkpoint:
        level = _choose(checkpoint, request)
        _check_tensors(level, checkpoint.where)
        refuse(text for values in level.tensors.values() for text in values.lacking())
        yield TensorSet(
            checkpoint.where,
            {name: _set_tensor(values, checkpoint.where) for name, values in level.tensors.items()},
            {str(file): file.name for file in sorted({v.file for v in level.tensors.values() if v.file})},
            partial(_check, checkpoint, level),
            level=level.path,
            others={name: len(names) for name, names in checkpoint.mappings().items() if names and name != level.path},
        )


def _choose(checkpoint: Checkpoint, request: SetRequest) -> NestedStateDict:
    if request.manifest is None:
        return _fullest_level(checkpoint, request.level)
    return choose_level(checkpoint, request.manifest, request.readings)[0]


def _fullest_level(checkpoint: Checkpoint, chosen: str | None) -> NestedStateDict:
    """Return the chosen level, or else the one with the most tensors of its own.

    Raises CheckpointError if there are no tensors, or several such levels with different values.
    """
    levels = checkpoint.levels
    counts = [level.own if chosen is None else len(level.tensors) + len(level.problems) for level in levels]
    if not max(counts) and chosen is None:
        raise _no_tensors(checkpoint)
    if not max(counts):
        named = f"its level {chosen!r}" if chosen else "its top level"
        raise CheckpointError(
            f"{checkpoint.where}: {named} holds no tensors of its own; run without --level to see what does"
        )
    fullest = [level for level, count in zip(levels, counts, strict=True) if count == max(counts)]
    if len({frozenset((name, values.tie_key) for name, values in level.tensors.items()) for level in fullest}) > 1:
        text = f"{_named(fullest)} have {plural(max(counts), 'tensor')} each, with different values"
        raise CheckpointError(f"{checkpoint.where}: {text}. Say which is meant {_LEVEL}.")
    return fullest[0]


def _set_tensor(values: CheckpointTensor, where: str) -> SetTensor:
    read = values.parts()
    return SetTensor(
        values.dtype,
        values.shape,
        nbytes(values.dtype, values.shape) or 0,
        str(values.file or where),
        values.offset,
        values.tie_key,
        read or (lambda memory, begin: copy_part(values.load(), memory, begin)),
        whole=read is None,
    )


def _check(checkpoint: Checkpoint, level: NestedStateDict, names: Collection[str]) -> None:
    checkpoint.check_unchanged()
    refuse(text for name in names for text in level.tensors[name].problems())
