"""Lines of a graph's function: dead code removal, and the split into lines that run once and lines of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .operators import Operator


class Line(NamedTuple):
    """One call of an operator with the assignment of its results. `uses` and `defines` are local names."""

    text: str
    uses: frozenset[str]
    defines: tuple[str, ...]
    operator: Operator


def body(lines: Sequence[Line], returned: frozenset[str]) -> list[str]:
    """Return the text of the lines that are needed. Each name is deleted after its last use, to free its memory."""
    needed = set(returned)
    texts: list[str] = []
    for text, uses, defines, operator in reversed(lines):
        if operator.pure and needed.isdisjoint(defines):
            continue
        unneeded = sorted({*uses, *defines} - needed)
        texts.append(f"{text}; del {', '.join(unneeded)}" if unneeded else text)
        needed |= uses
    return texts[::-1]


def split(
    lines: Sequence[Line], fixed: frozenset[str], returned: frozenset[str]
) -> tuple[list[Line], list[Line], list[str]]:
    """Return the lines that depend on `fixed` names alone, the other lines, and the names that the former pass on.

    A line stays with the others if a later line may write to its results: the next call would see such a write.
    """
    written: set[str] = set()
    while True:
        early, late = _by_names(lines, fixed, written)
        names = {name for line in early for name in line.defines}
        overwritten = names & _written(late, lines)
        if not overwritten:
            break
        written |= overwritten
    used = returned.union(*(line.uses for line in late))
    return early, late, [name for line in early for name in line.defines if name in used]


def _by_names(lines: Sequence[Line], fixed: frozenset[str], written: set[str]) -> tuple[list[Line], list[Line]]:
    known = set(fixed)
    early: list[Line] = []
    late: list[Line] = []
    for line in lines:
        if line.operator.repeatable and line.uses <= known and written.isdisjoint(line.defines):
            known.update(line.defines)
            early.append(line)
        else:
            late.append(line)
    return early, late


def _written(late: Sequence[Line], lines: Sequence[Line]) -> set[str]:
    """Return the names whose memory the lines of `late` may write to."""
    written = {name for line in late if line.operator.mutable for name in line.uses}
    for line in reversed(lines):  # a result comes after the arguments that it may share memory with
        if not line.operator.fresh and not written.isdisjoint(line.defines):
            written |= line.uses
    return written
