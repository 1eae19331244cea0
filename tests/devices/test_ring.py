"""Buffers for copies to a device: used in turns, never overwritten during a copy, and never lost."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from threading import Thread
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.support.standin import Broken, Mark, Memory, Queue, StandIn
from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import OutOfMemory, StageCancelled
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory import device_arena as device_module
from weightswap_runtime.memory.arena import (
    ArenaLayout,
    ByteRange,
    HostArena,
    HostPatch,
    allocate,
    copy_bytes,
    copy_ranges,
)
from weightswap_runtime.memory.device_arena import BUFFER_BYTES, SHARE, DeviceArena, Region, Ring, plan_runs
from weightswap_runtime.memory.device_memory import DeviceMemory, DevicePatch
from weightswap_runtime.staging.reading import Piece, read_pieces
from weightswap_runtime.tensors import BLOCK
from weightswap_runtime.threads import WorkerThreads

SIZE = 3 * BUFFER_BYTES + 12345


def patch_of(spans: Sequence[tuple[int, memoryview]]) -> HostPatch:
    """Return a patch of bytes at offsets."""
    runs = np.array([(offset, offset + len(data)) for offset, data in spans], np.int64)
    return HostPatch([ByteRanges.of(runs, memoryview(bytearray(b"".join(data for _, data in spans))))])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [24, 20])  # of words of 8 bytes, and not
def test_rows_of_a_patch_are_written_kept_and_read_where_they_are(seed: int, width: int) -> None:
    device, workers = StandIn(seed), WorkerThreads(2)
    ring = Ring(device, 4)
    arena = DeviceArena(device, layout(), ring, serves=True)
    before = content(layout().nbytes, seed=2)
    with arena.writing():
        arena.write(0, before)
    ids = np.sort(np.random.default_rng(seed).choice(900, 40, replace=False)).astype(np.int64)
    part = ByteRanges.of_rows(ids, width, content(40 * width, seed=3)).moved(256)
    after = bytearray(before)
    for begin, data in part.pieces():
        after[begin : begin + width] = data
    moved = DevicePatch.of(HostPatch([part]), lambda size: Region(device, size, ring), workers)
    undo, saved = moved.undo(arena), moved.saved(arena)
    with arena.writing():
        moved.write_to(arena, workers)
    assert arena.fetch(0, len(before)) == after
    numbers = np.array([0, 3, 17])
    chunks, is_compact = arena.chunks(ByteRange(256, 100 << 10), numbers)
    assert is_compact
    assert bytes(chunks) == b"".join(bytes(after[256 + (n << 10) : 256 + (n + 1 << 10)]) for n in numbers.tolist())
    for patch in (undo, saved):
        host = HostArena(layout())
        host.write(0, memoryview(after))
        patch.write_to(host, workers)
        assert host.fetch(0, len(before)) == before
        with arena.writing():
            moved.write_to(arena, workers)
            patch.write_to(arena, workers)
        assert arena.fetch(0, len(before)) == before


def content(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_buffer_is_filled_again_only_when_it_has_been_copied(seed: int) -> None:
    device = StandIn(seed)
    region = Region(device, SIZE, Ring(device, 2))
    wanted = content(SIZE)
    with region.writing():
        region.write(0, wanted)
    region.synchronize()
    assert region.fetch(0, SIZE) == wanted
    assert device.copies == 8


def test_what_an_interrupted_thread_has_taken_comes_back() -> None:
    device = StandIn(0)
    ring = Ring(device, 1)

    def interrupted() -> None:
        turn = ring.acquire(device.staging)
        turn.__enter__()  # the frame ends without an exit

    for _ in range(3):
        interrupted()
    with pytest.raises(KeyboardInterrupt), ring.acquire(device.staging):
        raise KeyboardInterrupt
    with ring.acquire(device.staging) as buffer:
        assert buffer.nbytes == BUFFER_BYTES


def test_what_is_slow_holds_no_buffer_while_it_waits() -> None:
    """Two stagings at a low rate, each with more threads than buffers, and one that is not limited."""
    device, workers = AtOnce(0), WorkerThreads(8)
    ring = Ring(device, 4)
    ring.allocate()
    slow = [Job(rate_limit=1e6) for _ in range(2)]
    threads = [Thread(target=partial(stage, device, ring, workers, job)) for job in slow]
    for thread in threads:
        thread.start()
    try:
        soon = time.monotonic() + 120
        while not all(job.progress.bytes_done for job in slow) and time.monotonic() < soon:
            time.sleep(0.001)
        for _ in range(20):
            assert not any(turn.is_held for turn in ring._turns)
            time.sleep(0.001)
        assert stage(device, ring, workers, Job())
        assert all(thread.is_alive() for thread in threads)
    finally:
        for job in slow:
            job.cancel()
        for thread in threads:
            thread.join()


class AtOnce(StandIn):
    """A device that has done its work when it is asked for it."""

    def ask(self, work: Callable[[], bool]) -> None:
        work()

    def mark(self, stream: Queue) -> Mark:
        mark = Mark()
        mark.done = True
        return mark

    def wait(self, stream: Queue, mark: Mark) -> None:
        pass


def stage(device: StandIn, ring: Ring, workers: WorkerThreads, job: Job) -> bool:
    """Read 64 MiB through a ring. Return False if the job was cancelled."""
    total = 64 << 20
    region = Region(device, total, ring)
    piece = Piece("w", "I8", Zeros(), 0, region, ByteRange(0, total), [b""] * (total // BLOCK), [])
    with suppress(StageCancelled), region.writing():
        read_pieces([piece], workers, job)
        return True
    return False


class Zeros:
    """A source that needs no time."""

    where, size, unit = "zeros", 64 << 20, None

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        pass

    def await_stable_mtime(self) -> None:
        pass

    def check_unchanged(self, *, proven: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


def acquire_under(trace: Callable[..., Any], ring: Ring) -> None:
    """Acquire a buffer and give it back, which the trace function may interrupt."""
    with suppress(KeyboardInterrupt):
        sys.settrace(trace)
        try:
            with ring.acquire(ring._device.staging):
                pass
        finally:
            sys.settrace(None)
    gc.collect()


def test_an_interrupt_at_any_instruction_loses_no_buffer() -> None:
    """Each instruction of the ring is interrupted once; afterwards both buffers can be taken."""
    for number in count(1):
        ring = Ring(StandIn(0), 2)
        ring.allocate()
        left = [number]

        def trace(frame: FrameType, event: str, _: object, left: list[int] = left) -> Any:
            if frame.f_code.co_filename != device_module.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return trace

        acquire_under(trace, ring)
        assert sum(not turn.is_held for turn in ring._turns) == 2
        if left[0] > 0:
            assert number > 100
            return


def test_an_interrupt_of_python_s_threading_leaves_the_ring_to_other_threads() -> None:
    """Each call of what the standard library has in Python is interrupted once."""
    for number in count(1):
        ring = Ring(StandIn(0), 2)
        ring.allocate()
        left = [number]

        def trace(frame: FrameType, _: str, __: object, left: list[int] = left) -> None:
            if frame.f_code.co_filename == threading.__file__:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt

        def take(ring: Ring = ring) -> None:
            with ring.acquire(ring._device.staging), ring.acquire(ring._device.staging):
                pass

        acquire_under(trace, ring)
        other = Thread(target=take, daemon=True)
        other.start()
        other.join(120)
        assert not other.is_alive()
        if left[0] > 0:
            return


def test_an_error_of_the_device_is_raised() -> None:
    device = StandIn(0)
    region = Region(device, 100, Ring(device, 1))
    with region.writing():
        region.write(0, content(100))
    device.broken = True
    with pytest.raises(Broken, match="illegal memory access"):
        region.synchronize()


@pytest.mark.parametrize("seed", range(50))
def test_slots_move_in_few_copies_and_keep_their_places(seed: int) -> None:
    chance = random.Random(seed)
    slots, offset = [], 0
    for _ in range(chance.randrange(1, 20)):
        size = chance.choice([0, 1, 4, 255, 256, 257, 1000])
        slots.append(ByteRange(offset, size))
        offset += -(-size // 256) * 256 + chance.choice([0, 0, 0, 256, 4096])
    if chance.random() < 0.3:
        chance.shuffle(slots)
    places, runs = plan_runs(slots)
    for (at, size), place in zip(slots, places, strict=True):
        inside = [run for run in runs if run.begin <= place and place + size <= run.begin + run.nbytes]
        assert any(run.offset + place - run.begin == at for run in inside)
    # no two slots share a byte of the buffer, and no run has an unused unit of ALIGNMENT
    taken = sorted((place, place + size) for (_, size), place in zip(slots, places, strict=True) if size)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert sum(run.nbytes for run in runs) < sum(slot.nbytes for slot in slots) + 256 * len(slots)


def test_neighbours_are_one_run() -> None:
    slots = [ByteRange(0, 100), ByteRange(256, 300), ByteRange(768, 8), ByteRange(4096, 8)]
    assert plan_runs(slots) == ([0, 256, 768, 1024], [(0, 0, 776), (4096, 1024, 8)])


def layout() -> ArenaLayout:
    return ArenaLayout(
        [NamedTensor(name="a", dtype="U8", shape=(SIZE,)), NamedTensor(name="b", dtype="F32", shape=(7,))]
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["host", "device"])
@pytest.mark.parametrize("source", ["host", "device"])
def test_arenas_are_copied_to_each_other(source: str, target: str) -> None:
    device, workers = StandIn(1), WorkerThreads(2)
    ring = Ring(device, 6)
    made = {
        "host": lambda: HostArena(layout()),
        "device": lambda: DeviceArena(device, layout(), ring, serves=True),
    }
    one, other = made[source](), made[target]()
    wanted = content(layout().nbytes)
    with one.writing():
        one.write(0, wanted)
    with other.writing():
        one.write_to(other, workers)
    other.synchronize()
    assert other.fetch(0, len(wanted)) == wanted
    with other.writing():
        other.write(256, content(5000, seed=2))
        one.copy_part(other, 256, 5256)
        other.copy_part(one, 0, 10)
    other.synchronize()
    device.drain()
    assert one.fetch(256, 5000) == other.fetch(256, 5000) == content(5000, seed=2)
    assert one.fetch(5256, 5000) == wanted[5256:10256]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(2)
def test_threads_take_turns(seed: int) -> None:
    device, workers = StandIn(seed), WorkerThreads(4)
    wanted = content(300 * 512, seed)
    spans = [(start, wanted[start : start + 256]) for start in range(0, len(wanted), 512)]
    arena = DeviceArena(device, layout(), Ring(device, 2), serves=True)
    with arena.writing():
        patch_of(spans).write_to(arena, workers)
    arena.synchronize()
    assert all(arena.fetch(offset, 256) == data for offset, data in spans)


@pytest.mark.parametrize("seed", range(10))
def test_a_call_in_which_an_engine_is_bound_is_waited_for(seed: int) -> None:
    device = StandIn(seed)
    region, stream, old = Region(device, 1000, Ring(device, 2)), device.stream(), content(1000)
    device.slow = stream
    with region.writing():
        region.write(0, old)
    seen = Memory(1000, False, set())
    with device.on(stream):
        region.use()
    with region.writing(join=True):  # beside the call, which goes on
        pass
    with device.on(stream):
        device.copy(seen, 0, region.buffer, 0, 1000)
    with region.writing(urgent=True):
        region.write(0, content(1000, seed=1))
    device.drain()
    assert seen.content == old


class Counting(StandIn):
    """Counts what it locks."""

    locked = 0

    def lock(self, nbytes: int) -> Memory:
        memory = super().lock(nbytes)
        self.locked += 1
        return memory


def test_buffers_are_locked_once_and_for_all_users() -> None:
    device = Counting(0)
    ring = Ring(device, 3, urgent=Ring(device, 2))
    for _ in range(2):
        ring.allocate()
        assert device.locked == 5
    device.lockable = 0
    with ring.acquire(device.staging), ring.urgent.acquire(device.commits):
        pass
    assert device.locked == 5


def test_it_works_with_as_many_buffers_as_can_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scarce(Counting):
        def lock(self, nbytes: int) -> Memory:
            if self.locked == 2:
                raise MemoryError("no more pages")
            return super().lock(nbytes)

    device = Scarce(0)
    ring = Ring(device, 5)
    ring.allocate()
    region, wanted = Region(device, SIZE, ring), content(SIZE)
    with region.writing():
        region.write(0, wanted)
    assert region.fetch(0, SIZE) == wanted
    assert device.locked == 2


@pytest.mark.parametrize(("free", "buffers"), [(None, 5), (1 << 40, 5), (3 * SHARE * BUFFER_BYTES, 3), (1, 1)])
def test_no_more_than_a_share_of_the_host_s_memory_is_locked(
    free: int | None, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightswap_runtime.memory.device_arena.available", lambda: free)
    device = Counting(0)
    Ring(device, 5).allocate()
    assert device.locked == buffers


def test_where_nothing_can_be_locked_the_model_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"standin:0: cannot page-lock host memory.*cannot be locked"):
        DeviceMemory(StandIn(0, lockable=0), Ring(StandIn(0, lockable=0), 2), "auto")


def test_what_lies_on_the_device_moves_in_one_copy() -> None:
    device, workers = StandIn(0), WorkerThreads(2)
    ring = Ring(device, 2)
    one, other = (DeviceArena(device, layout(), ring, serves=True) for _ in range(2))
    wanted = content(layout().nbytes)
    with one.writing():
        one.write(0, wanted)
    before = device.copies
    with other.writing():
        copy_ranges(other, one, [layout().whole], workers, Job())
    assert device.copies == before + 1
    assert other.fetch(0, len(wanted)) == wanted


def test_neighbours_of_a_patch_move_in_one_copy() -> None:
    device, workers = StandIn(0), WorkerThreads(2)
    ring = Ring(device, 4)
    arena = DeviceArena(device, layout(), ring, serves=True)
    spans = [(512, content(256)), (768, content(BUFFER_BYTES, seed=1)), (BUFFER_BYTES + 4096, content(100))]
    with arena.writing():
        arena.write(0, content(layout().nbytes, seed=2))
    patch = patch_of(spans)
    moved = DevicePatch.of(patch, lambda size: Region(device, size, ring), workers)
    before = device.copies
    with arena.writing():
        moved.write_to(arena, workers)
    assert device.copies == before + 2
    assert all(arena.fetch(offset, len(data)) == data for offset, data in spans)


def test_other_threads_go_on_while_bytes_are_copied() -> None:
    """An assignment between memoryviews would hold the interpreter's lock all the time."""
    size, begun, ended = 256 << 20, threading.Event(), threading.Event()
    target, source = (memoryview(allocate(size)) for _ in range(2))
    taken: list[float] = []

    def copy() -> None:
        begun.set()
        taken.append(time.perf_counter())
        copy_bytes(target, source)
        taken.append(time.perf_counter())
        ended.set()

    thread, seen = threading.Thread(target=copy), list[float]()
    thread.start()
    begun.wait()
    while not ended.is_set():
        seen.append(time.perf_counter())
        time.sleep(0.0005)
    thread.join()
    begin, end = taken
    margin = (end - begin) / 5
    assert any(begin + margin < moment < end - margin for moment in seen)


def test_a_patch_is_copied_by_several_threads() -> None:
    class Slow(StandIn):
        def __init__(self) -> None:
            super().__init__(0)
            self.both = threading.Barrier(2, timeout=30)

        def copy(self, target: Any, at: int, source: Any, begin: int, nbytes: int) -> None:
            self.both.wait()  # waits until two threads copy at the same time
            super().copy(target, at, source, begin, nbytes)

    device = Slow()
    spans = [(0, content(BUFFER_BYTES)), (2 * BUFFER_BYTES, content(96, seed=1))]
    moved = DevicePatch.of(patch_of(spans), lambda size: Region(device, size, Ring(device, 4)), WorkerThreads(2))
    device.both.abort()
    device.drain()
    assert moved._region.buffer.content == b"".join(bytes(data) for _, data in spans)
