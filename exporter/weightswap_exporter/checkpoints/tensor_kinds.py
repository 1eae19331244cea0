"""Kinds of composed tensors in an artifact, and checks that a model or a checkpoint has the same kinds.

The kind of a composed tensor is a constant of the graph: with parts of another kind, calls would give other results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from weightswap_exporter.models.parts import describe_kind, kinds_of
from weightswap_runtime import Artifact
from weightswap_runtime.errors import CheckpointError, WeightsMismatch
from weightswap_runtime.format.manifest import PARTS_NAME
from weightswap_runtime.format.name_matching import Match

from .nested_state_dicts import NestedStateDict
from .reading_checkpoints import Checkpoint

_ADVICE = "Quantise the checkpoint as the exported model was, or export the checkpoint's model."


def kinds_file(model: nn.Module) -> dict[str, bytes]:
    """Return the artifact's file with the kind of each composed parameter; empty if there are none."""
    kinds = kinds_of(model)
    return {PARTS_NAME: json.dumps(kinds, indent=1).encode() + b"\n"} if kinds else {}


def model_problems(model: nn.Module, artifact: Artifact) -> list[str]:
    """Return the parameters whose kind is not the graph's, as texts."""
    return list(_differences(artifact.kinds, kinds_of(model), "the model"))


def check_kinds(level: NestedStateDict, match: Match, artifact: Artifact, where: str) -> None:
    """Raise WeightsMismatch for weights that are parts of tensors whose kind is not the graph's."""
    graph_kinds = artifact.kinds
    pairs = [(weight, level.tensors[names[0]].part_of) for weight, names in match.found.items()]
    kinds = {weight.removesuffix(part.suffix): part.kind for weight, part in pairs if part is not None}
    if problems := list(_differences({name: graph_kinds.get(name) for name in kinds}, kinds, "the checkpoint")):
        raise WeightsMismatch(where, problems, _ADVICE)


def kind_mismatch(checkpoint: Checkpoint, artifact: Artifact) -> WeightsMismatch | CheckpointError | None:
    """Return an error if names differ because tensors are of another kind than the graph's, else None."""
    graph_kinds = artifact.kinds
    plain = {name for weight in artifact.manifest.weights for name in weight.names}
    plain |= {key for source in artifact.manifest.adapter.sources for key in source.keys}
    for level in checkpoint.levels:
        parts = {name: values.part_of for name, values in level.tensors.items()}
        kinds = {name.removesuffix(part.suffix): part.kind for name, part in parts.items() if part is not None}
        unsplit = graph_kinds.keys() & level.tensors.keys()
        if unsplit and (damage := level.tensors[min(unsplit)].problems()):  # a part file cannot say what it holds
            return CheckpointError(*damage)
        shared = sorted((kinds.keys() & (plain | graph_kinds.keys())) | unsplit)
        expected, actual = ({name: table.get(name) for name in shared} for table in (graph_kinds, kinds))
        if problems := list(_differences(expected, actual, "the checkpoint")):
            return WeightsMismatch(checkpoint.where, problems, _ADVICE)
    return None


def _differences(expected: Mapping[str, Any], actual: Mapping[str, Any], who: str) -> Iterator[str]:
    for name in {**expected, **actual}:
        if expected.get(name) != actual.get(name):
            one, other = describe_kind(expected.get(name)), describe_kind(actual.get(name))
            yield f"{name}: the graph has {one}, {who} has {other}"
