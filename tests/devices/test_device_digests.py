"""Digests that the device computes: the kernel, run on the host, and their use in a staging."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch import nn

from tests.devices.test_standin_storm import Served, values_of
from tests.support.accelerators import on_accelerator
from tests.support.sessions import sessions_of
from tests.support.setups import different
from tests.support.standin import StandIn
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_exporter import export, pack
from weightswap_runtime import DigestMismatch, load
from weightswap_runtime.format.identity import count_nonfinite
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory import device_arena, torch_device
from weightswap_runtime.memory.arena import ArenaLayout, BlockTable, ByteRange, Content, Inspected
from weightswap_runtime.memory.device_arena import DeviceArena, Ring
from weightswap_runtime.memory.torch_device import SOURCE, TorchBuffer, compile_source
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.staging import reading
from weightswap_runtime.tensors import BLOCK, DTYPES, block_digests
from weightswap_runtime.threads import WorkerThreads

Inspect = Callable[[bytearray, BlockTable], Inspected]
SIZES = [0, 1, 3, 4, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 4097, 256 * 1024 + 1]
SIZES += [BLOCK - 1025, BLOCK - 1024, BLOCK - 1, BLOCK]
FLOATS = ["F16", "BF16", "F32", "F64", "C64", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(folder: Path) -> Inspect:
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

    def inspect(memory: bytearray, blocks: BlockTable) -> Inspected:
        parts, results = torch_device.parts_of(blocks), np.zeros(len(blocks.kinds), torch_device.RESULT)
        content = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
        run(content, ctypes.c_void_p(parts.ctypes.data), ctypes.c_void_p(results.ctypes.data), len(parts), 3)
        return torch_device.inspected(results)

    return inspect


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Inspect:
    return compiled(tmp_path_factory.mktemp("kernel"))


def expected(memory: bytearray, blocks: BlockTable) -> Inspected:
    found = Inspected([], [])
    for index, (offset, length, kind) in enumerate(zip(*blocks[:3], strict=True)):
        content = memoryview(memory)[offset : offset + length]
        found.digests.append(blake3(content).digest())
        if count_nonfinite(blocks.dtypes[kind], content):
            found.nonfinite.append(index)
    return found


def some(blocks: BlockTable, first: int, count: int) -> BlockTable:
    return BlockTable(*(column[first : first + count] for column in blocks[:3]), blocks.dtypes)


@needs_compiler
@pytest.mark.slow
def test_the_kernel_is_blake3(kernel: Inspect) -> None:
    memory, contents = bytearray(), []
    for size in SIZES:
        memory += bytes(-len(memory) % 256)
        contents.append(Content(ByteRange(len(memory), size), "U8"))
        memory += random.Random(size).randbytes(size)
    blocks = BlockTable.of(contents)
    assert kernel(memory, blocks) == expected(memory, blocks)


@needs_compiler
@settings(max_examples=15)
@given(chunks=st.integers(0, 1023), rest=st.integers(0, 1024), seed=st.integers(0, 2**32))
def test_the_kernel_is_blake3_for_any_size(kernel: Inspect, chunks: int, rest: int, seed: int) -> None:
    memory = bytearray(random.Random(seed).randbytes(chunks * 1024 + rest) + b"\0")
    blocks = BlockTable.of([Content(ByteRange(0, len(memory) - 1), "I8")])
    assert kernel(memory, blocks) == expected(memory, blocks)


@needs_compiler
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_finds_what_is_not_finite(kernel: Inspect, dtype: str) -> None:
    """Patterns of up to 16 bits, and of the upper 16 of longer elements, each alone somewhere among finite values."""
    size = DTYPES[dtype].bits // 8 // (2 if dtype == "C64" else 1)
    patterns = range(256) if size == 1 else [*range(0, 1 << 16, 1021), 0x7C00, 0x7F80, 0x7F81, 0x7FF0, 0xFFF0, 0xFFFF]
    slot, memory, contents = 256, bytearray(), []
    for pattern in patterns:
        content = bytearray(b"\1" * slot if dtype.startswith("F8_E8") else slot)
        at = random.Random(pattern).randrange(slot // size) * size
        content[at : at + size] = (pattern << 8 * size - min(8 * size, 16)).to_bytes(size, "little")
        contents.append(Content(ByteRange(len(memory), slot), dtype))
        memory += content
    blocks = BlockTable.of(contents)
    found, wanted = kernel(memory, blocks), expected(memory, blocks)
    assert found == wanted
    assert 0 < len(wanted.nonfinite) < len(contents)


@needs_compiler
@settings(max_examples=30)
@given(data=st.binary(max_size=3000), dtype=st.sampled_from(["F64", "F32", "F16", "F8_E5M2"]))
def test_random_bytes_are_judged_as_on_the_host(kernel: Inspect, data: bytes, dtype: str) -> None:
    memory = bytearray(data[: len(data) // 8 * 8] + bytes(8))
    blocks = BlockTable.of([Content(ByteRange(0, len(memory) - 8), dtype)])
    assert kernel(memory, blocks) == expected(memory, blocks)


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
    assert b"inspect_parts" in compile_source(SOURCE.read_text(), (9, 0))
    with pytest.raises(RuntimeError, match=r"NVRTC: source\.cu.*undefined"):
        compile_source("__global__ void run() { undefined(); }", (9, 0))


class OnDevice:
    """An inspector of the stand-in's memory, which waits for the copies."""

    def __init__(self, device: StandIn, inspect: Inspect = expected) -> None:
        self._device = device
        self._inspect = inspect
        self.blocks = 0

    def __call__(self, buffer: Any, blocks: BlockTable) -> OnDevice:
        assert self._device.current() is self._device.inspecting
        self._memory, self._asked = buffer.content, blocks
        self._digests, self._nonfinite = dict[int, bytes](), list[int]()
        return self

    def inspect(self, first: int, count: int) -> None:
        def work() -> bool:
            found = self._inspect(self._memory, some(self._asked, first, count))
            self._digests |= dict(enumerate(found.digests, first))
            self._nonfinite += [first + index for index in found.nonfinite]
            return True

        assert self._device.current() is self._device.inspecting
        self._device.ask(work)
        self.blocks += count

    def results(self) -> Inspected:
        self._device.finish(self._device.mark(self._device.current()))
        return Inspected([self._digests[index] for index in range(len(self._asked.kinds))], sorted(self._nonfinite))


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
    kernel: Inspect,
    device: StandIn,
    residency: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.inspection = inspector = OnDevice(device, kernel)
    monkeypatch.setattr(reading, "blake3", None)
    model = served(tiny, device, residency)
    for seed in range(3):
        model.model.swap(weight_file(seed))
    assert serves(model, 2)
    assert inspector.blocks == 3 * len(tiny.values(0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(5))
def test_windows_are_inspected_while_others_are_copied(
    seed: int, device: StandIn, residency: str, tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block once, after its copy, whatever the order in which threads read and streams work."""
    monkeypatch.setattr(device_arena, "WINDOW", 1)
    device.inspection = inspector = OnDevice(device)
    model = served(tiny, device, residency)
    values = tiny.values(seed)
    values["weight"][0, 1], values["bias"][0] = torch.nan, torch.inf
    path = tiny.write(tiny.path.parent / f"{seed}.safetensors", values)
    receipt = model.model.swap(path, allow_nonfinite=True)
    assert inspector.blocks == len(values)
    device.inspection = None
    by_host = served(tiny, device, residency).model.swap(path, allow_nonfinite=True)
    assert (receipt.weights_id, receipt.nonfinite) == (by_host.weights_id, by_host.nonfinite)
    assert receipt.nonfinite["weight"].nan == 1


def test_what_the_device_inspects_is_read_in_large_pieces(
    device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no native code, each read costs the interpreter as much as a fraction of a MiB."""
    device.uploads = False
    layout = ArenaLayout([NamedTensor(name=name, dtype="U8", shape=(20 * BLOCK + 5,)) for name in "ab"])
    path = tmp_path / "w.safetensors"
    save_file({name: np.full(20 * BLOCK + 5, ord(name), np.uint8) for name in "ab"}, path)
    reads: list[int] = []
    read_into = LocalFile.read_into

    def counted(file: LocalFile, buffers: list[memoryview], offset: int) -> None:
        reads.append(sum(map(len, buffers)))
        read_into(file, buffers, offset)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    device.inspection = OnDevice(device)
    arena = DeviceArena(device, layout, Ring(device, 4), serves=True)
    with open_weights(path) as weights, arena.writing():
        found = reading.read_tensors(weights, {name: (name,) for name in "ab"}, arena, WorkerThreads(2), Job())
    large = [size for size in reads if size > BLOCK]  # all but the header
    assert len(large) == 4
    assert sum(large) == 2 * (20 * BLOCK + 5)
    for name in "ab":
        content = bytes([ord(name)]) * (20 * BLOCK + 5)
        assert found.digests[name] == block_digests(memoryview(content))


@given(st.lists(st.tuples(st.integers(0, 5 * BLOCK), st.sampled_from(FLOATS)), min_size=1, max_size=20), st.data())
def test_blocks_are_those_of_each_tensor(tensors: list[tuple[int, str]], data: st.DataObject) -> None:
    offset, contents, wanted = 0, [], []
    for size, dtype in tensors:
        slot = ByteRange(offset, size)
        contents.append(Content(slot, dtype))
        wanted += [(*part, dtype) for part in (slot.split(BLOCK) if size else [slot])]
        offset += -(-size // 256) * 256
    blocks = BlockTable.of(contents)
    assert [(*row[:2], blocks.dtypes[row[2]]) for row in zip(*blocks[:3], strict=True)] == wanted
    window = data.draw(st.integers(1, 8 * BLOCK))
    ends = blocks.windows(window)
    assert ends[-1] == len(wanted)
    assert ends == sorted(set(ends))
    sizes = [sum(size for _, size, _ in wanted[begin:end]) for begin, end in pairwise([0, *ends])]
    assert max(sizes) < window + BLOCK


def test_the_device_refuses_a_damaged_file_as_the_host_does(
    device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    good, damaged = weight_file(0), weight_file(1)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    messages = []
    for inspector in (None, OnDevice(device)):
        device.inspection = inspector
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
    slot = sessions_of(model.model)[0].arena.layout.slots["bias"]

    def turning(memory: bytearray, blocks: BlockTable) -> Inspected:
        memory[slot.offset] ^= 4
        return expected(memory, blocks)

    device.inspection = OnDevice(device, turning)
    with pytest.raises(DigestMismatch, match="bias: the file records the digest"):
        model.model.swap(weight_file(1))
    assert serves(model, 0)


def test_a_wrong_kernel_is_not_used_again(device: StandIn, residency: str, tiny: TinyArtifact) -> None:
    device.inspection = inspector = OnDevice(
        device, lambda memory, blocks: Inspected([bytes(32)] * len(blocks.kinds), [])
    )
    model = served(tiny, device, residency)
    values = tiny.values(0)
    values["bias"][1] = torch.nan
    path = tiny.write(tiny.path.parent / "nan.safetensors", values)
    receipt = model.model.swap(path, allow_nonfinite=True)
    assert device.inspection is None
    assert receipt.nonfinite["bias"].nan == 1
    model.model.swap(path, allow_nonfinite=True)
    assert inspector.blocks == len(values)  # once, and never again


class Refusing(OnDevice):
    """An inspector that raises in one of its methods."""

    def __init__(self, device: StandIn, method: str, error: Exception) -> None:
        super().__init__(device)
        self.asked = 0

        def refuse(*_: object) -> None:
            self.asked += 1
            raise error

        setattr(self, method, refuse)
        self._refuses_at_once = refuse if method == "inspector" else None

    def __call__(self, buffer: Any, blocks: BlockTable) -> OnDevice:
        if self._refuses_at_once is not None:
            self._refuses_at_once()
        return super().__call__(buffer, blocks)


@pytest.mark.parametrize("method", ["inspector", "inspect", "results"])
@pytest.mark.parametrize("lacks_memory", [True, False])
def test_an_inspector_that_fails_refuses_no_weights(
    method: str, lacks_memory: bool, device: StandIn, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    error = "CUDA out of memory" if lacks_memory else "CUDA error: no kernel image is available for execution"
    device.inspection = inspector = Refusing(
        device, method, torch.OutOfMemoryError(error) if lacks_memory else RuntimeError(error)
    )
    model = served(tiny, device, residency)
    model.model.swap(weight_file(1))
    assert serves(model, 1)
    assert inspector.asked
    assert (device.inspection is inspector) == lacks_memory  # the next attempt may have more memory


def test_the_host_hashes_small_sets(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    device = StandIn(0)
    device.inspection = inspector = OnDevice(device)
    model = served(tiny, device, "double")
    model.model.swap(weight_file(1))
    assert inspector.blocks == 0
    assert serves(model, 1)


@on_accelerator
@pytest.mark.skipif("EMULATED_OPERATORS" in os.environ, reason="the emulated device runs no kernels")
def test_the_kernel_is_blake3_on_a_gpu(device: str) -> None:
    memory = torch.randint(0, 256, (96 * BLOCK + 12345,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    memory[64 * BLOCK : 80 * BLOCK] = 0
    starts = [random.Random(size).randrange(64 * BLOCK) // 256 * 256 for size in SIZES]
    contents = [Content(ByteRange(start, size), "U8") for start, size in zip(starts, SIZES, strict=True)]
    for index, dtype in enumerate([*FLOATS, "U8"]):
        contents.append(Content(ByteRange(index * 8 * BLOCK, 8 * BLOCK), dtype))
    contents.append(Content(ByteRange(80 * BLOCK, 16 * BLOCK + 12344), "F32"))
    blocks = BlockTable.of(contents)
    found = on_gpu(device, memory, blocks)
    assert found == expected(bytearray(memory.numpy().tobytes()), blocks)
    assert 0 < len(found.nonfinite) < len(found.digests)


def on_gpu(device: str, memory: torch.Tensor, blocks: BlockTable) -> Inspected:
    accelerator = torch_device.open_accelerator(device)
    with torch.device(device), accelerator.on(accelerator.inspecting):  # a mode of the thread that swaps
        inspector = accelerator.inspector(TorchBuffer(memory.to(device)), blocks)
        assert inspector is not None
        for first in range(0, len(blocks.kinds), 50):
            inspector.inspect(first, min(50, len(blocks.kinds) - first))
        return inspector.results()


@on_accelerator
def test_large_sets_swap_or_are_refused_with_either_hasher(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "_kernels", {})  # or the result of an earlier test is not logged again
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
    [kernel] = torch_device._kernels.values()
    if "EMULATED_OPERATORS" in os.environ:  # which computes a wrong digest
        assert kernel is None
        assert "the host computes digests" in caplog.text
    else:
        assert kernel is not None, caplog.text
