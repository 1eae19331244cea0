"""Facts of a subject, as pairs of a name and a text, for terminals and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weightswap_runtime.format.delta_file import DeltaStamp
from weightswap_runtime.format.goldens import GoldensRecord
from weightswap_runtime.format.manifest import Manifest, NamedTensor, WeightSource
from weightswap_runtime.messages import listed, plural
from weightswap_tools.tensor_set import TensorSet
from weightswap_tools.terminal import human_bytes
from weightswap_tools.wording import signature_sentence, signature_text

from .subject import ArtifactSubject, GoldensSubject, WeightsSubject

Fact = tuple[str, str]
MOST_LEVELS = 10


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
    engines = engine_methods(manifest).items()
    yield "engines", ", ".join(_engine_text(manifest, name, methods) for name, methods in engines)
    yield from record_facts(subject.record)


def engine_methods(manifest: Manifest) -> dict[str, list[str]]:
    """Return the methods that are compiled for each engine, or each target of an engine."""
    methods: dict[str, list[str]] = {}
    for name in sorted(manifest.files):
        if name.startswith("engines/"):
            _, *target, file = name.split("/")
            methods.setdefault(" ".join(target), []).append(file.rpartition(".")[0])
    return {"torch": list(manifest.methods)} | methods


def _engine_text(manifest: Manifest, name: str, methods: list[str]) -> str:
    return name if len(methods) == len(manifest.methods) else f"{name} ({', '.join(methods)} only)"


def record_facts(record: GoldensRecord | None) -> Iterator[Fact]:
    """Yield a line about goldens, if there are any."""
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
    yield from _delta_facts(subject.delta) if subject.delta else _stamp_facts(subject)
    for label, text in subject.labels.items():
        yield "label", f"{label} = {text}"
    for dtype, names in subject.casts.items():
        yield "cast", f"{plural(len(names), 'tensor')} from {dtype}: {', '.join(names)}"
    yield from record_facts(subject.record)


def _level_facts(weights: TensorSet) -> Iterator[Fact]:
    """Yield the level of the checkpoint that is shown, and its other levels."""
    if weights.level is not None:
        yield "level", weights.level or "the top"
    fullest = sorted(weights.others.items(), key=lambda other: -other[1])
    others = [f"{path or 'the top'} ({plural(count, 'tensor')})" for path, count in fullest]
    if others:
        yield "beside it", listed(others, MOST_LEVELS)


def _delta_facts(delta: DeltaStamp) -> Iterator[Fact]:
    yield "from", delta.base
    yield "to", delta.weights_id
    yield "graph id", delta.graph_id


def _stamp_facts(subject: WeightsSubject) -> Iterator[Fact]:
    if subject.stamp:
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


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as `3 × 5`, or `scalar`."""
    return " × ".join(map(str, shape)) or "scalar"
