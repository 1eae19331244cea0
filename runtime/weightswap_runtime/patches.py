"""Changes of a part of an arena, kept in memory of their own until they are applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .arena import COPY_CHUNK, Arena, allocate
from .digests import BLOCK, Blocks
from .job import Job
from .workers import Workers


class Span(NamedTuple):
    """Bytes that belong at an offset of an arena."""

    offset: int
    data: memoryview


class Patch(ABC):
    """Changes of an arena, beside it."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def write_to(self, arena: Arena, workers: Workers) -> None:
        """Copy every span to its place; addresses stay."""

    @abstractmethod
    def lay_over(self, arena: Arena, workers: Workers, job: Job) -> None:
        """As `write_to`, at the job's pace. Raises StageCancelled, with the copy half done."""

    @abstractmethod
    def undo(self, arena: Arena) -> Patch:
        """What lies in the arena where this would be written, copied. Raises MemoryError."""

    @abstractmethod
    def saved(self, arena: Arena) -> HostPatch:
        """As `undo`, in host memory, for as long as it takes. Raises MemoryError."""


class HostPatch(Patch):
    """Spans that do not overlap, in host memory; what lies between them stays."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(spans)

    @property
    def nbytes(self) -> int:
        return sum(len(span.data) for span in self.spans)

    def write_to(self, arena: Arena, workers: Workers) -> None:
        """Copy every span to its place; addresses stay."""
        workers.run_all(lambda span: arena.write(span.offset, span.data), _in_chunks(self.spans, COPY_CHUNK))

    def lay_over(self, arena: Arena, workers: Workers, job: Job) -> None:
        """As `write_to`, at the job's pace. Raises StageCancelled, with the copy half done."""
        job.begin("copying", self.nbytes)

        def write(span: Span) -> None:
            for start, stop in job.steps(0, len(span.data)):
                arena.write(span.offset + start, span.data[start:stop])

        workers.run_all(write, _in_chunks(self.spans, COPY_CHUNK))

    def undo(self, arena: Arena) -> HostPatch:
        """What lies in the arena where this would be written, copied. Raises MemoryError."""
        memory = memoryview(allocate(self.nbytes))
        spans = []
        for offset, data in self.spans:
            kept, memory = memory[: len(data)], memory[len(data) :]
            arena.read(offset, kept)
            spans.append(Span(offset, kept))
        return HostPatch(spans)

    saved = undo


def _in_chunks(spans: Iterable[Span], most: int) -> Iterable[Span]:
    for offset, data in spans:
        for start in range(0, len(data), most):
            yield Span(offset + start, data[start : start + most])


class Stretch(NamedTuple):
    """Bytes `begin` to `end` of an arena."""

    begin: int
    end: int


def differing(arena: Arena, one: Mapping[str, Blocks], other: Mapping[str, Blocks]) -> list[Stretch]:
    """Where two arenas of this layout differ that hold weights with these digests of blocks."""
    stretches: list[Stretch] = []
    for name, weight in arena.layout.weights.items():
        offset, size = arena.layout.slots[name]
        if one[name] == other[name]:
            continue
        if weight.stride is not None:  # its blocks are scattered over the arena's memory
            stretches.append(Stretch(offset, offset + size))
            continue
        for index, (mine, theirs) in enumerate(zip(one[name], other[name], strict=True)):
            if mine != theirs:
                begin = offset + index * BLOCK
                stretches.append(Stretch(begin, min(begin + BLOCK, offset + size)))
    return stretches


def copy_stretches(target: Arena, source: Arena, stretches: Sequence[Stretch], workers: Workers, job: Job) -> None:
    """Copy parts of an arena to the same places of another. Raises StageCancelled, with the copy half done."""
    job.begin("copying", sum(end - begin for begin, end in stretches))
    parts = [
        Stretch(start, min(start + COPY_CHUNK, end))
        for begin, end in stretches
        for start in range(begin, end, COPY_CHUNK)
    ]

    def copy(stretch: Stretch) -> None:
        for start, stop in job.steps(stretch.begin, stretch.end):
            target.copy_part(source, start, stop)

    workers.run_all(copy, parts)
