"""The modules of a subject as a tree on the terminal; equal layers are shown once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.messages import plural, visible
from weightswap_runtime.tensors.dtypes import describe
from weightswap_tools.module_tree import Branch, fingerprints, grow, runs, sizes_below, split_name
from weightswap_tools.terminal import human_bytes

from .module_graph import module_kinds
from .subject import ArtifactSubject, GoldensSubject, Subject, WeightsSubject


class _TreeRow(NamedTuple):
    """A tensor in the tree."""

    type: str
    nbytes: int
    note: str = ""


def print_tree(subject: Subject, console: Console) -> None:
    """Print modules with the number and size of their tensors. Raises Unsupported for goldens."""
    rows, kinds, title = _contents(subject)
    console.print(_TreeBuilder(rows, kinds).tree(title))


def _contents(subject: Subject) -> tuple[dict[str, _TreeRow], Mapping[str, str], str]:
    match subject:
        case ArtifactSubject():
            return _artifact_rows(subject), module_kinds(subject), str(subject.artifact.path)
        case WeightsSubject():
            return _weights_rows(subject), {}, subject.weights.full_where
        case GoldensSubject():
            raise Unsupported(f"{subject.where}: goldens have no modules; leave --tree out")


def _weights_rows(subject: WeightsSubject) -> dict[str, _TreeRow]:
    tensors, ties = subject.weights.tensors, subject.ties
    return {
        name: _TreeRow(describe(tensors[name]), size, _tied(ties.get(name, ()))) for name, size in subject.sizes.items()
    }


def _tied(names: Iterable[str]) -> str:
    return f"tied to {', '.join(names)}" if names else ""


def _artifact_rows(subject: ArtifactSubject) -> dict[str, _TreeRow]:
    manifest = subject.manifest
    roles = (("", manifest.weights), ("state", manifest.state), ("constant", manifest.constants))
    rows = {}
    for role, tensors in roles:
        for tensor in tensors:
            note = ", ".join(filter(None, (role, _tied(tensor.aliases))))
            rows[tensor.name] = _TreeRow(describe(tensor), tensor.nbytes, note)
    return rows


class _TreeBuilder:
    def __init__(self, rows: Mapping[str, _TreeRow], kinds: Mapping[str, str]) -> None:
        self.rows, self.kinds = rows, kinds
        self.root = grow(rows)
        self.sums = sizes_below(self.root, {name: row.nbytes for name, row in rows.items()})
        self.marks = fingerprints(self.root, rows.__getitem__, self._kind)

    def tree(self, title: str) -> Tree:
        tree = Tree(self._label(visible(title), self.root))
        self._fill(tree, self.root)
        return tree

    def _kind(self, path: str) -> str:
        return self.kinds.get(path, "").rpartition(".")[2]

    def _fill(self, tree: Tree, branch: Branch) -> None:
        for name in branch.names:
            tree.add(self._leaf(name, self.rows[name]))
        for group in runs(branch.branches.values(), self.marks):
            self._fill(tree.add(self._group_label(group)), group[0])

    def _leaf(self, name: str, row: _TreeRow) -> Text:
        label = Text.assemble(visible(split_name(name)[1]), (f"  {row.type}", "cyan"), f"  {human_bytes(row.nbytes)}")
        return label.append(f"  {visible(row.note)}" if row.note else "", "dim")

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
