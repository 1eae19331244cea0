"""The engine `aoti` on a GPU: machine code for its kind, in the calling thread's stream, over arenas there."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.accelerators import ACCELERATOR, moved, on_accelerator, use_own_stream
from tests.support.aoti import near
from tests.support.compiled import SIZES, WIDTH, Mixtures, needs_compiler, sample
from tests.support.storm import Ledger, Seen, content, storm
from weightswap_exporter import compile_engines, export, pack
from weightswap_runtime import Artifact, Unsupported, load
from weightswap_runtime.engines.aoti import target_of
from weightswap_runtime.engines.aoti_package import find_targets, gpu_target, package_file

on_gpu = pytest.mark.skipif(torch.version.cuda is None, reason="AOTInductor compiles for CUDA alone here")
ROWS = 8


class Sum(nn.Module):
    """One kernel, which reads weights and the caller's input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Sums:
    """The artifact, compiled for a GPU, with two sets of weights."""

    def __init__(self, folder: Path, device: str | None) -> None:
        shapes = {"x": {0: Dim("rows", max=ROWS)}}
        self.x = torch.linspace(0, 1, ROWS * WIDTH // 2).reshape(ROWS, -1)
        self.artifact: Artifact = export(Sum(), (self.x,), dynamic_shapes=shapes, out=folder / "sum.artifact")
        self.weights = [torch.full((WIDTH // 2,), float(seed)) for seed in (1, 2)]
        self.files = []
        for seed, weight in enumerate(self.weights):
            packed = pack({"weight": weight}, self.artifact, out=folder / f"v{seed}.safetensors")
            self.files.append(packed.path)
        if device is not None:
            self.artifact = compile_engines(self.artifact, ["aoti"], device=device)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Sums:
    return Sums(tmp_path_factory.mktemp("bare"), None)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Sums:
    return Sums(tmp_path_factory.mktemp("sums"), ACCELERATOR)


OPTIONS = [
    {"residency": "double"},
    {"residency": "single", "staging": "device"},
    {"residency": "single", "staging": "host"},
]


@on_accelerator
@on_gpu
@needs_compiler
@pytest.mark.parametrize("options", OPTIONS, ids=["double", "single-device", "single-host"])
def test_every_swap_shows_in_the_next_call(device: str, options: dict[str, Any], sums: Sums) -> None:
    model = load(sums.artifact, sums.files[0], engine="aoti", device=device, keep_previous="host", **options)
    assert model.engine == "aoti"
    x = sums.x.to(device)
    for number in range(20):
        with model.stage(sums.files[number % 2]) as staged:
            assert torch.equal(staged(x[:3]).cpu(), sums.x[:3] + sums.weights[number % 2])
            staged.commit()
        for rows in (ROWS, 1, 0):
            assert torch.equal(model(x[:rows]).cpu(), sums.x[:rows] + sums.weights[number % 2]), (number, rows)
    model.rollback()
    assert torch.equal(model(x).cpu(), sums.x + sums.weights[0])


@on_accelerator
@on_gpu
@needs_compiler
@pytest.mark.parametrize("residency", ["double", "single"])
def test_threads_in_streams_of_their_own_never_mix_sets(device: str, residency: Any, sums: Sums) -> None:
    model = load(sums.artifact, sums.files[0], engine="aoti", device=device, residency=residency)
    answers = {content(sums.x + weight): number for number, weight in enumerate(sums.weights)}
    x, ledger = sums.x.to(device), Ledger(model, 0)
    torch.accelerator.synchronize()

    def call(_: int) -> Seen:
        return ledger.watch(lambda: model(x), answers)

    with storm(call, 4, lambda _: use_own_stream(device)) as seen:
        for number in range(100):
            ledger.committed(model.swap(sums.files[number % 2]), number % 2)
    ledger.check(seen)


@on_accelerator
@on_gpu
@needs_compiler
def test_a_thread_without_a_cuda_context_may_call(device: str, sums: Sums) -> None:
    model = load(sums.artifact, sums.files[0], engine="aoti", device=device)
    x = sums.x.to(device)
    model(x)
    torch.accelerator.synchronize()
    gate = threading.Barrier(4)

    def call(_: int) -> torch.Tensor:
        gate.wait()  # all begin together, so that some load kernels
        return model(x)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(4)))
    assert [torch.equal(each.cpu(), sums.x + sums.weights[0]) for each in found] == [True] * 4


@on_accelerator
@on_gpu
@needs_compiler
def test_a_dropped_model_leaves_nothing_on_the_device(device: str, sums: Sums) -> None:
    x = sums.x.to(device)

    def use() -> int:
        model = load(sums.artifact, sums.files[0], engine="aoti", device=device)
        model(x)
        model.swap(sums.files[1])
        del model
        gc.collect()
        torch.accelerator.synchronize()
        return torch.cuda.memory_allocated()

    use()  # allocates what is allocated once
    assert len({use() for _ in range(3)}) == 1


@on_accelerator
@on_gpu
@needs_compiler
def test_it_is_near_eager_on_the_same_device(device: str, tmp_path: Path) -> None:
    mixtures = Mixtures(tmp_path)
    artifact = compile_engines(mixtures.artifact, ["aoti"], device=device)
    served = load(artifact, mixtures.files[0], engine="aoti", device=device)
    for model, file in zip(mixtures.models, mixtures.files, strict=True):
        served.swap(file)
        there = deepcopy(model).to(device)
        there.plain = there.plain.to(device)
        for rows in SIZES:
            given = moved(sample(rows), device)
            with torch.no_grad():
                expected = there(*deepcopy(given))
            assert near(served(*given), moved(expected, device)), rows
    on_cpu = load(artifact, mixtures.files[0], engine="aoti")  # both targets are in the artifact
    assert on_cpu.engine == "aoti"


@on_accelerator
@on_gpu
@needs_compiler
def test_packages_for_another_gpu_are_refused(device: str, sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (99, 9))
    with pytest.raises(Unsupported, match=r"was compiled for cuda-sm\d+; this GPU is cuda-sm999.*--device cuda"):
        load(sums.artifact, sums.files[0], engine="aoti", device=device)


@pytest.mark.cuda
@on_gpu
@needs_compiler
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_runs_the_same_package(sums: Sums) -> None:
    model = load(sums.artifact, sums.files[0], engine="aoti", device="cuda:1")
    model.swap(sums.files[1])
    found = model(sums.x.to("cuda:1"))
    assert found.device == torch.device("cuda:1")
    assert torch.equal(found.cpu(), sums.x + sums.weights[1])


def test_what_was_compiled_for_the_processor_alone_is_refused_on_a_gpu(bare: Sums) -> None:
    with pytest.raises(Unsupported, match=r"was not compiled for the engine 'aoti'.*--engine aoti --device cuda$"):
        find_targets(bare.artifact, gpu_target((9, 0)))


def test_other_devices_are_refused(bare: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="the engine 'aoti' runs on the CPU and on CUDA; 'xpu:0' is neither"):
        target_of(torch.device("xpu:0"))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Unsupported, match="'cuda:0' is neither on this machine"):
        target_of(torch.device("cuda:0"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for refused in (
        lambda: compile_engines(bare.artifact, ["aoti"], device="cuda"),
        lambda: load(bare.artifact, bare.files[0], engine="aoti", device="cuda"),
    ):
        with pytest.raises(Unsupported):
            refused()
    with pytest.raises(Unsupported, match="device='cuda': what is compiled for onnx is the same for all devices"):
        compile_engines(bare.artifact, ["onnx"], device="cuda")


def test_a_gpu_has_a_target_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightswap_exporter.engines.aoti import build_target

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    assert [build_target(torch.device("cuda", index)) for index in (0, 1)] == ["cuda-sm90", "cuda-sm91"]
    assert build_target(torch.device("cpu")).startswith("cpu-")
    assert package_file(gpu_target((12, 0)), "forward") == "engines/aoti/cuda-sm120/forward.pt2"


def test_a_missing_toolkit_is_named() -> None:
    from weightswap_exporter.engines import aoti as aoti_compiler

    said = RuntimeError(
        "C++ compile error\nmodel.h:15:10: fatal error: cuda.h: No such file or directory\n   15 | #include"
    )
    explained = aoti_compiler._explained("method 'forward'", said)
    assert "compiles for GPUs with the CUDA toolkit, and cannot find cuda.h. Install" in str(explained)
