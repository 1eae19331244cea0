"""Reads into an arena: small and large tensors, ties, other strides; digests equal BLAKE3 of each block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from weightswap_runtime import tensors as digests
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.staging import reading
from weightswap_runtime.threads import WorkerThreads

WORKERS = WorkerThreads(3)


def blocks_of(data: bytes, size: int = 64) -> list[bytes]:
    return [data[start : start + size] for start in range(0, max(1, len(data)), size)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the code paths of gigabytes for small tensors."""
    for module in (reading, digests):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(reading, "IN_CACHE", 200)
    monkeypatch.setattr(reading, "MOST_BUFFERS", 3)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("round_", range(6))
def test_every_byte_arrives_with_its_digest(round_: int, tmp_path: Path) -> None:
    random = np.random.default_rng(round_)
    sizes = [int(size) for size in random.choice([0, 1, 3, 8, 63, 64, 65, 200, 999, 1000, 5000], size=25)]
    values = {f"t{index}": random.integers(0, 256, size, dtype=np.uint8) for index, size in enumerate(sizes)}
    path = tmp_path / "file.safetensors"
    safetensors.numpy.save_file(values, path)
    weights = [NamedTensor(name=name, dtype="U8", shape=value.shape) for name, value in values.items()]
    arena = HostArena(ArenaLayout(weights))
    with open_weights(path) as opened:
        findings = reading.read_tensors(opened, {name: (name,) for name in values}, arena, WORKERS, Job())
    for name, value in values.items():
        assert bytes(arena.view(name)) == value.tobytes()
        assert list(findings.digests[name]) == [blake3(block).digest() for block in blocks_of(value.tobytes())]
        assert arena.layout.slots[name].offset % 256 == 0


@settings(max_examples=40)
@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 4), st.sampled_from(["u1", "u2", "f4", "c8"]))
def test_tensors_are_laid_out_in_the_order_that_the_model_keeps_them(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], shape: tuple[int, ...], dtype: str
) -> None:
    logical = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    stored = np.ascontiguousarray(logical.transpose(order)).transpose(np.argsort(order))
    stride = tuple(step // logical.itemsize for step in stored.strides)
    names = {"u1": "U8", "u2": "U16", "f4": "F32", "c8": "C64"}
    path = tmp_path_factory.mktemp("strided") / "file.safetensors"
    safetensors.numpy.save_file({"w": logical}, path)
    arena = HostArena(ArenaLayout([NamedTensor(name="w", dtype=names[dtype], shape=shape, stride=stride)]))
    with open_weights(path) as opened:
        findings = reading.read_tensors(opened, {"w": ("w",)}, arena, WORKERS, Job())
    assert bytes(arena.view("w")) == np.ascontiguousarray(logical.transpose(order)).tobytes()
    assert findings.digests["w"] == (blake3(logical.tobytes()).digest(),)


def test_an_arena_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightswap_runtime.memory.arena.COPY_CHUNK", 100)
    layout = ArenaLayout([NamedTensor(name=f"w{index}", dtype="U8", shape=(index * 77,)) for index in range(9)])
    source, target = HostArena(layout), HostArena(layout)
    for name in layout.slots:
        source.view(name)[:] = np.random.bytes(len(source.view(name)))
    address = target.address
    source.write_to(target, WORKERS)
    assert all(bytes(target.view(name)) == bytes(source.view(name)) for name in layout.slots)
    assert target.address == address


def test_a_large_copy_into_another_order_can_be_cancelled() -> None:
    weight = NamedTensor(name="w", dtype="F32", shape=(64, 512, 3, 3), stride=(4608, 1, 1536, 512))
    rows = np.arange(64 * 512 * 9, dtype=np.float32)
    target = memoryview(bytearray(rows.nbytes))
    checks = 0

    class Counted(Job):
        def check(self) -> None:
            nonlocal checks
            checks += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "STEP", 1 << 16)
        reading.write_rows(weight, memoryview(rows).cast("B"), target, Counted())
        assert checks > 10
        back = reading.read_rows(weight, target, Counted())
    assert np.array_equal(np.frombuffer(back, np.float32), rows)
    kept = np.frombuffer(target, np.float32).reshape(64, 3, 3, 512).transpose(0, 3, 1, 2)
    assert np.array_equal(kept, rows.reshape(64, 512, 3, 3))
