"""What is inspected: how it is opened, its facts in words, and all of it as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import Unsupported, listed, plural
from weightswap_runtime.format.artifact import Artifact, is_artifact
from weightswap_runtime.format.delta import DATA, ROWS, RUNS, DeltaStamp, delta_stamp, row_bytes
from weightswap_runtime.format.goldens import GoldensRecord, Value, artifact_goldens, record_beside, record_of
from weightswap_runtime.format.manifest import Manifest, NamedTensor, WeightSource
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.hash_tree import BLOCK_BYTES, LEAST_BLOCKS
from weightswap_runtime.tensors import BLOCK, TensorType, describe
from weightswap_tools.tensor_set import SetRequest, SetTensor, TensorSet, check_levels, natural, open_set, totals
from weightswap_tools.terminal import cut_text, human_bytes, ranks_text, signature_sentence, signature_text

Fact = tuple[str, str]  # a name and a text
Document = dict[str, Any]
_MOST_OTHER_LEVELS = 10  # of a checkpoint that are named


class ArtifactSubject(NamedTuple):
    """An artifact whose files match their digests."""

    artifact: Artifact
    record: GoldensRecord | None  # of its goldens

    @property
    def manifest(self) -> Manifest:
        return self.artifact.manifest

    @property
    def hash_trees_bytes(self) -> int:
        """What a server's hash trees take at most: those of all weights, where a few rows of each block change."""
        least = (LEAST_BLOCKS - 1) * BLOCK
        tables = (weight for weight in self.manifest.weights if weight.stride is None and weight.nbytes > least)
        return sum(table.nbytes // BLOCK * BLOCK_BYTES for table in tables)


class Change(NamedTuple):
    """What a delta replaces of a weight."""

    name: str
    type: TensorType
    nbytes: int
    ranges: int | None  # of bytes; None where the file names rows
    rows: int | None  # of the first dimension; None if parts of rows change, or there are none

    @property
    def text(self) -> str:
        """What is replaced, as `3 of 1000 rows`, or `2 ranges`."""
        if self.rows is not None:
            return f"{self.rows} of {plural(self.type.shape[0], 'row')}"
        return plural(self.ranges or 0, "range")


class WeightsSubject(NamedTuple):
    """A weight file, a checkpoint or a delta file; no values are read."""

    weights: TensorSet
    delta: DeltaStamp | None
    record: GoldensRecord | None  # of the goldens beside it
    changes: tuple[Change, ...] = ()  # of a delta

    @property
    def kind(self) -> str:
        if self.weights.weights is None:
            return "checkpoint"
        return "delta file" if self.delta else "weight file"

    @property
    def swappable(self) -> bool:
        """True if swaps accept the file."""
        return self.weights.weights is not None

    @property
    def stamp(self) -> Stamp | None:
        return self.weights.weights.stamp if self.weights.weights else None

    @property
    def digests(self) -> Mapping[str, str]:
        """The recorded digests by tensor; empty if there are none."""
        stamp = self.delta or self.stamp
        return stamp.digests if stamp else {}

    @property
    def labels(self) -> Mapping[str, str]:
        stamp = self.delta or self.stamp
        return stamp.labels if stamp else {}

    @property
    def casts(self) -> Mapping[str, Sequence[str]]:
        """The tensors that packing cast, by their dtype in the checkpoint."""
        return (self.stamp.cast or {}) if self.stamp else {}

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.tensors.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes by name, with layers in the order of their numbers."""
        return {name: self.weights.tensors[name].nbytes for name in sorted(self.weights.tensors, key=natural)}

    @property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """The other names of each tensor that has several."""
        return {name: others for name, others in self.weights.ties.items() if others}

    def in_order(self) -> list[tuple[str, SetTensor]]:
        """Return the tensors in the order of the files."""
        return sorted(self.weights.tensors.items(), key=lambda item: (item[1].file, item[1].offset or 0))


class GoldensSubject(NamedTuple):
    """A goldens file; only its header is read."""

    where: str
    record: GoldensRecord
    tensors: Mapping[str, SetTensor]

    @property
    def calls(self) -> list[tuple[int, str, str, str]]:
        """The number and method of each recorded call, and its inputs and outputs as text."""
        cases = enumerate(self.record.cases)
        return [(number, case.method, self._texts(case.inputs), self._texts(case.outputs)) for number, case in cases]

    def _texts(self, values: Iterable[Value]) -> str:
        return ", ".join(map(self._text, values))

    def _text(self, value: Value) -> str:
        """Return a value as `F32[2, 10]`, as an integer, or as "fixed" for a literal of the signature."""
        if isinstance(value, str):
            tensor = self.tensors.get(value)
            return describe(tensor) if tensor else f"{value}, which is missing"
        return "fixed" if value is None else str(value)


Subject = ArtifactSubject | WeightsSubject | GoldensSubject


@contextmanager
def open_subject(path: str, level: str | None = None) -> Iterator[Subject]:
    """Open the subject at a path or URL while the block runs.

    level: of a pickled or distributed checkpoint. Raises WeightswapError.
    """
    if is_artifact(path):
        if level is not None:
            raise Unsupported(f"{path}: is an artifact, which has no levels; leave --level out")
        artifact = Artifact.open(path)
        artifact.verify()
        goldens = artifact_goldens(artifact)
        yield ArtifactSubject(artifact, goldens.record if goldens else None)
        return
    with open_set(path, SetRequest(level)) as opened:
        check_levels([level], [opened])
        yield _tensors_subject(opened)


def _tensors_subject(opened: TensorSet) -> WeightsSubject | GoldensSubject:
    weights = opened.weights
    if weights is None:
        return WeightsSubject(opened, None, None)
    if record := record_of(weights):
        return GoldensSubject(opened.where, record, opened.tensors)
    delta, record = delta_stamp(weights), record_beside(weights.location)
    changes = tuple(_change(weights, *each) for each in delta.changes.items()) if delta else ()
    return WeightsSubject(opened, delta, record, changes)


def _change(weights: WeightSet, name: str, type_: TensorType) -> Change:
    nbytes = weights.tensors[DATA + name].nbytes
    if rows := weights.tensors.get(ROWS + name):
        return Change(name, type_, nbytes, None, rows.shape[0])
    runs = weights.tensors[RUNS + name]
    content, row = memoryview(bytearray(runs.nbytes)), row_bytes(type_.dtype, type_.shape)
    runs.source.read_into([content], runs.offset)
    ranges = ByteRanges.of(np.frombuffer(content, "<i8").reshape(-1, 2), memoryview(b""))
    return Change(name, type_, nbytes, runs.shape[0], nbytes // row if row and ranges.are_multiples(row) else None)


# Facts.


def artifact_facts(subject: ArtifactSubject) -> Iterator[Fact]:
    """Yield an artifact's ids, producer, methods and engines. A sentence with an empty name follows each method."""
    manifest = subject.manifest
    yield "artifact", str(subject.artifact.path)
    yield "graph id", manifest.graph_id
    yield "written by", f"weightswap {manifest.producer.weightswap}, torch {manifest.producer.torch}"
    yield "device", manifest.device
    for name, method in manifest.methods.items():
        yield "method", signature_text(name, method.signature)
        yield "", signature_sentence(name, method.signature)
    engines = [
        name if len(methods) == len(manifest.methods) else f"{name} ({', '.join(methods)} only)"
        for name, methods in _engine_methods(manifest).items()
    ]
    yield "engines", ", ".join(engines)
    if manifest.ranks:
        yield "ranks", ranks_text(manifest)
    if size := subject.hash_trees_bytes:
        yield "hash trees", f"at most {human_bytes(size)} of a server's memory, if rows of all weights are updated"
    yield from _record_facts(subject.record)


def _engine_methods(manifest: Manifest) -> dict[str, list[str]]:
    """Return the methods that are compiled for each engine, or each target of an engine."""
    methods: dict[str, list[str]] = {}
    for name in sorted(manifest.files):
        if name.startswith("engines/"):
            _, *target, file = name.split("/")
            methods.setdefault(" ".join(target), []).append(file.rpartition(".")[0])
    return {"torch": list(manifest.methods)} | methods


def _record_facts(record: GoldensRecord | None) -> Iterator[Fact]:
    """Yield a fact about goldens, if there are any."""
    if record is None:
        return
    counts = Counter(case.method for case in record.cases)
    cases = ", ".join(f"{count} of {method}" for method, count in counts.items())
    if record.weights_id is None:
        yield "inputs", f"{cases}; every set of weights must give finite outputs"
    else:
        yield "goldens", f"{cases}; of the weights {record.weights_id[:12]}; {exactness(record)}"


def exactness(record: GoldensRecord) -> str:
    """Return how exactly a server has to reproduce the recorded outputs."""
    if not record.has_outputs:
        return "outputs were not recorded; they must be finite"
    if record.tolerance:
        return f"within rtol {record.tolerance[0]:g}, atol {record.tolerance[1]:g}"
    return f"exact on {machine(record)}"


def machine(record: GoldensRecord) -> str:
    """Return the environment in which the calls were recorded."""
    environment = record.environment
    if environment is None:
        return "no machine: there were no weights"
    return f"torch {environment.torch}, {environment.device} {environment.capability}, {environment.threads} threads"


def weights_facts(subject: WeightsSubject) -> Iterator[Fact]:
    """Yield the file, ids, labels and casts of weights, and their goldens."""
    yield "file", subject.weights.where
    if len(subject.weights.files) > 1:
        yield "shards", ", ".join(subject.weights.files.values())
    yield from _level_facts(subject.weights)
    yield from _id_facts(subject)
    for label, text in subject.labels.items():
        yield "label", f"{label} = {text}"
    for dtype, names in subject.casts.items():
        yield "cast", f"{plural(len(names), 'tensor')} from {dtype}: {', '.join(names)}"
    yield from _record_facts(subject.record)


def _level_facts(weights: TensorSet) -> Iterator[Fact]:
    """Yield the level of the checkpoint that is shown, and its other levels."""
    if weights.level is not None:
        yield "level", weights.level or "the top"
    fullest = sorted(weights.others.items(), key=lambda other: -other[1])
    others = [f"{path or 'the top'} ({plural(count, 'tensor')})" for path, count in fullest]
    if others:
        yield "beside it", listed(others, _MOST_OTHER_LEVELS)


def _id_facts(subject: WeightsSubject) -> Iterator[Fact]:
    if subject.delta:
        yield "from", subject.delta.base
        yield "to", subject.delta.weights_id
        yield "graph id", subject.delta.graph_id
    elif subject.stamp:
        yield "weights id", subject.stamp.weights_id
        yield "graph id", subject.stamp.graph_id
    elif subject.swappable:
        yield "weights id", "not recorded; it is computed when the file is swapped in"
    else:
        yield "weights id", "not recorded; it is computed when the checkpoint is packed (weightswap pack)"


def goldens_facts(subject: GoldensSubject) -> Iterator[Fact]:
    """Yield the ids and environment of goldens, and how exactly they have to be reproduced."""
    record = subject.record
    yield "goldens", subject.where
    yield "weights id", record.weights_id or "none: inputs alone"
    yield "graph id", record.graph_id
    if record.has_outputs:
        yield "recorded", f"on {machine(record)}"
    yield "compared", exactness(record)


def size_fact(count: int, nbytes: int) -> str:
    """Return a number of tensors and their size, as `3 tensors, 1.2 MB`."""
    return f"{plural(count, 'tensor')}, {human_bytes(nbytes)}"


def cut_of(tensor: NamedTensor, manifest: Manifest) -> str:
    """Return how ranks share a weight; empty if each has the whole."""
    ranks = manifest.ranks
    return cut_text(ranks.cuts[tensor.name], ranks.size) if ranks and tensor.name in ranks.cuts else ""


def origin(tensor: NamedTensor, source: WeightSource | None) -> str:
    """Return the checkpoint keys of a weight, without its own names."""
    if source is None:
        return ""
    if source.transform is None:
        return ", ".join(key for key in source.keys if key not in tensor.names)
    return f"computed from {listed(source.keys, 4)}"


def origin_kind(tensor: NamedTensor, source: WeightSource) -> str:
    """Return how a weight is made from checkpoint keys: "computed", "as it is" or "renamed"."""
    if source.transform is not None:
        return "computed"
    return "as it is" if any(key in tensor.names for key in source.keys) else "renamed"


# Documents.


def document_of(subject: Subject) -> Document:
    """Return all facts of a subject. The field `kind` is its type; sizes are in bytes."""
    match subject:
        case ArtifactSubject():
            return _artifact_document(subject) | _goldens_document(subject.record)
        case WeightsSubject():
            return _weights_document(subject) | _goldens_document(subject.record)
        case GoldensSubject():
            tensors = {name: {"dtype": t.dtype, "shape": t.shape} for name, t in subject.tensors.items()}
            return {"kind": "goldens file", "path": subject.where, "record": subject.record, "tensors": tensors}


def _artifact_document(subject: ArtifactSubject) -> Document:
    manifest = subject.manifest
    methods = manifest.methods.items()
    weights = {weight.name: weight for weight in manifest.weights}
    engines = _engine_methods(manifest)
    return {
        "kind": "artifact",
        "path": subject.artifact.path,
        "total_bytes": manifest.total_bytes,
        "signatures": {name: signature_text(name, method.signature) for name, method in methods},
        "sentences": {name: signature_sentence(name, method.signature) for name, method in methods},
        "engines": list(engines),
        "engine_methods": engines,
        "hash_trees_bytes": subject.hash_trees_bytes,
        "modules": _modules({weight.name: weight.nbytes for weight in manifest.weights}),
        "origins": [
            {"weight": source.weight, "how": origin_kind(weights[source.weight], source), "keys": source.keys}
            for source in manifest.conversion.sources
        ],
        "manifest": manifest,
    }


def _weights_document(subject: WeightsSubject) -> Document:
    ties = subject.ties
    return {
        "kind": subject.kind,
        "path": subject.weights.where,
        "total_bytes": subject.total_bytes,
        "stamp": subject.delta or subject.stamp,
        "level": subject.weights.level,
        "other_levels": dict(subject.weights.others),
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "file": tensor.file,
                "offset": tensor.offset,
                "nbytes": tensor.nbytes,
                "tied_to": ties.get(name, ()),
            }
            for name, tensor in subject.weights.tensors.items()
        },
        "changes": [
            {"weight": each.name, "nbytes": each.nbytes, "ranges": each.ranges, "rows": each.rows}
            for each in subject.changes
        ],
        "modules": [] if subject.delta else _modules(subject.sizes),
    }


def _modules(sizes: Mapping[str, int]) -> list[Document]:
    return [{"path": path, "tensors": count, "nbytes": nbytes} for path, count, nbytes in totals(sizes)]


def _goldens_document(record: GoldensRecord | None) -> Document:
    if record is None:
        return {"goldens": None}
    cases = Counter(case.method for case in record.cases)
    facts = {"weights_id": record.weights_id, "tolerance": record.tolerance, "environment": record.environment}
    return {"goldens": facts | {"cases": cases}}
