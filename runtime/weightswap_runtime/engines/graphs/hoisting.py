"""Lines of a graph's function: which are needed, and which can run once for all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .operators import Operator


class Line(NamedTuple):
    """One call of an operator, and the assignment of its results. `uses` and `defines` are local names."""

    text: str
    uses: frozenset[str]
    defines: tuple[str, ...]
    operator: Operator


def body(lines: Sequence[Line], returned: frozenset[str]) -> list[str]:
    """The lines that are needed; each name is deleted after its last use, and the memory behind it goes at once."""
    needed = set(returned)
    texts: list[str] = []
    for text, uses, defines, operator in reversed(lines):
        if operator.pure and needed.isdisjoint(defines):
            continue
        gone = sorted({*uses, *defines} - needed)
        texts.append(f"{text}; del {', '.join(gone)}" if gone else text)
        needed |= uses
    return texts[::-1]


def split(
    lines: Sequence[Line], fixed: frozenset[str], returned: frozenset[str]
) -> tuple[list[Line], list[Line], list[str]]:
    """Lines that depend on `fixed` names alone; the other lines; and what these, or the result, take from the former.

    A line stays with the others if something that is computed later may be written to its results: such a write
    would be seen by the next call.
    """
    written: set[str] = set()
    while True:
        early, late = _by_names(lines, fixed, written)
        names = {name for line in early for name in line.defines}
        hit = names & _written(late, lines)
        if not hit:
            break
        written |= hit
    wanted = returned.union(*(line.uses for line in late))
    return early, late, [name for line in early for name in line.defines if name in wanted]


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
    """The names whose memory the lines of `late` may write to."""
    found = {name for line in late if line.operator.mutable for name in line.uses}
    for line in reversed(lines):  # a result comes after what it may share memory with
        if not line.operator.fresh and not found.isdisjoint(line.defines):
            found |= line.uses
    return found
