"""The HTML report of a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from weightswap_runtime.format.delta_file import DATA, RUNS
from weightswap_runtime.tensors.dtypes import describe
from weightswap_runtime.tensors.dtypes import nbytes as size_of
from weightswap_tools.reports.blocks import Column, Facts, Report, Section, Table, columns
from weightswap_tools.tensor_set import SetTensor

from .artifact_page import artifact_report
from .facts import shape_text, size_fact, weights_facts
from .goldens_page import goldens_report, goldens_section
from .maps import modules_table, weights_map
from .subject import ArtifactSubject, GoldensSubject, Subject, WeightsSubject


def report_of(subject: Subject) -> Report:
    """Return the report of a subject. Raises ArtifactError for a damaged graph."""
    match subject:
        case ArtifactSubject():
            return artifact_report(subject)
        case WeightsSubject():
            return _weights_report(subject)
        case GoldensSubject():
            return goldens_report(subject)


def _weights_report(subject: WeightsSubject) -> Report:
    note = _SWAPPABLE if subject.swappable else _NOT_SWAPPABLE
    sections = [Section("Overview", (Facts(tuple(weights_facts(subject))),), note)]
    sections.append(_delta_section(subject) if subject.delta else _tensors_section(subject))
    if len(subject.weights.files) > 1:
        sections.append(_files_section(subject))
    sections += goldens_section(subject.record)
    kind = "Delta file" if subject.delta else "Weight file" if subject.stamp else "Checkpoint"
    name = Path(subject.weights.where).name or subject.weights.where
    total = size_fact(len(subject.weights.tensors), subject.total_bytes)
    return Report(name, f"{kind}: {total}", tuple(sections))


_SWAPPABLE = "Only headers were read. A swap reads the data and checks its digests."
_NOT_SWAPPABLE = "Only the description of the tensors was read, not their values."


def _tensors_section(subject: WeightsSubject) -> Section:
    tensors = dict(subject.in_order())
    details = {name: describe(tensor) for name, tensor in tensors.items()}
    sizes = subject.sizes
    blocks = (weights_map(sizes, details, "all tensors"), modules_table(sizes), _tensors_table(subject, tensors))
    return Section("Tensors", blocks)


def _tensors_table(subject: WeightsSubject, tensors: Mapping[str, SetTensor]) -> Table:
    heads, cells = zip(*_tensor_columns(subject), strict=True)
    rows = (tuple(cell(name, tensor) for cell in cells) for name, tensor in tensors.items())
    return Table(heads, tuple(rows), "Tensors, as they lie in the file")


_Cell = Callable[[str, SetTensor], str | int]


def _tensor_columns(subject: WeightsSubject) -> Iterator[tuple[Column, _Cell]]:
    """Yield the columns that have content, each with the function that gives its cells."""
    yield Column("name"), lambda name, _: name
    yield Column("dtype"), lambda _, tensor: tensor.dtype
    yield Column("shape"), lambda _, tensor: shape_text(tensor.shape)
    yield Column("size", "bytes"), lambda _, tensor: tensor.nbytes
    if all(tensor.offset is not None for tensor in subject.weights.tensors.values()):
        yield Column("offset", "number"), lambda _, tensor: tensor.offset or 0
    if digests := subject.digests:
        yield Column("digest"), lambda name, _: digests[name][:16]
    if casts := {name: dtype for dtype, names in subject.casts.items() for name in names}:
        yield Column("cast from"), lambda name, _: casts.get(name, "")
    if ties := subject.ties:
        yield Column("tied to"), lambda name, _: ", ".join(ties.get(name, ()))
    if len(files := subject.weights.files) > 1:
        yield Column("file"), lambda _, tensor: files.get(tensor.file, "")


def _files_section(subject: WeightsSubject) -> Section:
    tensors, files = subject.weights.tensors.values(), subject.weights.files
    sizes = {name: [tensor.nbytes for tensor in tensors if tensor.file == file] for file, name in files.items()}
    rows = tuple((name, len(nbytes), sum(nbytes)) for name, nbytes in sizes.items())
    return Section("Shards", (Table((Column("file"), Column("tensors", "number"), Column("size", "bytes")), rows),))


def _delta_section(subject: WeightsSubject) -> Section:
    changes = subject.delta.changes if subject.delta else {}
    tensors = subject.weights.tensors
    rows = tuple(
        (
            name,
            describe(changed),
            size_of(changed.dtype, changed.shape),
            tensors[DATA + name].nbytes,
            tensors[RUNS + name].shape[0],
        )
        for name, changed in changes.items()
    )
    heads = (*columns("weight", "type"), *columns("size", "replaced", kind="bytes"), Column("runs", "number"))
    sizes = {name: tensors[DATA + name].nbytes for name in changes}
    details = {name: describe(changed) for name, changed in changes.items()}
    return Section(
        "Changes",
        (weights_map(sizes, details, "all replaced values"), Table(heads, rows, "Weights that change")),
        "Weights that are not listed are equal in both sets.",
    )
