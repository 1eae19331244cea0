"""The rate limit of a staging, on a clock that only sleeping moves, and a staging at the interpreter's end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.support import warm
from tests.support.blocks import make_blocks_small
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from weightswap_runtime import jobs, load
from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import StageCancelled
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import LONGEST_BURST, POLL_SECONDS, Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena, HostPatch, copy_ranges
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.staging import reading
from weightswap_runtime.staging.reading import read_tensors
from weightswap_runtime.threads import NICENESS, WorkerThreads

RATE = 1e6  # bytes per second
SIZES = (5 << 20, 3 << 20, 70_000, 1, 0)
TOTAL = sum(SIZES)


class Clock:
    """A replacement of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


class Moves:
    """The times at which bytes were moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.found: list[tuple[float, int]] = []
        monkeypatch.setattr(jobs, "time", self.clock)

    def watch(self, monkeypatch: pytest.MonkeyPatch, where: type, name: str, size: Callable[..., int]) -> None:
        original = getattr(where, name)

        def noted(*args: Any) -> Any:
            if found := size(*args):
                self.found.append((self.clock.now, found))
            return original(*args)

        monkeypatch.setattr(where, name, noted)

    def check(self) -> None:
        """Check that there is no burst, at the beginning or from several threads."""
        assert sum(nbytes for _, nbytes in self.found) == TOTAL
        assert max(nbytes for _, nbytes in self.found) <= RATE * LONGEST_BURST
        before = 0
        for time, nbytes in sorted(self.found):
            assert before <= RATE * (time - 100.0) + 1e-3
            before += nbytes


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    return Moves(monkeypatch)


@pytest.fixture
def layout() -> ArenaLayout:
    return ArenaLayout(tuple(NamedTensor(name=f"w{i}", dtype="U8", shape=(size,)) for i, size in enumerate(SIZES)))


@pytest.mark.parametrize("threads", [1, 4])
def test_reading_is_even(
    threads: int, moves: Moves, layout: ArenaLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {f"w{i}": torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(SIZES)}
    safetensors.torch.save_file(values, tmp_path / "w.safetensors")
    arena, job = HostArena(layout), Job(RATE)
    with open_weights(tmp_path / "w.safetensors") as weights:
        moves.watch(monkeypatch, LocalFile, "read_into", lambda _, buffers, __: sum(map(len, buffers)))
        job.begin("reading", TOTAL)
        read_tensors(weights, {name: (name,) for name in values}, arena, WorkerThreads(threads), job)
    moves.check()
    assert job.progress.bytes_done == TOTAL
    for name, value in values.items():
        assert bytes(arena.fetch(*layout.slots[name])) == value.numpy().tobytes()


@pytest.mark.parametrize("threads", [1, 4])
def test_copying_is_even(threads: int, moves: Moves, layout: ArenaLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, job = HostArena(layout), HostArena(layout), Job(RATE)
    ranges = list(layout.slots.values())
    moves.watch(monkeypatch, HostArena, "copy_part", lambda _, __, begin, end: end - begin)
    copy_ranges(target, source, ranges, WorkerThreads(threads), job)
    moves.check()
    assert job.progress.bytes_done == TOTAL


@pytest.mark.parametrize("threads", [1, 4])
def test_laying_a_patch_over_is_even(
    threads: int, moves: Moves, layout: ArenaLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = HostArena(layout)
    places = [np.array([[slot.offset, slot.end]]) for slot in layout.slots.values()]
    patch = HostPatch(ByteRanges.of(place, memoryview(bytearray([7]) * int(np.ptp(place)))) for place in places)
    moves.watch(monkeypatch, HostArena, "scatter", lambda _, ranges: ranges.nbytes)
    patch.write_to(arena, WorkerThreads(threads), Job(RATE))
    moves.check()
    assert all(bytes(arena.fetch(*slot)) == bytes([7]) * slot.nbytes for slot in layout.slots.values())


@pytest.mark.skipif(sys.platform != "linux", reason="a process has one priority")
@pytest.mark.parametrize(
    ("way", "yields"),
    [("background", True), ("async", True), ("foreground", False), ("limited", False), ("delta", False)],
)
def test_full_stagings_in_the_background_yield_to_calls(
    way: str,
    yields: bool,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    delta: WriteDelta,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The priorities of the threads that read."""
    make_blocks_small(monkeypatch, 16)
    monkeypatch.setattr(reading, "GROUP_BYTES", 16)
    own, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    hash_block = reading.blake3

    def noted(block: memoryview) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return hash_block(block)

    with load(tiny.path, weight_file(0)) as model:
        file = delta(0, 1) if way == "delta" else weight_file(1)
        monkeypatch.setattr(reading, "blake3", noted)
        if way == "foreground":
            model.swap(file)
        elif way == "async":
            asyncio.run(model.aswap(file))
        else:
            model.stage(file, background=True, rate_limit=1e9 if way == "limited" else None).commit()
        assert serves(model, 1)
    assert set(seen) == {min(19, own + NICENESS) if yields else own}


def test_unused_rate_is_lost(moves: Moves) -> None:
    job = Job(RATE)
    for _ in range(3):
        start = moves.clock.now
        for low, high in job.steps(0, 100_000):
            assert low <= RATE * (moves.clock.now - start) + 1e-3
            assert high - low <= RATE * LONGEST_BURST
        moves.clock.sleep(1000.0)


def test_a_cancellation_is_noticed_at_once(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed after a nap, however long a byte takes."""
    job, sleep, naps = Job(1e-3), moves.clock.sleep, []

    def cancelled_in_the_third(seconds: float) -> None:
        sleep(seconds)
        naps.append(seconds)
        if len(naps) == 3:
            job.cancel()

    monkeypatch.setattr(moves.clock, "sleep", cancelled_in_the_third)
    with pytest.raises(StageCancelled):
        list(job.steps(0, 100))
    assert naps == [POLL_SECONDS] * 3


def test_without_a_limit_nothing_waits(moves: Moves) -> None:
    assert list(Job().steps(3, 10 << 20)) == [(3, 10 << 20)]
    assert moves.clock.now == 100.0
    assert list(Job(RATE).steps(3, 3)) == []


SLOW_SOURCE = """
import sys, time
from weightswap_runtime import load
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.staging import reading

model = load(sys.argv[1], sys.argv[2])
reading.MOST_BUFFERS = reading.READS = 1  # a task for each of the four tensors
read_into = LocalFile.read_into

def slowly(self, buffers, offset):
    if offset > 4000:
        print("reads", flush=True)
        time.sleep(1)
    read_into(self, buffers, offset)

LocalFile.read_into = slowly
{begin}
while not model.progress or model.progress.phase != "reading":
    time.sleep(0.001)
print("ends", flush=True)
"""
BACKGROUND = "staged = model.stage(sys.argv[3], background=True)"
WATCH = """
import os, shutil
watcher = model.watch(os.path.dirname(sys.argv[3]) + "/box", 0.01, start="all")
os.mkdir(os.path.dirname(sys.argv[3]) + "/box")
shutil.copy(sys.argv[3], os.path.dirname(sys.argv[3]) + "/box/v.safetensors")
"""
DAEMON = """
import contextlib, threading
from weightswap_runtime import StageCancelled

def swap():
    with contextlib.suppress(StageCancelled):
        model.swap(sys.argv[3])
    time.sleep(60)

threading.Thread(target=swap, daemon=True).start()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("begin", [BACKGROUND, WATCH, DAEMON])
@pytest.mark.parametrize("residency", ["double", pytest.param("single", marks=pytest.mark.slow)])
def test_the_end_of_the_interpreter_cancels_a_staging(
    begin: str, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    """Threads finish the piece that they have begun, and read no further while the interpreter waits for them."""
    script = SLOW_SOURCE.format(begin=begin).replace("sys.argv[2])", f"sys.argv[2], residency={residency!r})", 1)
    command = [warm.python(), "-e", "-c", script, str(tiny.path), str(weight_file(0)), str(weight_file(1))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if begin != DAEMON:  # other daemon threads may crash in the middle of torch
        assert (done.returncode, done.stderr) == (0, "")
    assert "ends" in done.stdout
    assert done.stdout.count("reads") <= 2  # one for each thread that had begun
