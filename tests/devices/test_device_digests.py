"""Digests that the device computes: the kernel, run on the host, and their use in a staging."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.devices.test_standin_storm import Served, values_of
from tests.support.accelerators import on_accelerator
from tests.support.setups import different
from tests.support.standin import StandIn
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_exporter import export, pack
from weightswap_runtime import DigestMismatch, load
from weightswap_runtime.memory import device as device_arena
from weightswap_runtime.memory import torch_device as digests
from weightswap_runtime.memory.arena import ByteRange
from weightswap_runtime.memory.torch_device import SOURCE, DeviceHasher, TorchBuffer, compile_source
from weightswap_runtime.staging import reading
from weightswap_runtime.tensors import BLOCK

Digest = Callable[[bytearray, Sequence[ByteRange]], list[bytes]]
SIZES = [0, 1, 3, 4, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 4097, 256 * 1024 + 1]
SIZES += [BLOCK - 1025, BLOCK - 1024, BLOCK - 1, BLOCK]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(folder: Path) -> Digest:
    """Compile the kernel with the host's compiler."""
    library = folder / "blake3.so"
    shim = Path(__file__).with_name("blake3_on_host.cpp")
    options = [
        "-std=c++20",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Werror",
        "-shared",
        "-fPIC",
        "-pthread",
    ]
    subprocess.run(["g++", *options, f'-DSOURCE="{SOURCE}"', str(shim), "-o", str(library)], check=True)
    run = ctypes.CDLL(str(library)).run

    def digest(memory: bytearray, parts: Sequence[ByteRange]) -> list[bytes]:
        found = (ctypes.c_ubyte * (32 * len(parts)))()
        table = (ctypes.c_ulonglong * (2 * len(parts)))(*[number for part in parts for number in part])
        run((ctypes.c_ubyte * len(memory)).from_buffer(memory), table, found, len(parts))
        return [bytes(found[32 * index : 32 * index + 32]) for index in range(len(parts))]

    return digest


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Digest:
    return compiled(tmp_path_factory.mktemp("kernel"))


def expected(memory: bytearray, parts: Sequence[ByteRange]) -> list[bytes]:
    return [blake3(memory[part.offset : part.end]).digest() for part in parts]


@needs_compiler
@pytest.mark.slow
def test_the_kernel_is_blake3(kernel: Digest) -> None:
    memory, parts = bytearray(), []
    for size in SIZES:
        memory += bytes(-len(memory) % 256)
        parts.append(ByteRange(len(memory), size))
        memory += random.Random(size).randbytes(size)
    assert kernel(memory, parts) == expected(memory, parts)


@needs_compiler
@settings(max_examples=15)
@given(chunks=st.integers(0, 1023), rest=st.integers(0, 1024), seed=st.integers(0, 2**32))
def test_the_kernel_is_blake3_for_any_size(kernel: Digest, chunks: int, rest: int, seed: int) -> None:
    memory = bytearray(random.Random(seed).randbytes(chunks * 1024 + rest) + b"\0")
    parts = [ByteRange(0, len(memory) - 1)]
    assert kernel(memory, parts) == expected(memory, parts)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.slow
def test_the_kernel_is_cuda(tmp_path: Path) -> None:
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v", str(SOURCE)]
    done = subprocess.run([*command, "-o", str(tmp_path / "k.cubin")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build")
def test_the_kernel_needs_no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no folder of the toolkit: servers have wheels."""
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert b"digest_blocks" in compile_source(SOURCE.read_text(), (9, 0))
    with pytest.raises(RuntimeError, match=r"NVRTC: source\.cu.*undefined"):
        compile_source("__global__ void run() { undefined(); }", (9, 0))


class OnDevice:
    """A hasher of the stand-in's memory, which waits for the copies."""

    def __init__(self, device: StandIn, digest: Digest = expected) -> None:
        self._device = device
        self._digest = digest
        self.parts = 0

    def digests(self, buffer: Any, parts: Sequence[ByteRange]) -> list[bytes]:
        self._device.finish(self._device.mark(self._device.current()))
        self.parts += len(parts)
        return self._digest(buffer.content, parts)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(device_arena, "LEAST", 0)
    return StandIn(0)


def served(tiny: TinyArtifact, device: StandIn, residency: str) -> Served:
    return Served(tiny, residency, "device", device, None)


def serves(model: Served, seed: int) -> bool:
    found = model.call()
    model.device.drain()
    return model.weights(found.content) == values_of(seed)


@needs_compiler
def test_the_host_does_not_hash_what_the_device_hashes(
    kernel: Digest,
    device: StandIn,
    residency: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.hashing = hasher = OnDevice(device, kernel)
    monkeypatch.setattr(reading, "blake3", None)
    model = served(tiny, device, residency)
    for seed in range(3):
        model.model.swap(weight_file(seed))
    assert serves(model, 2)
    assert hasher.parts == 3 * len(tiny.values(0))


def test_the_device_refuses_a_damaged_file_as_the_host_does(
    device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    good, damaged = weight_file(0), weight_file(1)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    messages = []
    for hasher in (None, OnDevice(device)):
        device.hashing = hasher
        model = served(tiny, device, residency)
        model.model.swap(good)
        with pytest.raises(DigestMismatch) as refused:
            model.model.swap(damaged)
        messages.append(str(refused.value))
        assert serves(model, 0)
    assert messages[0] == messages[1]


def test_a_bit_that_flips_during_the_copy_is_detected(
    device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    """A host that hashes the bytes that it has read cannot detect it."""
    model = served(tiny, device, residency)
    model.model.swap(weight_file(0))
    slot = model.model._store._residency.sessions[0].arena.layout.slots["bias"]

    def turning(memory: bytearray, parts: Sequence[ByteRange]) -> list[bytes]:
        memory[slot.offset] ^= 4
        return expected(memory, parts)

    device.hashing = OnDevice(device, turning)
    with pytest.raises(DigestMismatch, match="bias: the file records the digest"):
        model.model.swap(weight_file(1))
    assert serves(model, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_kernel_is_not_used_again(seed: int, device: StandIn, residency: str, tiny: TinyArtifact) -> None:
    device.hashing = hasher = OnDevice(device, lambda memory, parts: [bytes(32) for _ in parts])
    model = served(tiny, device, residency)
    values = tiny.values(seed)
    values["bias"][1] = torch.nan
    path = tiny.write(tiny.path.parent / f"nan{seed}.safetensors", values)
    receipt = model.model.swap(path, allow_nonfinite=True)
    assert device.hashing is None
    assert receipt.nonfinite["bias"].nan == 1
    model.model.swap(path, allow_nonfinite=True)
    assert hasher.parts == len(values)  # once, and never again


def test_the_host_computes_digests_if_the_device_lacks_memory(
    device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    def digest(memory: bytearray, parts: Sequence[ByteRange]) -> list[bytes]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    device.hashing = hasher = OnDevice(device, digest)
    model = served(tiny, device, residency)
    model.model.swap(weight_file(1))
    assert serves(model, 1)
    assert hasher.parts
    assert device.hashing is hasher  # the next attempt may have more memory


def test_a_kernel_that_cannot_run_refuses_no_weights(
    device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    def digest(memory: bytearray, parts: Sequence[ByteRange]) -> list[bytes]:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    device.hashing = OnDevice(device, digest)
    model = served(tiny, device, residency)
    model.model.swap(weight_file(1))
    assert serves(model, 1)
    assert device.hashing is None


def test_the_hasher_is_measured_in_a_stream_without_calls(
    device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the measured time would include the work in the caller's stream."""
    streams = []
    monkeypatch.setattr(device, "hasher", lambda buffer: streams.append(device.current()))
    model = served(tiny, device, residency)
    model.model.swap(weight_file(1))
    assert streams
    assert set(streams) == {device.staging}


def test_the_host_hashes_small_sets(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    device = StandIn(0)
    device.hashing = hasher = OnDevice(device)
    model = served(tiny, device, "double")
    model.model.swap(weight_file(1))
    assert hasher.parts == 0
    assert serves(model, 1)


class Clock:
    """A clock that only work advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(digests.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("nbytes", [64 * BLOCK + 5, 5000 * BLOCK])
def test_a_device_is_measured_warm_and_with_enough_blocks(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pauses = iter([100.0, 3.0, 2.0, 4.0])  # the first one loads the kernel and locks pages
    requests: list[Sequence[ByteRange]] = []

    class Timed:
        def __init__(self, device: torch.device) -> None:
            pass

        def digests(self, buffer: Any, parts: Sequence[ByteRange]) -> list[bytes]:
            requests.append(parts)
            clock.now += next(pauses)
            return []

    def on_host(block: bytes) -> Any:
        clock.now += 0.125
        return blake3(b"")

    monkeypatch.setattr(digests, "DeviceHasher", Timed)
    monkeypatch.setattr(digests, "blake3", on_host)
    monkeypatch.setattr(digests, "WorkerThreads", lambda: SimpleNamespace(threads=2))
    buffer: Any = SimpleNamespace(nbytes=nbytes)
    count = min(nbytes // BLOCK, 1024)
    assert digests._seconds(Timed(torch.device("cpu")), buffer, count) == (2.0, count / 16)  # type: ignore[arg-type]
    assert requests == [[ByteRange(index * BLOCK, BLOCK) for index in range(count)]] * 4


def test_a_device_that_was_slower_is_measured_again_until_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, made = Clock(monkeypatch), list[torch.device]()
    pause = 1000.0

    class Timed(DeviceHasher):
        def __init__(self, device: torch.device) -> None:
            made.append(device)

        def digests(self, buffer: Any, parts: Sequence[ByteRange]) -> list[bytes]:
            clock.now += pause
            return []

    def on_host(block: bytes) -> Any:
        clock.now += 1.0
        return blake3(b"")

    monkeypatch.setattr(digests, "_hashers", {})
    monkeypatch.setattr(digests, "DeviceHasher", Timed)
    monkeypatch.setattr(digests, "blake3", on_host)
    monkeypatch.setattr(digests, "WorkerThreads", lambda: SimpleNamespace(threads=2))
    device = torch.device("cpu")
    small, large = (cast("Any", SimpleNamespace(nbytes=count * BLOCK)) for count in (64, 5000))
    assert [digests.hasher_of(device, buffer) for buffer in (small, large)] == [None, None]
    assert caplog.text.count("the host computes the digests of this set") == 2
    pause = 1.0
    hasher = digests.hasher_of(device, small)
    assert hasher is not None
    pause = 1000.0
    assert digests.hasher_of(device, large) is hasher  # and not measured any more
    assert made == [device]
    assert caplog.text.count("the host computes") == 2


def test_the_kernel_is_tried_again_after_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no kernel image")]
    tried = []

    def made(device: torch.device) -> Any:
        tried.append(device)
        raise errors[len(tried) - 1]

    monkeypatch.setattr(digests, "_hashers", {})
    monkeypatch.setattr(digests, "DeviceHasher", made)
    buffer: Any = SimpleNamespace(nbytes=64 * BLOCK)
    assert [digests.hasher_of(torch.device("cpu"), buffer) for _ in range(4)] == [None] * 4
    assert len(tried) == 2
    assert "cpu: the host computes digests: OutOfMemoryError: CUDA out of memory" in caplog.text


@on_accelerator
@pytest.mark.skipif("EMULATED_OPERATORS" in os.environ, reason="the emulated device runs no kernels")
def test_the_kernel_is_blake3_on_a_gpu(device: str) -> None:
    memory = torch.randint(0, 256, (96 * BLOCK + 12345,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    starts = [random.Random(size).randrange(64 * BLOCK) // 256 * 256 for size in SIZES]
    parts = [ByteRange(start, size) for start, size in zip(starts, SIZES, strict=True)]
    parts += [ByteRange(index * BLOCK, min(BLOCK, len(memory) - index * BLOCK)) for index in range(97)]
    hasher, buffer = DeviceHasher(torch.device(device, 0)), TorchBuffer(memory.to(device))
    with torch.device(device):  # a mode of the thread that swaps
        found = hasher.digests(buffer, parts)
    assert found == expected(bytearray(memory.numpy().tobytes()), parts)


@on_accelerator
def test_large_sets_swap_or_are_refused_with_either_hasher(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_hashers", {})  # or the result of an earlier test is not logged again
    models = [different(lambda: nn.Linear(4096, 4608), seed) for seed in range(2)]  # 75 MB
    artifact = export(models[0], (torch.ones(1, 4096),), out=tmp_path / "a")
    files = [pack(each, artifact, out=tmp_path / f"v{seed}.safetensors").path for seed, each in enumerate(models)]
    content = bytearray(files[1].read_bytes())
    content[-4096] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(content)
    with caplog.at_level("WARNING", "weightswap.device"):
        model, x = load(artifact, files[0], device=device), torch.ones(1, 4096)
    with pytest.raises(DigestMismatch, match="weight: the file records the digest"):
        model.swap(tmp_path / "damaged.safetensors")
    assert torch.allclose(model(x.to(device)).cpu(), models[0](x), rtol=1e-4, atol=1e-4)
    model.swap(files[1])
    assert torch.allclose(model(x.to(device)).cpu(), models[1](x), rtol=1e-4, atol=1e-4)
    [hasher] = digests._hashers.values()
    if "EMULATED_OPERATORS" in os.environ:  # which computes a wrong digest
        assert hasher is None
        assert "the host computes digests" in caplog.text
    else:
        assert hasher is not None
        assert hasher.was_faster, caplog.text
