"""`weightswap inspect`: its options, its text and its tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from weightswap_runtime.errors import Unsupported, plural, visible
from weightswap_runtime.format.manifest import Manifest, NamedTensor
from weightswap_runtime.tensors import describe
from weightswap_tools.reports.page import write_report
from weightswap_tools.tensor_set import Branch, fingerprints, grow, runs, sizes_below, split_name
from weightswap_tools.terminal import (
    HtmlOption,
    JsonOption,
    LevelOption,
    errors_as_exit,
    human_bytes,
    print_facts,
    print_json,
    print_table,
    say,
    table_console,
)

from .graph import module_kinds
from .page import report_of
from .subject import (
    ArtifactSubject,
    GoldensSubject,
    Subject,
    WeightsSubject,
    artifact_facts,
    cut_of,
    document_of,
    goldens_facts,
    open_subject,
    origin,
    size_fact,
    weights_facts,
)

inspect_command = typer.Typer(add_completion=False)
_WIDTH = 11  # of the facts' names


@inspect_command.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="An artifact, a weight file, a checkpoint, a delta or a goldens file, or its URL.")
    ],
    tree: Annotated[bool, typer.Option("--tree", help="Print a tree of the modules with their sizes.")] = False,
    level: LevelOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the ids, methods and tensors of an artifact, a weight file or a checkpoint.

    An artifact's digests are checked. Of other files, no values are read, and no code in a pickle is run. With --html,
    only the report is written, unless --tree or --json is given, too.
    """
    if tree and as_json:
        raise typer.BadParameter("--tree and --json: give only one")
    with errors_as_exit(as_json), open_subject(path, level) as subject:
        if html:
            write_report(html, report_of(subject))
        if as_json:
            print_json(document_of(subject))
        elif tree:
            _print_tree(subject)
        elif html:
            print_facts([("report", str(html))], _WIDTH)
        else:
            _print_text(subject)


# Text.


def _print_text(subject: Subject) -> None:
    match subject:
        case ArtifactSubject():
            _print_artifact(subject)
        case WeightsSubject():
            _print_weights(subject)
        case GoldensSubject():
            _print_goldens(subject)


def _print_artifact(subject: ArtifactSubject) -> None:
    manifest = subject.manifest
    print_facts(artifact_facts(subject), _WIDTH)
    size = size_fact(len(manifest.weights), manifest.total_bytes)
    _print_tensors(f"weights: {size}, not in the artifact", manifest.weights, manifest)
    for title, tensors in (("state", manifest.state), ("constants", manifest.constants)):
        if tensors:
            _print_tensors(f"{title}: {size_fact(len(tensors), sum(t.nbytes for t in tensors))}", tensors, manifest)
    conversion = manifest.conversion
    if conversion.ignored:
        say(f"checkpoint keys that are left out: {', '.join(conversion.ignored)}")
    if conversion.needed:
        say(f"checkpoint keys that are required, though no weight is made of them: {', '.join(conversion.needed)}")
    if conversion.untraceable:
        say(f"checkpoints must be packed, as loading them could not be recorded: {conversion.untraceable}")


def _print_tensors(title: str, tensors: tuple[NamedTensor, ...], manifest: Manifest) -> None:
    sources = {source.weight: source for source in manifest.conversion.sources}
    rows = [
        [
            tensor.name,
            describe(tensor),
            human_bytes(tensor.nbytes),
            ", ".join(tensor.aliases),
            origin(tensor, sources.get(tensor.name)),
            cut_of(tensor, manifest),
        ]
        for tensor in tensors
    ]
    _print_table(title, ["name", "type", "size", "tied to", "in checkpoints", "on ranks"], rows)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without empty columns after the third."""
    kept = [index for index in range(len(columns)) if index < 3 or any(row[index] for row in rows)]
    print_table(title, [columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _print_weights(subject: WeightsSubject) -> None:
    print_facts(weights_facts(subject), _WIDTH)
    changes = (
        f"{each.name}, {describe(each.type)}: {each.text}, {human_bytes(each.nbytes)}" for each in subject.changes
    )
    print_facts((("changes", text) for text in changes), _WIDTH)
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
    print_facts(goldens_facts(subject), _WIDTH)
    rows = [[str(number), *texts] for number, *texts in subject.calls]
    print_table(plural(len(rows), "recorded call"), ["case", "method", "inputs", "outputs"], rows)


# The tree.


_TreeRow = tuple[str, int, str]  # a tensor's type, size in bytes, and a note


def _print_tree(subject: Subject) -> None:
    """Print modules with the number and size of their tensors. Raises Unsupported for goldens."""
    kinds: Mapping[str, str] = {}
    match subject:
        case ArtifactSubject(artifact):
            title, rows, kinds = str(artifact.path), _artifact_rows(artifact.manifest), module_kinds(subject)
        case WeightsSubject(weights):
            title, ties = weights.full_where, subject.ties
            rows = {
                name: (describe(weights.tensors[name]), size, _tied(ties.get(name, ())))
                for name, size in subject.sizes.items()
            }
        case GoldensSubject(where):
            raise Unsupported(f"{where}: goldens have no modules; leave --tree out")
    table_console().print(_TreeBuilder(rows, kinds).tree(title))


def _artifact_rows(manifest: Manifest) -> dict[str, _TreeRow]:
    rows = {}
    for role, tensors in (("", manifest.weights), ("state", manifest.state), ("constant", manifest.constants)):
        for tensor in tensors:
            note = ", ".join(filter(None, (role, _tied(tensor.aliases))))
            rows[tensor.name] = describe(tensor), tensor.nbytes, note
    return rows


def _tied(names: Iterable[str]) -> str:
    return f"tied to {', '.join(names)}" if names else ""


class _TreeBuilder:
    def __init__(self, rows: Mapping[str, _TreeRow], kinds: Mapping[str, str]) -> None:
        self.rows, self.kinds = rows, kinds
        self.root = grow(rows)
        self.sums = sizes_below(self.root, {name: size for name, (_, size, _) in rows.items()})
        self.marks = fingerprints(self.root, rows.__getitem__, self._kind)

    def tree(self, title: str) -> Tree:
        tree = Tree(self._label(visible(title), self.root))
        self._fill(tree, self.root)
        return tree

    def _kind(self, path: str) -> str:
        return self.kinds.get(path, "").rpartition(".")[2]

    def _fill(self, tree: Tree, branch: Branch) -> None:
        for name in branch.names:
            kind, size, note = self.rows[name]
            label = Text.assemble(visible(split_name(name)[1]), (f"  {kind}", "cyan"), f"  {human_bytes(size)}")
            tree.add(label.append(f"  {visible(note)}" if note else "", "dim"))
        for group in runs(branch.branches.values(), self.marks):
            self._fill(tree.add(self._group_label(group)), group[0])

    def _group_label(self, group: list[Branch]) -> Text:
        first, last = group[0], group[-1]
        if len(group) == 1:
            return self._label(visible(first.name), first)
        label = Text.assemble((f"{first.name} … {last.name}", "bold"), (f"  ({len(group)} × alike)", "magenta"))
        return label.append_text(self._measures(first, each=True))

    def _label(self, name: str, branch: Branch) -> Text:
        return Text(name, "bold").append_text(self._measures(branch))

    def _measures(self, branch: Branch, each: bool = False) -> Text:
        kind = self._kind(branch.path)
        count = len([*branch.every_name()])
        size = f"{plural(count, 'tensor')}, {human_bytes(self.sums[branch])}{' each' if each else ''}"
        return Text.assemble((f"  {visible(kind)}" if kind else "", "green"), (f"  {size}", "not bold dim"))
