"""Patches: changes of parts of an arena, kept in memory of their own until they are applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weightswap_runtime.tensors.digests import BLOCK, Blocks
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .arena import COPY_CHUNK, Arena, ByteRange, allocate


class Span(NamedTuple):
    """Bytes for an offset of an arena."""

    offset: int
    data: memoryview


class Patch(ABC):
    """Changes of parts of an arena, in memory of their own."""

    nbytes: int

    @abstractmethod
    def write_to(self, arena: Arena, workers: WorkerThreads) -> None:
        """Copy every span to its offset. Addresses stay."""

    @abstractmethod
    def lay_over(self, arena: Arena, workers: WorkerThreads, job: Job) -> None:
        """As `write_to`, at the job's rate limit. Raises StageCancelled, with the copy half done."""

    @abstractmethod
    def undo(self, arena: Arena) -> Patch:
        """Copy what this patch would overwrite in the arena, as a patch. Raises MemoryError."""

    @abstractmethod
    def saved(self, arena: Arena) -> HostPatch:
        """As `undo`, in host memory, however long it takes. Raises MemoryError."""


class HostPatch(Patch):
    """Spans in host memory, which do not overlap. Bytes of the arena between them stay."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(spans)
        self.nbytes = sum(len(span.data) for span in self.spans)

    def write_to(self, arena: Arena, workers: WorkerThreads) -> None:
        workers.run_all(lambda span: arena.write(span.offset, span.data), in_chunks(self.spans, COPY_CHUNK))

    def lay_over(self, arena: Arena, workers: WorkerThreads, job: Job) -> None:
        job.begin("copying", self.nbytes)

        def write(span: Span) -> None:
            for start, stop in job.steps(0, len(span.data)):
                arena.write(span.offset + start, span.data[start:stop])

        workers.run_all(write, in_chunks(self.spans, COPY_CHUNK))

    def undo(self, arena: Arena) -> HostPatch:
        memory = memoryview(allocate(self.nbytes))
        spans = []
        for offset, data in self.spans:
            copy, memory = memory[: len(data)], memory[len(data) :]
            arena.read(offset, copy)
            spans.append(Span(offset, copy))
        return HostPatch(spans)

    saved = undo


def in_chunks(spans: Iterable[Span], most: int) -> Iterable[Span]:
    """Yield the spans in pieces of at most `most` bytes."""
    for offset, data in spans:
        for start in range(0, len(data), most):
            yield Span(offset + start, data[start : start + most])


def differing(arena: Arena, one: Mapping[str, Blocks], other: Mapping[str, Blocks]) -> list[ByteRange]:
    """Return the ranges that differ between two arenas of this layout, from the digests of their weights' blocks."""
    ranges: list[ByteRange] = []
    for name, weight in arena.layout.weights.items():
        slot = arena.layout.slots[name]
        if one[name] == other[name]:
            continue
        if weight.stride is not None:  # its blocks are scattered over the arena's memory
            ranges.append(slot)
            continue
        blocks = zip(slot.split(BLOCK), one[name], other[name], strict=True)
        ranges += [block for block, mine, theirs in blocks if mine != theirs]
    return ranges


def copy_ranges(target: Arena, source: Arena, ranges: Sequence[ByteRange], workers: WorkerThreads, job: Job) -> None:
    """Copy parts of an arena to the same ranges of another. Raises StageCancelled, with the copy half done."""
    job.begin("copying", sum(part.nbytes for part in ranges))

    def copy(part: ByteRange) -> None:
        for start, stop in job.steps(part.offset, part.end):
            target.copy_part(source, start, stop)

    piece = min(target.piece, source.piece)
    workers.run_all(copy, (part for whole in ranges for part in whole.split(piece)))
