"""Weights shared by processes without an engine; every element of a set is its generation.

As a program: `python -m tests.support.sharing owner|worker FDS SLOT LOG`, for storms.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import StageClosed
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.jobs import Claim, Job
from weightswap_runtime.live.gate import Version
from weightswap_runtime.live.residency import Double, StagedWeights
from weightswap_runtime.live.session import Session
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena
from weightswap_runtime.shared.control import Control, Description, Summary, read_description, read_trial
from weightswap_runtime.shared.owner import KeptMemory, OwnerGate, Segment, announce
from weightswap_runtime.shared.worker import MappedMemory, WorkerGate
from weightswap_runtime.staging.request import StagingReport
from weightswap_runtime.threads import WorkerThreads

WEIGHTS = (NamedTensor(name="w", dtype="I64", shape=(1 << 14,)),)


@contextmanager
def segment(workers: int = 2) -> Iterator[Segment]:
    made = Segment.create(WEIGHTS, workers)
    try:
        yield made
    finally:
        made.close()


def session(arena: Arena) -> Session:
    return Session(arena, {})


def numbers(of: Session) -> NDArray[np.int64]:
    assert isinstance(of.arena, HostArena)
    return np.frombuffer(of.arena.memory, np.int64, 1 << 14)


class BareOwner:
    """An owner's writes to the memory, whatever was served before."""

    def __init__(self, segment: Segment) -> None:
        self.control = Control(segment.control)
        self.gate = OwnerGate(self.control)
        layout = ArenaLayout(WEIGHTS)
        memory = KeptMemory(segment, self.control)
        self.residency = Double(session, memory, layout, self.gate, WorkerThreads(), keep=False)
        generation = self.control.generation
        if generation is not None:
            found = read_description(self.control, generation, Description)
            assert found is not None
            self.gate.adopt(self.residency.adopt(generation, found.identity, None))

    @property
    def next(self) -> int:
        return 0 if self.gate.current is None else self.gate.current.generation + 1

    def stage(
        self, number: int, timeout: float | None = 10.0, meanwhile: Callable[[], None] = lambda: None
    ) -> StagedWeights:
        """Write a set into the idle arena; `meanwhile` is called when a part of it is written."""
        with self.residency.target(timeout, Job()) as (target, _):
            values = numbers(target)
            for start in range(0, len(values), 1 << 12):  # in pieces, like a file
                values[start : start + (1 << 12)] = number
                if not start:
                    meanwhile()
        weights_id = f"weights {number}"
        report = StagingReport(weights_id=weights_id, labels={}, kind="full", source="nowhere")
        return StagedWeights(Identity(weights_id, {}, {}), report, target)

    def try_out(self, number: int, timeout: float | None = 10.0) -> StagedWeights:
        """Stage a set, and let workers call it."""
        staged = self.stage(number, timeout)
        announce(self.control, staged.identity)
        return staged

    def commit(self, staged: StagedWeights) -> int:
        """Commit a staged set, and return its generation."""
        return self.residency.commit(staged, None, lambda: None)[0].generation

    def swap(self, timeout: float | None = 10.0) -> int:
        """Stage and commit the next generation."""
        return self.commit(self.stage(self.next, timeout))


class BareWorker:
    """A worker's leases, without calls."""

    gate_class: type[WorkerGate] = WorkerGate

    def __init__(self, segment: Segment, slot: int) -> None:
        self.control = control = Control(segment.control)
        control.fill_slot(slot, os.getpid())
        layout, memory = ArenaLayout(WEIGHTS), MappedMemory(segment)
        self.gate = self.gate_class(control, slot)
        self.gate.attach((session(memory.arena(layout)), session(memory.arena(layout))))

    @contextmanager
    def call(self) -> Iterator[Version]:
        """Hold a lease during the block."""
        lease = Claim()
        version = self.gate.acquire(lease)
        try:
            yield version
        finally:
            self.gate.release(version.session, lease)

    @contextmanager
    def trial(self, found: tuple[int, Summary] | None = None) -> Iterator[Version]:
        """Hold a lease of the set on trial, or of `found`, an earlier result of `find_trial`. Raises StageClosed."""
        word, known = found or self.find_trial()
        lease = Claim()
        leased = self.gate.acquire_trial(word, lease)
        try:
            yield Version(leased, int(known.weights_id.split()[1]), known.identity)
        finally:
            self.gate.release(leased, lease)

    def find_trial(self) -> tuple[int, Summary]:
        """Return the set on trial. Raises StageClosed."""
        word = self.control.trial
        known = read_trial(self.control, word)
        if known is None:
            raise StageClosed("nothing is on trial")
        return word, known


def is_whole(version: Version) -> bool:
    """Return True if the arena's content is that of the version."""
    return version.weights_id == f"weights {version.generation}" and bool(
        (numbers(version.session) == version.generation).all()
    )


def _own(segment: Segment, log: int) -> None:
    owner, dice = BareOwner(segment), random.Random()
    while True:
        for _ in range(dice.randrange(3)):  # sets that are tried and discarded
            owner.try_out(-time.monotonic_ns())
            time.sleep(dice.uniform(0, 0.002))
            if dice.random() < 0.5:
                owner.control.end_trial()
        staged = owner.try_out(owner.next)
        time.sleep(dice.uniform(0, 0.002))
        generation = owner.commit(staged)
        os.write(log, json.dumps(["commit", time.monotonic(), generation]).encode() + b"\n")


def _work(segment: Segment, slot: int, log: int) -> None:
    worker = BareWorker(segment, slot)
    while worker.gate.current is None:
        time.sleep(0.001)
    while True:
        begun = time.monotonic()
        with worker.call() as version:
            whole = is_whole(version) and is_whole(version)
        os.write(log, json.dumps(["call" if whole else "mixed", begun, version.generation]).encode() + b"\n")
        with suppress(StageClosed), worker.trial() as version:
            whole = is_whole(version) and is_whole(version)
            os.write(log, json.dumps(["trial" if whole else "mixed", begun, version.generation]).encode() + b"\n")


def main(role: str, descriptors: str, slot: str, path: str) -> None:
    control, first, second = map(int, descriptors.split(","))
    log = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    shared = Segment(control, (first, second))
    _own(shared, log) if role == "owner" else _work(shared, int(slot), log)


if __name__ == "__main__":
    main(*sys.argv[1:])
