"""Files and host memory on their way to a device without Python: native code, and what reading makes of it."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.standin import StandIn
from weightswap_runtime import native
from weightswap_runtime.errors import StageCancelled, WeightFileError
from weightswap_runtime.format import weight_set
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory import device_arena
from weightswap_runtime.memory.arena import ArenaLayout, Copy, Inspected
from weightswap_runtime.memory.device_arena import BUFFER_BYTES, DeviceArena, Ring
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.staging import reading
from weightswap_runtime.tensors import block_digests
from weightswap_runtime.threads import WorkerThreads

from .test_device_digests import OnDevice

MB = 1 << 20
PIECE = native.UPLOAD_BYTES // 4
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
CREATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
EVENT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
FORGET = ctypes.CFUNCTYPE(ctypes.c_int)


class LateDevice:
    """CUDA's functions over a device that copies as late as it may: once an event behind the copy is waited for."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, int] | int] = []  # copies and events that are not done
        self.alive: set[int] = set()
        self.created = self.longest = self.forgotten = 0
        self.fails_at: int | None = None  # the number of the copy that fails
        self._copies = 0
        self._functions = (
            COPY(self.copy), CREATE(self.create), RECORD(self.record), EVENT(self.wait), EVENT(self.destroy),
            FORGET(self.forget),
        )  # fmt: skip
        self.api = (ctypes.c_void_p * 6)(*(ctypes.cast(each, ctypes.c_void_p) for each in self._functions))

    def copy(self, to: int, source: int, size: int, kind: int, stream: int) -> int:
        self._copies += 1
        self.queue.append((to, source, size))
        self.longest = max(self.longest, size)
        return 2 if kind != 1 or stream != 77 or self._copies == self.fails_at else 0

    def create(self, event: Any, flags: int) -> int:
        self.created += 1
        self.alive.add(self.created)
        event[0] = self.created
        return 0 if flags == 3 else 1

    def record(self, event: int, _: int) -> int:
        self.queue = [work for work in self.queue if work != event]
        self.queue.append(event)
        return 0

    def wait(self, event: int) -> int:
        while event in self.queue:
            self.work()
        return 0

    def destroy(self, event: int) -> int:
        self.alive.remove(event)
        return 0

    def forget(self) -> int:
        self.forgotten += 1
        return 0

    def work(self) -> None:
        work = self.queue.pop(0)
        if not isinstance(work, int):
            ctypes.memmove(*work)


class Upload:
    """One upload of ranges, which may take several calls."""

    def __init__(self, copies: list[Copy], source: bytes | Path) -> None:
        self.device = LateDevice()
        self.target = bytearray(max((copy.offset + copy.nbytes for copy in copies), default=0))
        self.locked = bytearray(native.UPLOAD_BYTES)
        self.calls = 0
        self._copies, self._source = copies, source

    def run(self, patience: float = 3600, done: int = 0) -> int:
        """Return what the last call does."""
        memory = self._source if isinstance(self._source, bytes) else None
        file = -1 if memory else os.open(str(self._source), os.O_RDONLY)
        columns = np.array(self._copies, np.int64).reshape(-1, 3).T.copy()
        total = sum(copy.nbytes for copy in self._copies)
        assert native.library is not None
        try:
            while True:
                self.calls += 1
                done = native.library.upload(
                    self.device.api, ctypes.c_void_p(77), file, memory, native.address(memoryview(self.target)),
                    *map(native.address, columns), ctypes.c_int64(len(self._copies)), ctypes.c_int64(done),
                    native.address(memoryview(self.locked)), ctypes.c_int64(int(patience * 1e9)),
                )  # fmt: skip
                assert not self.device.alive
                if done < 0 or done == total:
                    return done
                assert all(isinstance(work, int) for work in self.device.queue)  # else the buffer is still read
        finally:
            if file >= 0:
                os.close(file)

    def result(self) -> bytes:
        while self.device.queue:
            self.device.work()
        return bytes(self.target)


pytestmark = pytest.mark.skipif(native.library is None, reason="needs native code")


@pytest.fixture(params=["file", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def source_of(kind: str, content: bytes, folder: Path) -> bytes | Path:
    path = folder / "content"
    path.write_bytes(content)
    return content if kind == "memory" else path


def ranges(rng: np.random.Generator, size: int) -> Iterator[Copy]:
    """Ranges in ascending order, of all sizes, with gaps on both sides."""
    target, begin = int(rng.integers(100)), int(rng.integers(100))
    while begin < size:
        most = int(rng.choice([1, 700, PIECE - 1, PIECE, 3 * PIECE]))
        nbytes = min(int(rng.integers(0, most + 1)), size - begin)
        yield Copy(target, begin, nbytes)
        target, begin = target + nbytes + int(rng.integers(300)), begin + nbytes + int(rng.integers(300))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("patience", [3600.0, 0.0])
def test_each_range_arrives_however_late_the_device_copies(
    seed: int, kind: str, patience: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    content = rng.bytes(30 * MB)
    copies = list(ranges(rng, len(content)))
    upload = Upload(copies, source_of(kind, content, tmp_path))
    assert upload.run(patience) == sum(copy.nbytes for copy in copies)
    expected = bytearray(len(upload.target))
    for offset, begin, nbytes in copies:
        expected[offset : offset + nbytes] = content[begin : begin + nbytes]
    assert upload.result() == expected
    assert upload.device.longest <= PIECE
    assert (upload.calls > 1) == (patience == 0)


def test_nothing_and_empty_ranges_take_no_copy(kind: str, tmp_path: Path) -> None:
    source = source_of(kind, b"abc", tmp_path)
    for copies in ([], [Copy(0, 0, 0), Copy(2, 1, 0)]):
        upload = Upload(copies, source)
        assert upload.run() == 0
        assert not upload.device.longest


def test_a_file_that_ends_early_and_a_copy_that_fails_are_told(kind: str, tmp_path: Path) -> None:
    content = bytes(20 * MB)
    if kind == "file":
        assert Upload([Copy(0, 0, len(content) + 1)], source_of(kind, content, tmp_path)).run() == -1
    for number in (1, 3, 6):
        upload = Upload([Copy(0, 0, len(content))], source_of(kind, content, tmp_path))
        upload.device.fails_at = number
        assert upload.run() == -1
        assert upload.device.forgotten == 1


SIZE = 40 * MB + 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_file({name: np.full(SIZE, ord(name), np.uint8) for name in "ab"}, path)
    return path


@pytest.fixture
def device() -> StandIn:
    device = StandIn(3)
    device.inspection = OnDevice(device)
    return device


def read(device: StandIn, file: Path, job: Job | None = None) -> DeviceArena:
    layout = ArenaLayout([NamedTensor(name=name, dtype="U8", shape=(SIZE,)) for name in "ab"])
    arena = DeviceArena(device, layout, Ring(device, 4), serves=True)
    with open_weights(file) as weights, arena.writing():
        found = reading.read_tensors(weights, {name: (name,) for name in "ab"}, arena, WorkerThreads(2), job or Job())
    for name in "ab":
        content = memoryview(bytes([ord(name)]) * SIZE)
        assert found.digests[name] == block_digests(content)
        assert arena.fetch(layout.slots[name].offset, SIZE) == content
    return arena


def test_what_the_device_inspects_is_uploaded_in_few_runs(
    device: StandIn, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the interpreter's lock, for which the application's threads compete."""
    monkeypatch.setattr(LocalFile, "read_into", only_small(LocalFile.read_into))
    read(device, file)
    runs, sizes = len(device.uploaded), [sum(copy.nbytes for copy in copies) for copies in device.uploaded]
    assert runs <= 8
    assert 2 * SIZE <= sum(sizes) < 2 * SIZE + 512
    assert min(sizes) < max(sizes)  # the last ones are smaller


def only_small(read_into: Any) -> Any:
    """Let a file be read in pieces that are its header, but not in others."""

    def checked(file: LocalFile, buffers: list[memoryview], offset: int) -> None:
        assert sum(map(len, buffers)) < MB
        read_into(file, buffers, offset)

    return checked


def test_others_may_have_the_buffer_in_between(device: StandIn, file: Path) -> None:
    """An upload from a slow disk takes long."""
    ring, checks = Ring(device, 1), 0
    layout = ArenaLayout([NamedTensor(name="a", dtype="U8", shape=(6 * BUFFER_BYTES,))])
    arena = DeviceArena(device, layout, ring, serves=True)

    def check() -> None:
        nonlocal checks
        checks += 1
        with ring.acquire(device.staging):
            pass

    with file.open("rb") as opened, arena.writing():
        assert arena.upload([Copy(0, 0, 2 * SIZE)], opened.fileno(), check)
    assert checks == -(-2 * SIZE // BUFFER_BYTES)


def test_a_rate_limit_is_kept(device: StandIn, file: Path) -> None:
    job = Job()
    job.rate_limit = 1 << 40
    read(device, file, job)
    assert not device.uploaded


def test_a_cancel_ends_an_upload(device: StandIn, file: Path) -> None:
    job = Job()
    upload = device.upload

    def cancelled(*arguments: Any) -> int | None:
        job.cancel()
        return upload(*arguments)

    device.upload = cancelled  # type: ignore[method-assign]
    with pytest.raises(StageCancelled):
        read(device, file, job)


def test_an_error_ends_the_uploads_of_other_threads(device: StandIn, file: Path) -> None:
    both, seconds = Barrier(2), time.monotonic() + 20

    def upload(target: Any, copies: Any, source: Any, through: Any, done: int) -> int | None:
        if not done and both.wait() == 0:
            raise WeightFileError("this one")
        return done + 1 if time.monotonic() < seconds else None

    device.upload = upload  # type: ignore[method-assign]
    with pytest.raises(WeightFileError, match="this one"):
        read(device, file)
    assert time.monotonic() < seconds


def test_small_tensors_share_copies(device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy costs microseconds, so one for each of thousands of scales or biases would be slower than a buffer."""
    monkeypatch.setattr(device_arena, "LEAST", 0)
    names = [f"{index}" for index in range(3000)]
    save_file({name: np.full(8, index % 256, np.uint8) for index, name in enumerate(names)}, tmp_path / "w.safetensors")
    arena = DeviceArena(
        device,
        ArenaLayout([NamedTensor(name=name, dtype="U8", shape=(8,)) for name in names]),
        Ring(device, 4),
        serves=True,
    )
    with open_weights(tmp_path / "w.safetensors") as weights, arena.writing():
        reading.read_tensors(weights, {name: (name,) for name in names}, arena, WorkerThreads(2), Job())
    assert device.copies < 20
    for index, name in enumerate(names):
        assert arena.fetch(arena.layout.slots[name].offset, 8) == bytes([index % 256]) * 8


def test_a_file_that_was_cut_short_is_refused(device: StandIn, file: Path) -> None:
    upload = device.upload

    def cut(*arguments: Any) -> int | None:
        os.truncate(file, SIZE)
        return upload(*arguments)

    device.upload = cut  # type: ignore[method-assign]
    with pytest.raises(WeightFileError, match="early; it was truncated while it was read"):
        read(device, file)


class WithNative(StandIn):
    """A stand-in to which native code copies: CUDA's functions work in its streams."""

    fails_at = 0  # the number of the copy of each upload that fails

    def upload(
        self, target: Any, copies: Sequence[Copy], source: int | memoryview, through: Any, done: int
    ) -> int | None:
        stream, patience = self.current(), 1 << 60 if self.fails_at else 0
        marks: dict[int, Any] = {}
        turns = iter(range(1, 1 << 20))

        def copy(to: int, begin: int, size: int, kind: int, _: int) -> int:
            assert target.address <= to <= to + size <= target.address + target.nbytes
            assert through.address <= begin <= begin + size <= through.address + native.UPLOAD_BYTES
            self.ask(lambda: bool(ctypes.memmove(to, begin, size)))
            return int(next(turns) == self.fails_at)

        def create(event: Any, _: int) -> int:
            event[0] = len(marks) + 1
            marks[len(marks) + 1] = None
            return 0

        def record(event: int, _: int) -> int:
            marks[event] = self.mark(stream)
            return 0

        def wait(event: int) -> int:
            self.finish(marks[event])
            return 0

        functions = COPY(copy), CREATE(create), RECORD(record), EVENT(wait), EVENT(lambda _: 0), FORGET(lambda: 0)
        api = (ctypes.c_void_p * 6)(*(ctypes.cast(each, ctypes.c_void_p) for each in functions))
        file, memory = (source, None) if isinstance(source, int) else (-1, native.address(source))
        columns = np.array(copies, np.int64).T.copy()
        assert native.library is not None
        done = native.library.upload(
            api, ctypes.c_void_p(1), file, memory, ctypes.c_void_p(target.address), *map(native.address, columns),
            ctypes.c_int64(len(copies)), ctypes.c_int64(done), ctypes.c_void_p(through.address),
            ctypes.c_int64(patience),
        )  # fmt: skip
        return None if done < 0 else done


def shards(rng: np.random.Generator, folder: Path) -> dict[str, np.ndarray]:
    """Write files of tensors of all sizes, many of which lie where files meet."""
    values: dict[str, np.ndarray] = {}
    places: dict[str, str] = {}
    for shard in range(int(rng.integers(1, 7))):
        sizes = rng.choice([0, 1, 255, 256, 257, 70_000, PIECE + 3, 5 * MB], int(rng.integers(1, 12)))
        names = [f"{rng.integers(10)}.{shard}.{index}" for index in range(len(sizes))]
        parts = {name: rng.integers(0, 256, size, np.uint8) for name, size in zip(names, sizes, strict=True)}
        file = f"model-{shard}.safetensors"
        save_file(parts, folder / file)
        values |= parts
        places |= dict.fromkeys(parts, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return values


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fails_at", [0, 1, 3, None])
def test_weights_of_several_files_arrive(
    seed: int, fails_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where uploads fail half-way, and what they have begun is copied later; None: where there are none."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(device_arena, "LEAST", 0)
    monkeypatch.setattr(weight_set, "_MOST_OPEN", 2)
    monkeypatch.setattr(reading, "LEAST_MEAN", int(rng.choice([1, reading.LEAST_MEAN])))
    values = shards(rng, tmp_path)
    device = WithNative(seed)
    device.inspection, device.uploads, device.fails_at = OnDevice(device), fails_at is not None, fails_at or 0
    if fails_at is None:
        monkeypatch.setattr(WithNative, "upload", StandIn.upload)
    layout = ArenaLayout([NamedTensor(name=name, dtype="U8", shape=value.shape) for name, value in values.items()])
    arena, job = DeviceArena(device, layout, Ring(device, 4), serves=True), Job()
    job.begin("reading", sum(value.nbytes for value in values.values()))
    with open_weights(tmp_path) as weights, arena.writing():
        found = reading.read_tensors(weights, {name: (name,) for name in values}, arena, WorkerThreads(3), job)
    for name, value in values.items():
        assert arena.fetch(layout.slots[name].offset, value.nbytes) == value.tobytes()
        assert found.digests[name] == block_digests(memoryview(value))
    assert job.progress.bytes_done == job.progress.bytes_total


def test_what_is_read_twice_counts_once(device: StandIn, file: Path) -> None:
    """The host reads again what the device has judged wrongly."""
    device.inspection = OnDevice(device, lambda _, blocks: Inspected([bytes(32)] * len(blocks.kinds), []))
    job = Job()
    job.begin("reading", 2 * SIZE)
    read(device, file, job)
    assert device.inspection is None
    assert job.progress.bytes_done == 2 * SIZE


@pytest.mark.parametrize("uploads", [True, False])
def test_large_writes_arrive(uploads: bool) -> None:
    device = StandIn(4)
    device.uploads = uploads
    layout = ArenaLayout([NamedTensor(name="a", dtype="U8", shape=(3 * BUFFER_BYTES,))])
    arena = DeviceArena(device, layout, Ring(device, 2), serves=True)
    content = np.random.default_rng(0).bytes(2 * BUFFER_BYTES + 77)
    with arena.writing():
        arena.write(1000, memoryview(content))
    assert arena.fetch(1000, len(content)) == content
    assert len(device.uploaded) == uploads
