"""The HTML report of what is inspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import structs

from weightswap_runtime.errors import plural
from weightswap_runtime.format.goldens import GoldensRecord
from weightswap_runtime.format.manifest import Manifest, Method, NamedTensor
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.tensors import describe
from weightswap_runtime.tensors import nbytes as size_of
from weightswap_tools.reports.blocks import (
    Block,
    Column,
    Facts,
    ModuleGraph,
    Note,
    Report,
    Section,
    Table,
    Treemap,
    TreemapNode,
    columns,
)
from weightswap_tools.tensor_set import Branch, SetTensor, grow, sizes_below, split_name, totals
from weightswap_tools.terminal import node_text, node_words, signature_sentence, signature_text

from .graph import module_nodes, read_outline
from .subject import (
    ArtifactSubject,
    GoldensSubject,
    Subject,
    WeightsSubject,
    artifact_facts,
    cut_of,
    exactness,
    goldens_facts,
    machine,
    origin_kind,
    size_fact,
    weights_facts,
)

_STATE = "Buffers that calls change. Every swap resets them to their values at export."
_CONSTANTS = "Tensors that belong to the graph and are stored in the artifact, not in weight files."
_SWAPPABLE = "Only headers were read. A swap reads the data and checks its digests."
_NOT_SWAPPABLE = "Only the description of the tensors was read, not their values."
_Cell = Callable[[str, SetTensor], str | int]


def report_of(subject: Subject) -> Report:
    """Return the report of a subject. Raises ArtifactError for a damaged graph."""
    match subject:
        case ArtifactSubject():
            return _artifact_report(subject)
        case WeightsSubject():
            return _weights_report(subject)
        case GoldensSubject():
            return _goldens_report(subject)


# Artifacts.


def _artifact_report(subject: ArtifactSubject) -> Report:
    """Return the report of an artifact. Raises ArtifactError for a damaged graph."""
    manifest = subject.manifest
    sections = (
        Section("Overview", (Facts(tuple(_overview(subject))),)),
        Section("Methods", tuple(_method_blocks(manifest))),
        _weights_section(manifest),
        *_other_tensors(manifest),
        *(_graph_section(subject, name) for name in manifest.methods),
        _checkpoints_section(manifest),
        *_goldens_section(subject.record),
        _files_section(subject),
    )
    subtitle = f"Artifact: {size_fact(len(manifest.weights), manifest.total_bytes)} of weights, which are not in it"
    path = subject.artifact.path
    name = path.resolve().name if isinstance(path, Path) else path.name
    return Report(name, subtitle, sections, "all digests match", True)


def _overview(subject: ArtifactSubject) -> Iterator[tuple[str, str]]:
    manifest = subject.manifest
    yield from (fact for fact in artifact_facts(subject) if fact[0] not in ("method", ""))
    yield "methods", ", ".join(manifest.methods)
    yield "weights", size_fact(len(manifest.weights), manifest.total_bytes)
    for role, tensors in (("state", manifest.state), ("constants", manifest.constants)):
        if tensors:
            yield role, size_fact(len(tensors), sum(tensor.nbytes for tensor in tensors))


def _method_blocks(manifest: Manifest) -> Iterator[Block]:
    for name, method in manifest.methods.items():
        yield Note(signature_sentence(name, method.signature))
        yield Facts((("short form", signature_text(name, method.signature)),))
        yield Table(columns("name", "way", "type", "in words"), tuple(_flows(method)), f"What {name} takes and returns")


def _flows(method: Method) -> Iterator[tuple[str, str, str, str]]:
    signature = method.signature
    for way, parameters in (("in", signature.args), ("in, by keyword", signature.kwargs)):
        for name, node in parameters:
            yield name, way, node_text(node), node_words(node)
    for leaf in leaves(signature.output):
        yield leaf.name, "out", node_text(leaf), node_words(leaf)


def _weights_section(manifest: Manifest) -> Section:
    sizes = {weight.name: weight.nbytes for weight in manifest.weights}
    details = {weight.name: describe(weight) for weight in manifest.weights}
    blocks = (
        _weights_map(sizes, details, "all weights"),
        _modules_table(sizes),
        _tensor_table(manifest.weights, "Weights", {row.name: cut_of(row, manifest) for row in manifest.weights}),
    )
    return Section("Weights", blocks, "The contents of a weight file: parameters, and buffers that no call changes.")


def _other_tensors(manifest: Manifest) -> Iterator[Section]:
    if manifest.state:
        yield Section("State", (_tensor_table(manifest.state, "State"),), _STATE)
    if manifest.constants:
        yield Section("Constants", (_tensor_table(manifest.constants, "Constants"),), _CONSTANTS)


def _tensor_table(tensors: tuple[NamedTensor, ...], caption: str, cuts: Mapping[str, str] | None = None) -> Table:
    heads = (*columns("name", "dtype", "shape"), Column("size", "bytes"))
    rows: list[tuple[str | int, ...]] = [(t.name, t.dtype, _shape_text(t.shape), t.nbytes) for t in tensors]
    if any(tensor.aliases for tensor in tensors):
        heads = (*heads, Column("tied to"))
        rows = [(*row, ", ".join(tensor.aliases)) for row, tensor in zip(rows, tensors, strict=True)]
    if cuts and any(cuts.values()):
        heads = (*heads, Column("on ranks"))
        rows = [(*row, cuts[tensor.name]) for row, tensor in zip(rows, tensors, strict=True)]
    return Table(heads, tuple(rows), caption)


def _graph_section(subject: ArtifactSubject, method: str) -> Section:
    outline = read_outline(subject, method)
    if isinstance(outline, str):
        return Section(f"Graph of {method}", (Note(outline),))
    operators = sum((module.calls for module in outline.values()), Counter[str]())
    rows = tuple(operators.most_common())
    table = Table((Column("operator"), Column("calls", "number")), rows, "Operators")
    graph = ModuleGraph(module_nodes(outline, subject.manifest), "Modules, in the order of their first call")
    calls = f"{plural(operators.total(), 'call')} of {plural(len(rows), 'operator')}, by module."
    return Section(f"Graph of {method}", (graph, table), calls)


def _checkpoints_section(manifest: Manifest) -> Section:
    conversion = manifest.conversion
    weights = {weight.name: weight for weight in manifest.weights}
    rows = tuple(
        (
            source.weight,
            origin_kind(weights[source.weight], source),
            (" or " if source.transform is None else ", ").join(source.keys),
        )
        for source in conversion.sources
    )
    table = Table(columns("weight", "how", "checkpoint keys"), rows, "How checkpoints become weights")
    blocks: list[Block] = [table]
    if conversion.untraceable:
        why = f"Checkpoints must be packed, as loading them could not be recorded: {conversion.untraceable}"
        blocks.insert(0, Note(why, "bad"))
    roles = dict.fromkeys(conversion.ignored, "optional, and ignored")
    roles |= dict.fromkeys(conversion.needed, "required, though no weight is made of it")
    if roles:
        blocks.append(Table(columns("key", "role"), tuple(roles.items()), "Other checkpoint keys"))
    return Section("Checkpoints", tuple(blocks))


def _files_section(subject: ArtifactSubject) -> Section:
    rows = tuple((name, len(subject.artifact.read(name)), digest) for name, digest in subject.manifest.files.items())
    table = Table((Column("file"), Column("size", "bytes"), Column("BLAKE3 digest")), rows)
    return Section("Files", (table,))


# Weight files, checkpoints and deltas.


def _weights_report(subject: WeightsSubject) -> Report:
    note = _SWAPPABLE if subject.swappable else _NOT_SWAPPABLE
    sections = [Section("Overview", (Facts(tuple(weights_facts(subject))),), note)]
    sections.append(_delta_section(subject) if subject.delta else _tensors_section(subject))
    files = subject.weights.files
    if len(files) > 1 and all(tensor.file in files for tensor in subject.weights.tensors.values()):
        sections.append(_shards_section(subject))
    sections += _goldens_section(subject.record)
    kind = "Delta file" if subject.delta else "Weight file" if subject.stamp else "Checkpoint"
    name = Path(subject.weights.where).name or subject.weights.where
    total = size_fact(len(subject.weights.tensors), subject.total_bytes)
    return Report(name, f"{kind}: {total}", tuple(sections))


def _tensors_section(subject: WeightsSubject) -> Section:
    tensors = dict(subject.in_order())
    details = {name: describe(tensor) for name, tensor in tensors.items()}
    sizes = subject.sizes
    heads, cells = zip(*_tensor_columns(subject), strict=True)
    rows = tuple(tuple(cell(name, tensor) for cell in cells) for name, tensor in tensors.items())
    table = Table(heads, rows, "Tensors, as they lie in the file")
    return Section("Tensors", (_weights_map(sizes, details, "all tensors"), _modules_table(sizes), table))


def _tensor_columns(subject: WeightsSubject) -> Iterator[tuple[Column, _Cell]]:
    """Yield the columns that have content, each with the function that gives its cells."""
    yield Column("name"), lambda name, _: name
    yield Column("dtype"), lambda _, tensor: tensor.dtype
    yield Column("shape"), lambda _, tensor: _shape_text(tensor.shape)
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


def _shards_section(subject: WeightsSubject) -> Section:
    tensors, files = subject.weights.tensors.values(), subject.weights.files
    sizes = {name: [tensor.nbytes for tensor in tensors if tensor.file == file] for file, name in files.items()}
    rows = tuple((name, len(nbytes), sum(nbytes)) for name, nbytes in sizes.items())
    return Section("Shards", (Table((Column("file"), Column("tensors", "number"), Column("size", "bytes")), rows),))


def _delta_section(subject: WeightsSubject) -> Section:
    rows = tuple(
        (each.name, describe(each.type), size_of(each.type.dtype, each.type.shape), each.nbytes, each.text)
        for each in subject.changes
    )
    heads = (*columns("weight", "type"), *columns("size", "replaced", kind="bytes"), Column("in"))
    sizes = {each.name: each.nbytes for each in subject.changes}
    details = {each.name: f"{describe(each.type)}, {each.text}" for each in subject.changes}
    return Section(
        "Changes",
        (_weights_map(sizes, details, "all replaced values"), Table(heads, rows, "Weights that change")),
        "Weights that are not listed are equal in both sets.",
    )


# Goldens.


def _goldens_report(subject: GoldensSubject) -> Report:
    """Return a report with the facts of a goldens file and the types of the recorded values."""
    cases = tuple(subject.calls)
    heads = (Column("case", "number"), *columns("method", "inputs", "outputs"))
    overview = Section("Overview", (Facts(tuple(goldens_facts(subject))),))
    calls = Section("Recorded calls", (Table(heads, cases, "Inputs, and the outputs of the eager model"),))
    return Report(Path(subject.where).name, f"Goldens: {plural(len(cases), 'recorded call')}", (overview, calls))


def _goldens_section(record: GoldensRecord | None) -> Iterator[Section]:
    """Yield a section about the goldens in an artifact or beside a weight file, if there are any."""
    if record is None:
        return
    facts = (
        ("weights id", record.weights_id or "none: inputs alone"),
        ("calls", plural(len(record.cases), "recorded call")),
        ("recorded on", machine(record)),
        ("compared", exactness(record)),
    )
    if record.has_outputs:
        yield Section("Goldens", (Facts(facts),), "Calls of the eager model that staged weights must reproduce.")
    else:
        yield Section("Inputs", (Facts(facts),), "Inputs for which every set of weights must give finite outputs.")


# Sizes by module.


def _weights_map(sizes: Mapping[str, int], details: Mapping[str, str], title: str) -> Treemap:
    """Return a treemap of named tensors. sizes: in bytes. details: a text for each tensor. title: the root's name."""
    root = grow(sizes)
    sums = sizes_below(root, sizes)

    def area(branch: Branch) -> TreemapNode:
        tensors = [TreemapNode(split_name(name)[1], sizes[name], details[name]) for name in branch.names]
        children = (*(area(child) for child in branch.branches.values()), *tensors)
        if len(children) == 1 and branch.parts:  # merge an area that another would fill
            return structs.replace(children[0], name=f"{branch.name}.{children[0].name}")
        return TreemapNode(branch.name or title, sums[branch], f"{len(children)} inside", children)

    return Treemap(area(root), "bytes", "Bytes by module")


def _modules_table(sizes: Mapping[str, int]) -> Table:
    """Return a table of modules, with the number and the bytes of the tensors in them and below."""
    rows = tuple((path or "(model)", count, nbytes) for path, count, nbytes in totals(sizes))
    return Table((Column("module"), Column("tensors", "number"), Column("size", "bytes")), rows, "By module")


def _shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as `3 × 5`, or `scalar`."""
    return " × ".join(map(str, shape)) or "scalar"
