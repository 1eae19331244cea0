"""Swaps on a GPU: streams, device memory, captured graphs. Runs on every accelerator that torch finds."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.accelerators import ACCELERATOR, on_accelerator, on_every_device, use_own_stream
from tests.support.sessions import bound_of, live, sessions_of
from tests.support.setups import different, equal
from tests.support.storm import Ledger, Seen, content, storm
from tests.support.tiny import TinyArtifact, WriteWeights, X
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import Artifact, DeviceError, InputMismatch, Model, OutOfMemory, Unsupported, load, write_delta
from weightswap_runtime.engines.torch_cpu import BoundTorch
from weightswap_runtime.memory import torch_device as own_streams
from weightswap_runtime.memory.device_memory import RESERVE, ring_of
from weightswap_runtime.memory.torch_device import Accelerator, open_accelerator

pytestmark = pytest.mark.filterwarnings("ignore:.*fallback.*:UserWarning")


class Counting(nn.Module):
    """A module with a prologue, state, constants, and a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.scale * self.scale + 1) + self.table

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.steps * 10 + x.shape[0]


class Files:
    """The artifact with goldens, and three sets of weights, with a delta."""

    def __init__(self, folder: Path) -> None:
        x = torch.linspace(-1, 1, 16).reshape(2, 8)
        shapes: dict[str, Any] = {"x": {0: Dim("batch", max=8)}}
        methods = {name: MethodSpec(name, (x,), dynamic_shapes=shapes) for name in ("forward", "count")}
        self.x = x
        self.models = [different(Counting, seed) for seed in range(3)]
        self.artifact: Artifact = export(
            self.models[0], methods=methods, goldens=[((x,), {})], tolerance=(1e-4, 1e-5), out=folder / "a"
        )
        packed = [
            pack(each, self.artifact, out=folder / f"v{seed}.safetensors") for seed, each in enumerate(self.models)
        ]
        self.files = [each.path for each in packed]
        self.delta = write_delta(self.files[1], self.files[2], folder / "d.safetensors").path

    def eager(self, seed: int, device: str, rows: int = 2) -> torch.Tensor:
        with torch.no_grad():
            model = different(Counting, seed).to(device)
            output: torch.Tensor = model(self.x[:rows].to(device))
        return output.cpu()

    def correct(self, model: Model, seed: int) -> bool:
        """Check that calls of two sizes equal eager on the same device, twice."""
        sizes = (2, 1, 2, 1)
        found = [model(self.x[:rows].to(model.device)).cpu() for rows in sizes]
        return equal(found, [self.eager(seed, model.device, rows) for rows in sizes])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("accelerator"))


STAGINGS = ["device", "host"]
Options = dict[str, Any]


@on_every_device
@pytest.mark.parametrize("staging", ["auto", "host"])
def test_swaps_of_every_kind(device: str, staging: str, residency: str, files: Files) -> None:
    options: Options = {"residency": residency, "staging": staging, "keep_previous": "host"}
    model = load(files.artifact, files.files[0], device=device, **options)
    assert files.correct(model, 0)
    for source, seed, more in (
        (files.files[1], 1, {}),
        (files.delta, 2, {}),
        (files.files[0], 0, {"only": "*"}),
        (files.files[2], 2, {"expect": None}),
    ):
        before = model.swap(source, **more).previous_weights_id
        assert files.correct(model, seed)
        assert model.rollback().weights_id == before
        model.rollback()
        assert files.correct(model, seed)
    with model.stage(files.files[1]) as staged:
        assert torch.equal(
            staged(files.x.to(device)).cpu(),
            files.eager(1, "cpu" if staging == "host" and residency == "single" else device),
        )
        assert files.correct(model, 2)


@on_accelerator
def test_a_swapped_model_equals_one_that_was_loaded(device: str, residency: str, files: Files) -> None:
    options: Options = {"residency": residency}
    cold = [load(files.artifact, file, device=device, **options)(files.x.to(device)) for file in files.files]
    for one in range(3):
        for other in range(3):
            warm = load(files.artifact, files.files[one], device=device, **options)
            warm.swap(files.files[other])
            assert torch.equal(warm(files.x.to(device)), cold[other])


@on_accelerator
def test_addresses_stay_over_a_thousand_swaps(device: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), device=device, residency="single")
    weights = [slot for slot in bound_of(model)._calls["forward"]._slots if isinstance(slot, torch.Tensor)]
    before = [tensor.data_ptr() for tensor in weights]
    files = [weight_file(seed) for seed in range(2)]
    x = X.to(device)
    for number in range(1000):
        model.swap(files[number % 2])
        if number % 100 < 2:
            assert torch.allclose(model(x).cpu(), TinyArtifact.eager(number % 2, X))
    assert [tensor.data_ptr() for tensor in weights] == before
    assert live(model).session.arena.address % 256 == 0


@on_accelerator
def test_state_is_in_order_across_streams(device: str, residency: str, files: Files) -> None:
    model = load(files.artifact, files.files[0], device=device, residency=residency)  # type: ignore[arg-type]
    x, found, lock = files.x.to(device), list[torch.Tensor](), Lock()
    context = model.new_context()
    torch.accelerator.synchronize()

    def count(_: int) -> None:
        use_own_stream(device)
        for _ in range(20):
            with lock:
                found.append(model.count(x, context=context))
        torch.accelerator.current_stream().synchronize()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(count, range(3)))
    assert sorted(int(value) for value in found) == [10 * number + 2 for number in range(1, 61)]
    model.swap(files.files[1])
    assert int(model.count(x)) == 12


@on_accelerator
def test_inputs_elsewhere_are_refused(device: str, files: Files) -> None:
    model = load(files.artifact, files.files[0], device=device)
    with pytest.raises(InputMismatch, match=rf"expected a tensor on {device}:0, got one on cpu: move it with .to\("):
        model(files.x)
    assert model.device == f"{device}:0"


@on_accelerator
@pytest.mark.parametrize("staging", STAGINGS)
def test_goldens_are_reproduced_before_the_commit(device: str, staging: str, residency: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    models = [different(Counting, seed) for seed in range(2)]
    artifact = export(models[0], (x,), out=tmp_path / "a")
    good = pack(models[0], artifact, out=tmp_path / "good.safetensors").path
    goldens: Options = {"goldens": [((x,), {})], "tolerance": (1e-4, 1e-5)}
    proven = pack(models[1], artifact, out=tmp_path / "proven.safetensors", **goldens).path
    options: Options = {"residency": residency, "staging": staging}
    model = load(artifact, good, device=device, **options)
    assert model.swap(proven).verified == "goldens"
    assert model.swap(good).verified == "none"


@on_accelerator
def test_out_of_memory_is_a_refused_swap(
    device: str, tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), device=device, residency="single", staging="device")

    def full(self: Accelerator, nbytes: int) -> None:
        raise MemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "allocate", full)
        with pytest.raises(OutOfMemory):
            model.swap(weight_file(1))
    assert model.generation == 0
    model.swap(weight_file(1))
    assert torch.allclose(model(X.to(device)).cpu(), TinyArtifact.eager(1, X))


@on_accelerator
def test_models_share_weights(device: str, residency: str, files: Files) -> None:
    first = load(files.artifact, files.files[0], device=device, residency=residency)  # type: ignore[arg-type]
    second = load(files.artifact, share=first, staging="device")  # the same as the first model's
    assert files.correct(second, 0)
    assert second.device == first.device
    second.swap(files.files[1])
    assert files.correct(first, 1)
    assert files.correct(second, 1)


def replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator other than CUDA: use a recorder that repeats its work."""
    from tests.devices.test_captures import Replayer
    from weightswap_runtime.engines.torch_device import AcceleratedEngine

    if ACCELERATOR != "cuda":
        monkeypatch.setattr(AcceleratedEngine, "_new_recorder", lambda self: Replayer())


@on_accelerator
@pytest.mark.parametrize("wanted", [[{"batch": 2}, {"batch": 1}], "auto"])
def test_captured_calls_follow_every_swap(
    device: str, wanted: Any, residency: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying(monkeypatch)
    options: Options = {"residency": residency, "cuda_graphs": wanted, "keep_previous": "host"}
    model = load(files.artifact, files.files[0], device=device, **options)
    plain = load(files.artifact, files.files[0], device=device)
    for number in range(30):
        seed = number % 3
        model.swap(files.files[seed])
        plain.swap(files.files[seed])
        for rows in (2, 1, 2, 3):
            x = files.x[:1].repeat(rows, 1).to(device)
            assert torch.equal(model(x), plain(x))
    model.rollback()
    assert files.correct(model, 1)
    context = model.new_context()
    assert [int(model.count(files.x.to(device), context=context)) for _ in range(3)] == [12, 22, 32]
    recorded = [bound_of(model, session)._captures._captured for session in sessions_of(model)]
    assert all(len(each) >= 2 for each in recorded)


@on_accelerator
def test_captured_calls_from_several_streams(
    device: str, residency: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying(monkeypatch)
    model = load(files.artifact, files.files[0], device=device, residency=residency, cuda_graphs="auto")  # type: ignore[arg-type]
    answers = {content(files.eager(seed, device)): seed for seed in range(3)}
    x, ledger = files.x.to(device), Ledger(model, 0)
    torch.accelerator.synchronize()

    def call(_: int) -> Seen:
        return ledger.watch(lambda: model(x), answers)

    with storm(call, 4, lambda _: use_own_stream(device)) as seen:
        for number in range(40):
            ledger.committed(model.swap(files.files[number % 3]), number % 3)
    ledger.check(seen)
    assert all(len(each) > 3 for each in seen)


on_cuda = pytest.mark.skipif(ACCELERATOR != "cuda", reason="asks CUDA itself")


@on_accelerator
@on_cuda
def test_the_host_does_not_wait_in_a_commit(device: str, files: Files) -> None:
    from torch.profiler import ProfilerActivity, profile

    model = load(files.artifact, files.files[0], device=device)
    model.swap(files.files[1])
    x = files.x.to(device)
    model(x)
    commits = 10
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(commits):
            model.rollback()
            model(x)
    names = [event.name for event in trace.events()]
    if not any(name.startswith(("cudaLaunch", "cuLaunch")) for name in names):
        pytest.skip("the profiler is told of none of CUDA's calls here")
    waits = [name for name in names if name in ("cudaDeviceSynchronize", "cudaStreamSynchronize")]
    assert len(waits) < commits, waits  # the profiler itself waits when it begins and ends
    assert not {*names} & {"cudaMemcpy", "cudaEventSynchronize"}


class Picking(nn.Module):
    """`pick` cannot be captured: the host waits for the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() * self.linear.weight.sum()


@on_accelerator
@on_cuda
def test_after_a_call_that_cannot_be_captured_torch_is_in_order(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    picking = different(Picking, 0)
    artifact = export(
        picking, methods={name: MethodSpec(name, (x,)) for name in ("forward", "pick")}, out=tmp_path / "a"
    )
    file = pack(picking, artifact, out=tmp_path / "v.safetensors").path
    model, plain = (load(artifact, file, device=device, cuda_graphs=wanted) for wanted in ("auto", None))
    there = x.to(device)
    assert torch.equal(model.pick(there), plain.pick(there))
    assert "pick: calls run without a CUDA graph" in caplog.text
    assert torch.equal(model(there), plain(there))
    assert caplog.text.count("without a CUDA graph") == 1
    torch.rand(1, device=device)
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    lent = torch.empty(1 << 20, device=device)
    lent.record_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    del lent
    torch.cuda.synchronize()
    after = torch.empty(1, device=device)  # here torch looks for memory that it can reuse
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < before + (1 << 20), after


@on_accelerator
@on_cuda
def test_the_memory_of_the_staging_before_is_free_for_the_next_on_a_full_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts it as active until something is allocated, as the commit's stream has used it."""
    models = [different(lambda: nn.Linear(2048, 2048), seed) for seed in range(2)]
    artifact = export(models[0], (torch.zeros(1, 2048),), out=tmp_path / "a")
    files = [pack(each, artifact, out=tmp_path / f"v{index}.safetensors").path for index, each in enumerate(models)]
    model = load(artifact, files[0], device=device, residency="single", staging="auto")
    x = torch.ones(1, 2048, device=device)
    model(x)
    model.swap(files[1])
    torch.cuda.synchronize()
    total = torch.accelerator.get_memory_info()[1]
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (RESERVE, total))  # none for another set
    for index in (0, 1):
        receipt = model.swap(files[index])
        assert receipt.staged_in.kind == "device", receipt.staged_in
        assert torch.allclose(model(x).cpu(), models[index](x.cpu()), rtol=1e-3)
        torch.cuda.synchronize()


@on_accelerator
@on_cuda
def test_calls_that_cannot_be_captured_leave_no_memory(device: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    picking = different(Picking, 0)
    artifact = export(picking, methods={"pick": MethodSpec("pick", (x,))}, out=tmp_path / "a")
    file = pack(picking, artifact, out=tmp_path / "v.safetensors").path

    def reserved() -> int:
        load(artifact, file, device=device, cuda_graphs="auto").pick(x.to(device))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    reserved()  # allocates what is allocated once
    assert len({reserved() for _ in range(3)}) == 1


@on_accelerator
@on_cuda
def test_a_caller_s_autocast_applies_with_captures_too(device: str, files: Files) -> None:
    x = files.x.to(device)
    plain, captured = (load(files.artifact, files.files[0], device=device, cuda_graphs=each) for each in (None, "auto"))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = [model(x) for model in (plain, captured)]
    assert equal(*found)
    assert equal(plain(x), captured(x))
    assert not equal(found[0].float(), captured(x))


@on_accelerator
@on_cuda
def test_single_residency_with_host_staging_needs_little_more_than_the_weights(device: str, tmp_path: Path) -> None:
    linear = nn.Linear(8192, 8192)
    artifact = export(linear, (torch.zeros(1, 8192),), out=tmp_path / "a")
    files = [pack(nn.Linear(8192, 8192), artifact, out=tmp_path / f"v{seed}.safetensors").path for seed in range(2)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(artifact, files[0], device=device, residency="single", staging="host")
    for number in range(4):
        assert model.swap(files[number % 2]).staged_in.kind == "host"
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= artifact.manifest.total_bytes + (256 << 20)


@pytest.mark.cuda
@on_cuda
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")
def test_a_second_device_never_touches_the_first(files: Files) -> None:
    gc.collect()  # frees what earlier tests have left
    first = load(files.artifact, files.files[0], device="cuda:0")
    before = torch.cuda.memory_allocated(0)
    second = load(files.artifact, files.files[1], device="cuda:1")
    second.swap(files.files[2])
    assert torch.equal(second(files.x.to("cuda:1")).cpu(), files.eager(2, "cuda:1"))
    assert torch.cuda.memory_allocated(0) == before
    assert files.correct(first, 0)


@on_accelerator
def test_devices_have_one_name(device: str, files: Files) -> None:
    for given in (device, torch.device(device), f"{device}:0"):
        model = load(files.artifact, files.files[0], device=given)  # type: ignore[arg-type]
        assert model.device == f"{device}:0"
    sharing = load(files.artifact, share=model, device=device)
    assert files.correct(sharing, 0)
    with pytest.raises(Unsupported, match="there are"):
        load(files.artifact, files.files[0], device=f"{device}:255")


@pytest.mark.cuda
@on_cuda
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")
def test_a_shared_model_stays_where_it_is(files: Files) -> None:
    model = load(files.artifact, files.files[0], device="cuda")
    with torch.cuda.device(1):
        sharing = load(files.artifact, share=model)
        assert sharing.device == "cuda:0"
        with pytest.raises(Unsupported, match="device='cuda': the model to share with is on 'cuda:0'"):
            load(files.artifact, share=model, device="cuda")
    assert files.correct(sharing, 0)


@on_accelerator
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "emulated_pageable_copies"), reason="the emulation counts them")
@pytest.mark.parametrize("staging", STAGINGS)
def test_nothing_goes_through_pageable_memory(device: str, staging: str, residency: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 2048).reshape(4, 512)  # smaller copies are not counted
    models = [different(lambda: nn.Linear(512, 512), seed) for seed in range(2)]
    artifact = export(models[0], (x,), out=tmp_path / "a")
    goldens: Options = {"goldens": [((x,), {})], "tolerance": (1e-4, 1e-5)}
    files = [pack(each, artifact, out=tmp_path / f"v{n}.safetensors", **goldens).path for n, each in enumerate(models)]
    before = ctypes.CDLL(None).emulated_pageable_copies()
    options: Options = {"residency": residency, "staging": staging, "keep_previous": "host"}
    model = load(artifact, files[0], device=device, **options)
    assert model.swap(files[1]).verified == "goldens"
    model.swap(write_delta(files[1], files[0], tmp_path / "d.safetensors").path)
    model.swap(files[1], only="*")
    model.rollback()
    assert ctypes.CDLL(None).emulated_pageable_copies() == before


@on_accelerator
@on_cuda
def test_each_model_has_streams_of_its_own_and_all_share_page_locked_memory(device: str) -> None:
    one, other = open_accelerator(device), open_accelerator(device)
    assert len({stream.stream_id for each in (one, other) for stream in (each.staging, each.commits)}) == 4
    assert ring_of(one) is ring_of(other)


@on_accelerator
@on_cuda
@pytest.mark.parametrize("residency", ["single", "double"])
def test_a_stream_that_is_not_torch_s_is_in_order_and_may_end(device: str, residency: str, files: Files) -> None:
    made = torch.cuda.Stream(device)
    handle = made.cuda_stream  # as an external stream it is foreign to torch
    model = load(files.artifact, files.files[0], device=device, residency=residency)  # type: ignore[arg-type]
    x = files.x.to(device)
    torch.accelerator.synchronize()
    for number in (1, 2, 1):
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, device)):
            found = model(x)
            torch.cuda.current_stream().synchronize()
        assert handle not in live(model).session.arena._users  # type: ignore[attr-defined]
        assert equal(found, model(x))
        model.swap(files.files[number])


@on_accelerator
@on_cuda
def test_a_capture_of_the_application_s_own_is_refused(device: str, files: Files) -> None:
    model, x = load(files.artifact, files.files[0], device=device), files.x.to(device)
    before = model(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Unsupported, match="replays of its graph would not be ordered with swaps"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            model(x)
    assert equal(model(x), before)


@on_accelerator
@on_cuda
def test_a_call_refused_in_a_capture_leaves_its_context_unchanged(device: str, files: Files) -> None:
    model, x = load(files.artifact, files.files[0], device=device), files.x.to(device)
    with model.new_context() as context:
        with pytest.raises(Unsupported), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model.count(x, context=context)
        assert int(model.count(x, context=context)) == 12


@pytest.mark.cuda
@on_cuda
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")
def test_a_capture_on_another_device_than_the_thread_s_is_refused(files: Files) -> None:
    model, x, stream = (
        load(files.artifact, files.files[0], device="cuda:1"),
        files.x.to("cuda:1"),
        torch.Stream("cuda:1"),
    )
    with stream:
        before = model(x)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1), pytest.raises(Unsupported):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream), torch.cuda.device(0):  # type: ignore[arg-type]
            model(x)
    assert equal(model(x), before)


@on_accelerator
@on_cuda
def test_an_application_s_capture_contains_no_part_of_a_staging(device: str, files: Files) -> None:
    model, x = load(files.artifact, files.files[0], device=device, residency="single"), files.x.to(device)
    graphs = []
    for number in range(1, 41):  # torch has 32 streams, and hands them out in turn
        staging = Thread(target=model.swap, args=(files.files[number % 3],))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            kept = x + number
            staging.start()
            staging.join(120)
        assert files.correct(model, number % 3)
    for graph in graphs:
        graph.replay()
    assert files.correct(model, 1)
    assert equal(kept, x + 40)


@on_accelerator
@on_cuda
def test_torch_hands_our_streams_to_nobody(device: str) -> None:
    ours = [open_accelerator(device) for _ in range(3)]
    handles = {stream.cuda_stream for each in ours for stream in (each.staging, each.commits)}  # type: ignore[attr-defined]
    theirs = {torch.cuda.Stream(device, priority=level).cuda_stream for level in (0, -1) for _ in range(40)}
    assert len(handles) == 6
    assert not handles & theirs
    del ours
    gc.collect()
    made = len(own_streams._created)
    for _ in range(40):
        open_accelerator(device)
    assert len(own_streams._created) == made


@on_accelerator
@on_cuda
def test_the_host_sleeps_while_it_waits_for_the_device(device: str) -> None:
    accelerator = open_accelerator(device)
    with accelerator.on(accelerator.staging):
        mark = accelerator.mark(accelerator.staging)
    assert isinstance(mark, torch.cuda.Event)
    accelerator.finish(mark)
    assert mark.query()


@on_every_device
def test_a_device_s_error_in_a_trial_does_not_blame_the_weights(
    device: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    model = load(files.artifact, files.files[0], device=device)
    with monkeypatch.context() as patch:
        patch.setattr(BoundTorch, "run", broken)
        with pytest.raises(DeviceError):
            model.swap(files.files[1])
    assert model.swap(files.files[1]).generation == 1
