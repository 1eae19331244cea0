"""The JSON document of a subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from weightswap_runtime.format.goldens import GoldensRecord
from weightswap_runtime.format.manifest import Manifest
from weightswap_tools.module_tree import totals
from weightswap_tools.tensor_set import SetTensor
from weightswap_tools.wording import signature_sentence, signature_text

from .facts import engine_methods, origin_kind
from .subject import ArtifactSubject, GoldensSubject, Subject, WeightsSubject

Document = dict[str, Any]


def document_of(subject: Subject) -> Document:
    """Return all facts of a subject. The field `kind` is its type; sizes are in bytes."""
    match subject:
        case ArtifactSubject():
            return _artifact(subject) | _goldens_part(subject.record)
        case WeightsSubject():
            return _weights(subject) | _goldens_part(subject.record)
        case GoldensSubject():
            return _goldens(subject)


def _artifact(subject: ArtifactSubject) -> Document:
    manifest = subject.manifest
    methods = manifest.methods.items()
    return {
        "kind": "artifact",
        "path": subject.artifact.path,
        "total_bytes": manifest.total_bytes,
        "signatures": {name: signature_text(name, method.signature) for name, method in methods},
        "sentences": {name: signature_sentence(name, method.signature) for name, method in methods},
        "engines": list(engine_methods(manifest)),
        "engine_methods": engine_methods(manifest),
        "modules": _modules({weight.name: weight.nbytes for weight in manifest.weights}),
        "origins": _origins(manifest),
        "manifest": manifest,
    }


def _modules(sizes: Mapping[str, int]) -> list[Document]:
    return [{"path": path, "tensors": count, "nbytes": nbytes} for path, count, nbytes in totals(sizes)]


def _origins(manifest: Manifest) -> list[Document]:
    weights = {weight.name: weight for weight in manifest.weights}
    return [
        {"weight": source.weight, "how": origin_kind(weights[source.weight], source), "keys": source.keys}
        for source in manifest.adapter.sources
    ]


def _goldens_part(record: GoldensRecord | None) -> Document:
    if record is None:
        return {"goldens": None}
    cases = Counter(case.method for case in record.cases)
    facts = {"weights_id": record.weights_id, "tolerance": record.tolerance, "environment": record.environment}
    return {"goldens": facts | {"cases": cases}}


def _weights(subject: WeightsSubject) -> Document:
    tensors, ties = subject.weights.tensors, subject.ties
    return {
        "kind": subject.kind,
        "path": subject.weights.where,
        "total_bytes": subject.total_bytes,
        "stamp": subject.delta or subject.stamp,
        "level": subject.weights.level,
        "other_levels": dict(subject.weights.others),
        "tensors": {name: _tensor(tensor, ties.get(name, ())) for name, tensor in tensors.items()},
        "modules": [] if subject.delta else _modules(subject.sizes),
    }


def _tensor(tensor: SetTensor, ties: tuple[str, ...]) -> Document:
    location = {"file": tensor.file, "offset": tensor.offset, "nbytes": tensor.nbytes}
    return {"dtype": tensor.dtype, "shape": tensor.shape} | location | {"tied_to": ties}


def _goldens(subject: GoldensSubject) -> Document:
    tensors = {name: {"dtype": t.dtype, "shape": t.shape} for name, t in subject.tensors.items()}
    return {"kind": "goldens file", "path": subject.where, "record": subject.record, "tensors": tensors}
