"""The terminal output of a subject: facts, then tables of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightswap_runtime.format.manifest import Manifest, NamedTensor
from weightswap_runtime.messages import plural
from weightswap_runtime.tensors.dtypes import describe
from weightswap_tools.terminal import human_bytes, print_table, say

from .facts import Fact, artifact_facts, goldens_facts, origin, size_fact, weights_facts
from .subject import ArtifactSubject, GoldensSubject, Subject, WeightsSubject


def print_text(subject: Subject) -> None:
    """Print a subject for people."""
    match subject:
        case ArtifactSubject():
            _print_artifact(subject)
        case WeightsSubject():
            _print_weights(subject)
        case GoldensSubject():
            _print_goldens(subject)


def print_facts(facts: Iterable[Fact]) -> None:
    """Print a line for each fact, with aligned texts."""
    for name, text in facts:
        say(f"{name:<10} {text}")


def _print_artifact(subject: ArtifactSubject) -> None:
    manifest = subject.manifest
    print_facts(artifact_facts(subject))
    size = size_fact(len(manifest.weights), manifest.total_bytes)
    _print_tensors(f"weights: {size}, not in the artifact", manifest.weights, manifest)
    for title, tensors in (("state", manifest.state), ("constants", manifest.constants)):
        if tensors:
            _print_tensors(f"{title}: {size_fact(len(tensors), sum(t.nbytes for t in tensors))}", tensors, manifest)
    adapter = manifest.adapter
    _print_keys("checkpoint keys that are left out", adapter.ignored)
    _print_keys("checkpoint keys that are required, though no weight is made of them", adapter.needed)
    if adapter.untraceable:
        say(f"checkpoints must be packed, as loading them could not be recorded: {adapter.untraceable}")


def _print_keys(title: str, keys: Sequence[str]) -> None:
    if keys:
        say(f"{title}: {', '.join(keys)}")


def _print_tensors(title: str, tensors: tuple[NamedTensor, ...], manifest: Manifest) -> None:
    sources = {source.weight: source for source in manifest.adapter.sources}
    rows = [
        [
            tensor.name,
            describe(tensor),
            human_bytes(tensor.nbytes),
            ", ".join(tensor.aliases),
            origin(tensor, sources.get(tensor.name)),
        ]
        for tensor in tensors
    ]
    _print_table(title, ["name", "type", "size", "tied to", "in checkpoints"], rows)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without empty columns after the third."""
    kept = [index for index in range(len(columns)) if index < 3 or any(row[index] for row in rows)]
    print_table(title, [columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _print_weights(subject: WeightsSubject) -> None:
    print_facts(weights_facts(subject))
    changes = subject.delta.changes if subject.delta else {}
    print_facts(("changes", f"{name}, {describe(changed)}") for name, changed in changes.items())
    ties = subject.ties
    rows = [
        [
            name,
            describe(tensor),
            human_bytes(tensor.nbytes),
            subject.digests.get(name, "")[:12],
            ", ".join(ties.get(name, ())),
        ]
        for name, tensor in subject.in_order()
    ]
    columns = ["name", "type", "size", "digest", "tied to"]
    _print_table(size_fact(len(rows), subject.total_bytes), columns, rows)


def _print_goldens(subject: GoldensSubject) -> None:
    print_facts(goldens_facts(subject))
    rows = [[str(number), *texts] for number, *texts in subject.calls]
    print_table(plural(len(rows), "recorded call"), ["case", "method", "inputs", "outputs"], rows)
