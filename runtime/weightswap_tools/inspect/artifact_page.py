"""The HTML report of an artifact: methods in words, weights as a treemap and tables, graphs by module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weightswap_runtime.format.manifest import Adapter, Manifest, Method, NamedTensor
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.messages import plural
from weightswap_runtime.tensors.dtypes import describe
from weightswap_tools.reports.blocks import Block, Column, Facts, ModuleGraph, Note, Report, Section, Table, columns
from weightswap_tools.wording import node_text, node_words, signature_sentence, signature_text

from .facts import artifact_facts, origin_kind, shape_text, size_fact
from .goldens_page import goldens_section
from .maps import modules_table, weights_map
from .module_graph import module_nodes, read_outline
from .subject import ArtifactSubject


def artifact_report(subject: ArtifactSubject) -> Report:
    """Return the report of an artifact. Raises ArtifactError for a damaged graph."""
    manifest = subject.manifest
    sections = [
        Section("Overview", (Facts(tuple(_overview(subject))),)),
        Section("Methods", tuple(_method_blocks(manifest))),
        _weights_section(manifest),
        *_other_tensors(manifest),
        *(_graph_section(subject, name) for name in manifest.methods),
        _checkpoints_section(manifest),
        *goldens_section(subject.record),
        _files_section(subject),
    ]
    subtitle = f"Artifact: {size_fact(len(manifest.weights), manifest.total_bytes)} of weights, which are not in it"
    path = subject.artifact.path
    name = path.resolve().name if isinstance(path, Path) else path.name
    return Report(name, subtitle, tuple(sections), "all digests match", True)


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
        heads = columns("name", "way", "type", "in words")
        yield Table(heads, tuple(_flows(method)), f"What {name} takes and returns")


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
        weights_map(sizes, details, "all weights"),
        modules_table(sizes),
        _tensor_table(manifest.weights, "Weights"),
    )
    return Section("Weights", blocks, "The contents of a weight file: parameters, and buffers that no call changes.")


def _tensor_table(tensors: tuple[NamedTensor, ...], caption: str) -> Table:
    heads = (*columns("name", "dtype", "shape"), Column("size", "bytes"))
    rows: list[tuple[str | int, ...]] = [(t.name, t.dtype, shape_text(t.shape), t.nbytes) for t in tensors]
    if any(tensor.aliases for tensor in tensors):
        heads = (*heads, Column("tied to"))
        rows = [(*row, ", ".join(tensor.aliases)) for row, tensor in zip(rows, tensors, strict=True)]
    return Table(heads, tuple(rows), caption)


def _other_tensors(manifest: Manifest) -> Iterator[Section]:
    if manifest.state:
        yield Section("State", (_tensor_table(manifest.state, "State"),), _STATE)
    if manifest.constants:
        yield Section("Constants", (_tensor_table(manifest.constants, "Constants"),), _CONSTANTS)


_STATE = "Buffers that calls change. Every swap resets them to their values at export."
_CONSTANTS = "Tensors that belong to the graph and are stored in the artifact, not in weight files."


def _graph_section(subject: ArtifactSubject, method: str) -> Section:
    outline = read_outline(subject, method)
    if isinstance(outline, str):
        return Section(f"Graph of {method}", (Note(outline),))
    operators = outline.operators
    rows = tuple(operators.most_common())
    table = Table((Column("operator"), Column("calls", "number")), rows, "Operators")
    graph = ModuleGraph(module_nodes(outline, subject.manifest), "Modules, in the order of their first call")
    calls = f"{plural(operators.total(), 'call')} of {plural(len(rows), 'operator')}, by module."
    return Section(f"Graph of {method}", (graph, table), calls)


def _checkpoints_section(manifest: Manifest) -> Section:
    adapter = manifest.adapter
    weights = {weight.name: weight for weight in manifest.weights}
    rows = tuple(
        (
            source.weight,
            origin_kind(weights[source.weight], source),
            (" or " if source.transform is None else ", ").join(source.keys),
        )
        for source in adapter.sources
    )
    table = Table(columns("weight", "how", "checkpoint keys"), rows, "How checkpoints become weights")
    return Section("Checkpoints", (*_checkpoint_notes(adapter), table, *_key_tables(adapter)))


def _checkpoint_notes(adapter: Adapter) -> Iterator[Note]:
    if adapter.untraceable:
        yield Note(f"Checkpoints must be packed, as loading them could not be recorded: {adapter.untraceable}", "bad")


def _key_tables(adapter: Adapter) -> Iterator[Table]:
    roles = dict.fromkeys(adapter.ignored, "optional, and ignored")
    roles |= dict.fromkeys(adapter.needed, "required, though no weight is made of it")
    if roles:
        yield Table(columns("key", "role"), tuple(roles.items()), "Other checkpoint keys")


def _files_section(subject: ArtifactSubject) -> Section:
    rows = tuple((name, len(subject.artifact.read(name)), digest) for name, digest in subject.manifest.files.items())
    table = Table((Column("file"), Column("size", "bytes"), Column("BLAKE3 digest")), rows)
    return Section("Files", (table,))
