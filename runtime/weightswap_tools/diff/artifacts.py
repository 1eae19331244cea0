"""Comparison of two artifacts: their graphs and signatures, and whether weight files of one fit the other."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from weightswap_runtime.engines.graph_archive import calls, check_records
from weightswap_runtime.errors import ArtifactError, plural
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import (
    CONSTANTS_NAME,
    CONVERSION_NAME,
    Manifest,
    Method,
    NamedTensor,
    WeightSource,
)
from weightswap_runtime.format.names import by_fqn
from weightswap_runtime.format.signature import Signature
from weightswap_runtime.tensors import TensorType
from weightswap_tools.tensor_set import natural
from weightswap_tools.terminal import cut_text

from .documents import DiffDocument, Level, SetInfo, TensorDiff
from .streaming import Side
from .weights import compare_sides

Kind = Literal["weights", "state", "constants"]
_KINDS: tuple[Kind, ...] = ("weights", "state", "constants")
_PREFIX = "torch.ops."


class ArtifactsDiff(DiffDocument, frozen=True):
    """The comparison of two artifacts."""

    before: ArtifactInfo
    after: ArtifactInfo
    fits: bool  # whether weight files packed for either artifact fit the graph of the other
    misfits: tuple[str, ...]  # why not
    methods: tuple[MethodDiff, ...]
    rows: tuple[RowDiff, ...]
    constants: tuple[TensorDiff, ...]  # constants and initial state values in both artifacts, with other values
    sources: tuple[SourceDiff, ...]
    transforms_changed: bool  # whether the graph that computes weights from a checkpoint is another
    engines: dict[str, str]  # name -> "added", "removed" or "changed"
    ranks: tuple[CutDiff, ...] = ()  # what ranks share in another way

    @property
    def same_graph(self) -> bool:
        return self.before.graph_id == self.after.graph_id

    @property
    def same_files(self) -> bool:
        """Whether weight files of both are packed for the same graph, as those of one model on any number of ranks."""
        return self.before.packed_for == self.after.packed_for

    @property
    def verdict(self) -> str:
        """A sentence that says whether weight files of one artifact fit the other."""
        if self.same_graph:
            return "The same graph: weight files of one fit the other."
        if self.same_files:
            return "The same model, split over ranks in another way: weight files of one fit the other."
        if self.fits and (self.transforms_changed or any(s.computed_before or s.computed_after for s in self.sources)):
            return (
                "Another graph, which computes its weights from a checkpoint in another way: pack each checkpoint for "
                "each graph."
            )
        if self.fits:
            return (
                "Another graph, with the same weights: weight files of one fit the other with allow_other_graph=True, "
                "which is right if both graphs compute them alike from checkpoints."
            )
        return f"Weight files of one do not fit the other: {plural(len(self.misfits), 'problem')}."

    @property
    def level(self) -> Level:
        """Alarm if weight files do not fit; notice if the graph, the conversion or the engines changed."""
        if not self.fits:
            return "alarm"
        changes = self.sources or self.transforms_changed or self.engines
        return "same" if self.same_graph and not changes else "notice"


class ArtifactInfo(DiffDocument, frozen=True):
    """One side of the comparison."""

    where: str
    graph_id: str
    torch: str
    packed_for: str  # the graph id in weight files


class MethodDiff(DiffDocument, frozen=True):
    """A method that differs between the artifacts."""

    name: str
    before: Signature | None  # None if the artifact does not have the method
    after: Signature | None
    operators: tuple[OperatorCount, ...] = ()  # those whose number of calls changed
    same_graph: bool = False

    @property
    def same_signature(self) -> bool:
        return self.before == self.after


class OperatorCount(DiffDocument, frozen=True):
    """The number of calls of an operator, such as `aten.linear.default`, in a method."""

    name: str
    before: int
    after: int


class RowDiff(DiffDocument, frozen=True):
    """A tensor of the weights, state or constants that only one artifact has, or whose type changed."""

    kind: Kind
    name: str
    before: TensorType | None
    after: TensorType | None


class CutDiff(DiffDocument, frozen=True):
    """A weight that ranks share in another way; the name is empty for the number of ranks."""

    weight: str
    before: str
    after: str


class SourceDiff(DiffDocument, frozen=True):
    """A weight whose checkpoint keys changed. It is computed from the keys, or else is the tensor of one of them."""

    weight: str
    before: tuple[str, ...] | None
    after: tuple[str, ...] | None
    computed_before: bool
    computed_after: bool


def compare_artifacts(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> ArtifactsDiff:
    """Compare two artifacts. Needs no torch: graphs are read, not run.

    Raises ArtifactError if a path is not an artifact, or if its files do not match its manifest.
    """
    one, other = Artifact.open(before), Artifact.open(after)
    old, new = one.manifest, other.manifest
    misfits = (*_misfits("old weights, new graph", old, new), *_misfits("new weights, old graph", new, old))
    return ArtifactsDiff(
        before=ArtifactInfo(
            where=str(one.path), graph_id=one.graph_id, torch=old.producer.torch, packed_for=old.packed_for
        ),
        after=ArtifactInfo(
            where=str(other.path), graph_id=other.graph_id, torch=new.producer.torch, packed_for=new.packed_for
        ),
        fits=not misfits,
        misfits=misfits,
        methods=tuple(_method_changes(one, other)),
        rows=tuple(row for kind in _KINDS for row in _row_changes(kind, getattr(old, kind), getattr(new, kind))),
        constants=_constant_changes(one, other),
        sources=tuple(_source_changes(old.conversion.sources, new.conversion.sources)),
        transforms_changed=old.files.get(CONVERSION_NAME) != new.files.get(CONVERSION_NAME),
        engines=_engine_changes(old.files, new.files),
        ranks=tuple(_rank_changes(old, new)),
    )


def _misfits(which: str, packed: Manifest, served: Manifest) -> Iterator[str]:
    """Yield the problems of a weight file packed for one graph when swapped into another."""
    problems = by_fqn(served).match({row.name: row for row in packed.weights}).problems
    yield from (f"{which}: {problem}" for problem in problems)


def _method_changes(one: Artifact, other: Artifact) -> Iterator[MethodDiff]:
    old, new = one.manifest.methods, other.manifest.methods
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        digests = (before and one.manifest.files[before.graph], after and other.manifest.files[after.graph])
        same_graph = digests[0] == digests[1]
        if before != after or not same_graph:
            yield MethodDiff(
                name=name,
                before=before.signature if before else None,
                after=after.signature if after else None,
                operators=tuple(_operator_changes(_operators(one, before), _operators(other, after))),
                same_graph=same_graph,
            )


def _operators(artifact: Artifact, method: Method | None) -> Counter[str]:
    if method is None:
        return Counter()
    raw, where = artifact.read(method.graph), str(artifact.path / method.graph)
    check_records(raw, where)
    try:
        return calls(raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: its graph cannot be read ({error}). Export the artifact again.") from error


def _operator_changes(before: Counter[str], after: Counter[str]) -> Iterator[OperatorCount]:
    for name in sorted(before.keys() | after.keys()):
        if before[name] != after[name]:
            yield OperatorCount(name=name.removeprefix(_PREFIX), before=before[name], after=after[name])


def _row_changes(kind: Kind, before: Iterable[NamedTensor], after: Iterable[NamedTensor]) -> Iterator[RowDiff]:
    old, new = ({row.name: TensorType.of(row) for row in rows} for rows in (before, after))
    for name in sorted(old.keys() | new.keys(), key=natural):
        if old.get(name) != new.get(name):
            yield RowDiff(kind=kind, name=name, before=old.get(name), after=new.get(name))


def _constant_changes(one: Artifact, other: Artifact) -> tuple[TensorDiff, ...]:
    if one.manifest.files[CONSTANTS_NAME] == other.manifest.files[CONSTANTS_NAME]:
        return ()
    diff = compare_sides(_constant_side(one), _constant_side(other), values=True)
    return tuple(tensor for tensor in diff.tensors if tensor.status in ("changed", "retyped"))


def _constant_side(artifact: Artifact) -> Side:
    contents = artifact.constants()
    tensors = {row.name: contents[row.name] for row in (*artifact.manifest.constants, *artifact.manifest.state)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Side(SetInfo(where=str(artifact.path / CONSTANTS_NAME), tensors=len(tensors), nbytes=nbytes), tensors, {})


def _source_changes(before: Iterable[WeightSource], after: Iterable[WeightSource]) -> Iterator[SourceDiff]:
    old, new = ({source.weight: source for source in sources} for sources in (before, after))
    for weight in sorted(old.keys() | new.keys(), key=natural):
        one, other = old.get(weight), new.get(weight)
        diff = SourceDiff(
            weight=weight,
            before=one.keys if one else None,
            after=other.keys if other else None,
            computed_before=one is not None and one.transform is not None,
            computed_after=other is not None and other.transform is not None,
        )
        if diff.before != diff.after or diff.computed_before != diff.computed_after:
            yield diff


def _rank_changes(before: Manifest, after: Manifest) -> Iterator[CutDiff]:
    old, new = (_shares(manifest) for manifest in (before, after))
    for name in sorted(old.keys() | new.keys(), key=natural):
        one, other = old.get(name, "whole"), new.get(name, "whole")
        if one != other:
            yield CutDiff(weight=name, before=one, after=other)


def _shares(manifest: Manifest) -> dict[str, str]:
    """Return how each weight is cut, as text; under an empty name, the number of ranks."""
    if manifest.ranks is None:
        return {"": "one process"}
    size = manifest.ranks.size
    return {"": f"{size} ranks"} | {name: cut_text(cut, size) for name, cut in manifest.ranks.cuts.items()}


def _engine_changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    old, new = _engine_files(before), _engine_files(after)
    changes = {}
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            changes[name] = "added" if name not in old else "removed" if name not in new else "changed"
    return changes


def _engine_files(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the digests of the files of each engine and target."""
    engines: dict[str, dict[str, str]] = {}
    for path, digest in files.items():
        parts = path.split("/")
        if parts[0] == "engines":
            engines.setdefault(" ".join(parts[1:-1]), {})[parts[-1]] = digest
    return engines
