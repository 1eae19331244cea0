"""Order between streams that are busy for seconds: they wait for each other, and the host for neither."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerators import ACCELERATOR, on_accelerator, use_own_stream
from tests.support.sessions import bound_of, sessions_of
from tests.support.slow_streams import EMULATED, NumberFiles, keep_busy, number, slow_copies
from weightswap_exporter import export, pack
from weightswap_runtime import Model, load
from weightswap_runtime.engines.torch_device import AcceleratedEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fallback.*:UserWarning"),
    pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs torch.cuda._sleep"),
]
BUSY, PROMPT = (1.5, 0.75) if EMULATED else (1.0, 0.5)  # seconds; two cores need more
MB = 1 << 20
OPTIONS = [
    {"residency": "double"},
    {"residency": "single", "staging": "device"},
    {"residency": "single", "staging": "host"},
]
in_every_way = pytest.mark.parametrize("options", OPTIONS, ids=["double", "single-device", "single-host"])
captured_or_not = pytest.mark.parametrize("graphs", [None, [{}]], ids=["plain", "captured"])
Options = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> NumberFiles:
    return NumberFiles(tmp_path_factory.mktemp("numbers"), (1 if EMULATED else 16) * MB, 3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> NumberFiles:
    """Small files for what is done so often that reading would take all the time."""
    return NumberFiles(tmp_path_factory.mktemp("small"), MB, 3)


class DelayedCalls:
    """Calls in a stream of their own, behind work that takes seconds, and their outputs."""

    def __init__(self, model: Model, x: torch.Tensor) -> None:
        self._model, self._x = model, x
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            model(x)  # loads kernels, for which the device may have to be idle
            keep_busy(0)
        torch.cuda.synchronize()

    def call(self, busy: float = BUSY) -> torch.Tensor:
        """Call without waiting, though the stream is busy for some seconds."""
        start = time.perf_counter()
        with torch.cuda.stream(self._stream):
            keep_busy(busy)
            output: torch.Tensor = self._model(self._x)
        assert time.perf_counter() - start < PROMPT, "the host waited in a call"
        return output

    def numbers(self, *outputs: torch.Tensor) -> list[int]:
        self._stream.synchronize()
        return [number(output.cpu()) for output in outputs]


@on_accelerator
@in_every_way
@captured_or_not
def test_a_delayed_call_has_the_weights_of_its_time(
    device: str, options: Options, graphs: Any, files: NumberFiles
) -> None:
    model = load(files.artifact, files.files[0], device=device, cuda_graphs=graphs, **options)
    delayed = DelayedCalls(model, torch.zeros((), device=device))
    outputs = []
    for served in (1, 2, 0):  # in double residency the second overwrites what the first call reads
        staged = model.stage(files.files[served])
        outputs.append(delayed.call())
        staged.commit()
    outputs.append(delayed.call())
    assert delayed.numbers(*outputs) == [0, 1, 2, 0]


@on_accelerator
@captured_or_not
def test_the_host_does_not_wait_for_a_busy_stream_in_a_commit_in_place(
    device: str, graphs: Any, files: NumberFiles
) -> None:
    options: Options = {"residency": "single", "staging": "device", "cuda_graphs": graphs}
    model = load(files.artifact, files.files[0], device=device, **options)
    x = torch.zeros((), device=device)
    delayed, others = DelayedCalls(model, x), DelayedCalls(model, x)
    staged = model.stage(files.files[1])
    late: list[torch.Tensor] = []
    before = delayed.call()
    start = time.perf_counter()
    thread = threading.Thread(target=lambda: (time.sleep(BUSY / 5), late.append(others.call())))
    thread.start()
    staged.commit()
    taken = time.perf_counter() - start
    thread.join()
    assert taken > PROMPT, "the commit did not wait for the call before it"
    assert delayed.numbers(before) == [0]
    assert others.numbers(*late) == [1]


@on_accelerator
def test_a_commit_in_double_residency_waits_for_nothing(device: str, files: NumberFiles) -> None:
    model = load(files.artifact, files.files[0], device=device)
    delayed = DelayedCalls(model, torch.zeros((), device=device))
    model.swap(files.files[1])
    before = delayed.call()
    start = time.perf_counter()
    model.rollback()
    assert time.perf_counter() - start < PROMPT
    assert delayed.numbers(before, delayed.call()) == [1, 0]


@on_accelerator
@in_every_way
@captured_or_not
def test_a_call_after_a_commit_waits_for_late_copies(
    device: str, options: Options, graphs: Any, files: NumberFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(files.artifact, files.files[0], device=device, cuda_graphs=graphs, **options)
    delayed = DelayedCalls(model, torch.zeros((), device=device))
    slow_copies(monkeypatch, BUSY / 5)
    for generation, served in enumerate((1, 2, 0), 1):
        staged = model.stage(files.files[served])
        thread = threading.Thread(target=staged.commit)
        thread.start()
        while model.generation != generation and thread.is_alive():
            time.sleep(0.0002)
        # from here on calls have the new weights, which are on their way
        output = delayed.call(0)
        thread.join()
        assert delayed.numbers(output) == [served]


class Shifted(torch.nn.Module):
    """A module with a constant that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(64.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.table


@on_accelerator
@pytest.mark.parametrize("residency", ["single", "double"])
def test_a_call_waits_for_constants_that_are_late(
    device: str, residency: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = export(Shifted(), (torch.zeros(64),), out=tmp_path / "a")
    file = pack(Shifted(), artifact, out=tmp_path / "v.safetensors").path
    x = torch.zeros(64, device=device)
    load(artifact, file, device=device)(x)  # loads kernels, for which the device may have to be idle
    to_device = AcceleratedEngine._to_device

    def late(self: AcceleratedEngine, value: torch.Tensor) -> torch.Tensor:
        keep_busy(BUSY / 3)
        return to_device(self, value)

    monkeypatch.setattr(AcceleratedEngine, "_to_device", late)
    assert torch.equal(load(artifact, file, device=device, residency=residency)(x).cpu(), torch.arange(64.0))


@contextmanager
def foreign_stream() -> Iterator[torch.cuda.ExternalStream]:
    """A stream that is not torch's, and is gone after the block: the driver may give its handle to the next one."""
    handle, runtime = ctypes.c_void_p(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert not int(runtime.cudaStreamCreate(ctypes.addressof(handle)))
    yield torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]
    runtime.cudaStreamDestroy(handle.value)


@on_accelerator
@in_every_way
def test_calls_in_destroyed_streams_have_the_weights_of_their_time(
    device: str, options: Options, files: NumberFiles
) -> None:
    model = load(files.artifact, files.files[0], device=device, **options)
    x = torch.zeros((), device=device)
    model(x)
    torch.cuda.synchronize()
    for before, after in ((0, 1), (1, 2), (2, 0)):
        staged = model.stage(files.files[after])
        with foreign_stream() as stream, torch.cuda.stream(stream):
            keep_busy(BUSY / 3)
            output = model(x)
            done = stream.record_event()
        staged.commit()
        done.synchronize()  # torch lends the next stream what this one had, if it has its handle
        with foreign_stream() as stream, torch.cuda.stream(stream):
            later = model(x)
            stream.synchronize()
        assert (number(output.cpu()), number(later.cpu())) == (before, after)


@pytest.fixture
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from weightswap_runtime.memory.torch_device import Accelerator

    monkeypatch.setattr(Accelerator, "wait", lambda self, stream, mark: None)
    yield
    torch.accelerator.synchronize()


@on_accelerator
@pytest.mark.usefixtures("_without_waits")
def test_without_stream_waits_a_late_call_is_wrong(device: str, files: NumberFiles) -> None:
    model = load(files.artifact, files.files[0], device=device, residency="single", staging="device")
    delayed = DelayedCalls(model, torch.zeros((), device=device))
    staged = model.stage(files.files[1])
    torch.accelerator.synchronize()
    before = delayed.call()
    staged.commit()
    assert delayed.numbers(before) == [1]


@on_accelerator
@in_every_way
def test_addresses_stay_over_a_thousand_swaps_under_captured_calls(
    device: str, options: Options, small: NumberFiles
) -> None:
    model = load(small.artifact, small.files[0], device=device, cuda_graphs="auto", **options)
    x, stop, seen = torch.zeros((), device=device), threading.Event(), list[int]()
    seen.append(number(model(x).cpu()))

    def call() -> None:
        use_own_stream(device)
        while not stop.is_set():
            seen.append(number(model(x).cpu()))

    model.swap(small.files[1])
    before = addresses(model)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        for count in range(1000):
            model.swap(small.files[count % 3])
    finally:
        stop.set()
        thread.join()
    assert addresses(model) == before
    assert number(model(x).cpu()) == 999 % 3
    assert set(seen) == {0, 1, 2}


def addresses(model: Model) -> list[int]:
    """Return the addresses of the weights that each session's calls read."""
    bound = [bound_of(model, session) for session in sessions_of(model)]
    slots = [slot for each in bound for slot in each._calls["forward"]._slots]
    return [slot.data_ptr() for slot in slots if isinstance(slot, torch.Tensor)]
