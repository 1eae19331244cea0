"""Comparing two artifacts: what their graphs are, what they take, and whether weight files of one fit the other."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from weightswap_runtime.engines.graphs.archives import calls, check_records
from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import ADAPTER_NAME, CONSTANTS_NAME, Manifest, Method, NamedTensor, WeightSource
from weightswap_runtime.format.name_matching import by_fqn
from weightswap_runtime.format.signature import Signature
from weightswap_runtime.messages import plural
from weightswap_runtime.tensors.dtypes import TensorType
from weightswap_tools.module_tree import natural

from .report import DiffDocument, Level, SetInfo, TensorDiff
from .sides import Side
from .weights import compare_sides

Kind = Literal["weights", "state", "constants"]
KINDS: tuple[Kind, ...] = ("weights", "state", "constants")
PREFIX = "torch.ops."


class ArtifactInfo(DiffDocument, frozen=True):
    """One side of the comparison."""

    where: str
    graph_id: str
    torch: str


class OperatorCount(DiffDocument, frozen=True):
    """How often a method calls an operator, such as `aten.linear.default`."""

    name: str
    before: int
    after: int


class MethodDiff(DiffDocument, frozen=True):
    """A method that is not the same in both: None where the artifact does not have it.

    `operators` are those that are called more or less often than before.
    """

    name: str
    before: Signature | None
    after: Signature | None
    operators: tuple[OperatorCount, ...] = ()
    same_graph: bool = False

    @property
    def same_signature(self) -> bool:
        return self.before == self.after


class RowDiff(DiffDocument, frozen=True):
    """A row of the tables of weights, state and constants that only one artifact has, or that has another type."""

    kind: Kind
    name: str
    before: TensorType | None
    after: TensorType | None


class SourceDiff(DiffDocument, frozen=True):
    """A weight that comes from other keys of a checkpoint than before; `computed` from them, or one of them."""

    weight: str
    before: tuple[str, ...] | None
    after: tuple[str, ...] | None
    computed_before: bool
    computed_after: bool


class ArtifactsDiff(DiffDocument, frozen=True):
    """The comparison of two artifacts.

    `fits`: whether weight files packed for either have what the other's graph needs; `misfits` say why not.
    `constants` are the constants, and the initial values of the state, of which both have one and the values changed.
    `transforms_changed`: the graph that computes weights from a checkpoint. `engines` -> "added", "removed", "changed".
    """

    before: ArtifactInfo
    after: ArtifactInfo
    fits: bool
    misfits: tuple[str, ...]
    methods: tuple[MethodDiff, ...]
    rows: tuple[RowDiff, ...]
    constants: tuple[TensorDiff, ...]
    sources: tuple[SourceDiff, ...]
    transforms_changed: bool
    engines: dict[str, str]

    @property
    def same_graph(self) -> bool:
        return self.before.graph_id == self.after.graph_id

    @property
    def verdict(self) -> str:
        """Whether weight files of one can be swapped in behind the other, in a sentence."""
        if self.same_graph:
            return "The same graph: weight files of one fit the other."
        if self.fits:
            return (
                "Another graph, with the same weights: weight files of one fit the other with allow_other_graph=True."
            )
        return f"Weight files of one do not fit the other: {plural(len(self.misfits), 'problem')}."

    @property
    def level(self) -> Level:
        """Alarm where weight files do not fit; notice where the graph or the way from a checkpoint is another."""
        if not self.fits:
            return "alarm"
        others = self.sources or self.transforms_changed or self.engines
        return "same" if self.same_graph and not others else "notice"


def compare_artifacts(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> ArtifactsDiff:
    """What is different between two artifacts. Needs no torch: graphs are read, not run.

    Raises ArtifactError for what is no artifact, or has files that are not those of its manifest.
    """
    one, other = Artifact.open(before), Artifact.open(after)
    old, new = one.manifest, other.manifest
    misfits = (*_misfits("old weights, new graph", old, new), *_misfits("new weights, old graph", new, old))
    return ArtifactsDiff(
        before=_info(one),
        after=_info(other),
        fits=not misfits,
        misfits=misfits,
        methods=tuple(_methods(one, other)),
        rows=tuple(row for kind in KINDS for row in _rows(kind, getattr(old, kind), getattr(new, kind))),
        constants=_constants(one, other),
        sources=tuple(_sources(old.adapter.sources, new.adapter.sources)),
        transforms_changed=old.files.get(ADAPTER_NAME) != new.files.get(ADAPTER_NAME),
        engines=_engines(old.files, new.files),
    )


def _info(artifact: Artifact) -> ArtifactInfo:
    return ArtifactInfo(where=str(artifact.path), graph_id=artifact.graph_id, torch=artifact.manifest.producer.torch)


def _misfits(which: str, packed: Manifest, served: Manifest) -> Iterator[str]:
    """What is wrong with a weight file that was packed for one graph behind another."""
    problems = by_fqn(served).match({row.name: row for row in packed.weights}).problems
    yield from (f"{which}: {problem}" for problem in problems)


def _methods(one: Artifact, other: Artifact) -> Iterator[MethodDiff]:
    old, new = one.manifest.methods, other.manifest.methods
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        same_graph = _graph_digest(one, before) == _graph_digest(other, after)
        if before != after or not same_graph:
            yield MethodDiff(
                name=name,
                before=before.signature if before else None,
                after=after.signature if after else None,
                operators=tuple(_operator_changes(_operators(one, before), _operators(other, after))),
                same_graph=same_graph,
            )


def _graph_digest(artifact: Artifact, method: Method | None) -> str | None:
    return artifact.manifest.files[method.graph] if method else None


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
            yield OperatorCount(name=name.removeprefix(PREFIX), before=before[name], after=after[name])


def _rows(kind: Kind, before: Iterable[NamedTensor], after: Iterable[NamedTensor]) -> Iterator[RowDiff]:
    old, new = ({row.name: TensorType.of(row) for row in rows} for rows in (before, after))
    for name in sorted(old.keys() | new.keys(), key=natural):
        if old.get(name) != new.get(name):
            yield RowDiff(kind=kind, name=name, before=old.get(name), after=new.get(name))


def _constants(one: Artifact, other: Artifact) -> tuple[TensorDiff, ...]:
    if one.manifest.files[CONSTANTS_NAME] == other.manifest.files[CONSTANTS_NAME]:
        return ()
    diff = compare_sides(_constant_side(one), _constant_side(other), values=True)
    return tuple(tensor for tensor in diff.tensors if tensor.status in ("changed", "retyped"))


def _constant_side(artifact: Artifact) -> Side:
    found = artifact.constants()
    tensors = {row.name: found[row.name] for row in (*artifact.manifest.constants, *artifact.manifest.state)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Side(SetInfo(where=str(artifact.path / CONSTANTS_NAME), tensors=len(tensors), nbytes=nbytes), tensors, {})


def _sources(before: Iterable[WeightSource], after: Iterable[WeightSource]) -> Iterator[SourceDiff]:
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


def _engines(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    old, new = _compiled(before), _compiled(after)
    changes = {}
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            changes[name] = "added" if name not in old else "removed" if name not in new else "changed"
    return changes


def _compiled(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The files of each engine, and of its target where there are several, with their digests."""
    engines: dict[str, dict[str, str]] = {}
    for path, digest in files.items():
        parts = path.split("/")
        if parts[0] == "engines":
            engines.setdefault(" ".join(parts[1:-1]), {})[parts[-1]] = digest
    return engines
