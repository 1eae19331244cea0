"""Streams that torch does not own, and the application's captures: kept in order, or refused by name."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.devices.test_standin_storm import Served, values_of
from tests.support.standin import Queue, StandIn
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import DeviceError, Unsupported
from weightswap_runtime.memory import device_memory, torch_device
from weightswap_runtime.memory import torch_device as own_streams
from weightswap_runtime.memory.torch_device import Accelerator, _Account


class Handles(StandIn):
    """A device whose driver gives a stream the handle of one that was destroyed."""

    def foreign_stream(self, handle: int) -> Queue:
        stream = self.stream()
        stream.key, stream.foreign = handle, True
        return stream


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(8))
def test_streams_with_a_reused_handle_see_no_mixture(
    seed: int, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    device, chance = Handles(seed), random.Random(seed)
    served = Served(tiny, residency, "auto", device, "host")
    files = [weight_file(number) for number in range(3)]
    now = 0
    served.model.swap(files[now])
    streams, found = [device.foreign_stream(1000), device.foreign_stream(2000)], []
    for _ in range(60):
        place = chance.randrange(2)
        with device.on(chance.choice([streams[place], device.default])):
            found.append((now, served.call()))
        for _ in range(chance.randrange(4)):
            device.step()
        if chance.random() < 0.3:  # destroyed with work left; the next has its handle
            device.end(streams[place])
            streams[place] = device.foreign_stream(streams[place].key)
        if chance.random() < 0.4:
            now = chance.randrange(3)
            served.model.swap(files[now])
    device.drain()
    for number, target in found:
        assert served.weights(target.content) == values_of(number)


def test_a_commit_comes_after_a_call_in_a_stream_that_has_ended(
    residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    device = Handles(0)
    served = Served(tiny, residency, "device", device, None)
    served.model.swap(weight_file(0))
    device.slow = stream = device.foreign_stream(1000)
    with device.on(stream):
        found = served.call()
    device.end(stream)
    for seed in (1, 2):
        served.model.swap(weight_file(seed))
    device.drain()
    assert served.weights(found.content) == values_of(0)


@pytest.mark.parametrize("what", ["swap", "part", "rollback"])
def test_an_application_s_capture_contains_no_part_of_a_swap(
    what: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    device = StandIn(0)
    served = Served(tiny, "single", "device", device, "host")
    for seed in range(2):
        served.model.swap(weight_file(seed))
    stream = device.stream()
    with device.on(stream):
        served.call()
    stream.capturing = True
    deeds = {
        "swap": partial(served.model.swap, weight_file(2)),
        "part": partial(served.model.swap, weight_file(2), only="*"),
        "rollback": served.model.rollback,
    }
    with pytest.raises(DeviceError, match="standin:0: a stream that calls have used is being captured"):
        deeds[what]()
    assert not served.model.failed
    stream.capturing = False
    found = served.call()
    assert served.model.rollback().generation == 2
    last = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(1)
    assert served.weights(last.content) == values_of(0)


@pytest.mark.parametrize("failed", [False, True])
def test_a_capture_that_begins_while_a_commit_waits_for_calls_refuses_it_alone(
    failed: bool, tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StandIn(0)
    served = Served(tiny, "single", "device", device, "host")
    served.model.swap(weight_file(0))
    stream = device.stream()
    with device.on(stream):
        served.call()
    gate = served.model._store.gate
    if failed:
        gate.fail("an earlier commit has failed")
    hold = gate._hold_idle

    def begin(*args: Any) -> bool:
        stream.capturing = True
        monkeypatch.setattr(device, "finish", None)  # in a capture the host must not wait for the device
        return hold(*args)

    staged = served.model.stage(weight_file(1))
    with monkeypatch.context() as patch:
        patch.setattr(gate, "_hold_idle", begin)
        with pytest.raises(DeviceError):
            staged.commit()
    stream.capturing = False
    monkeypatch.undo()
    assert served.model.failed == failed
    if not failed:
        found = served.call()
        device.drain()
        assert served.weights(found.content) == values_of(0)
    staged.commit()
    last = served.call()
    device.drain()
    assert served.weights(last.content) == values_of(1)


def a_stream(stream_id: int, handle: int = 0) -> Any:
    return SimpleNamespace(stream_id=stream_id, cuda_stream=handle)


def accelerator(kind: str = "cuda") -> Any:
    """An Accelerator without a device, for the methods that only look at numbers."""
    made: Any = object.__new__(Accelerator)
    made._on_cuda = kind == "cuda"
    made.torch = torch.device(kind, 0)
    return made


def test_torch_s_own_streams_are_known_by_their_numbers() -> None:
    cuda = accelerator()
    assert not cuda.is_foreign(a_stream(0))
    assert not cuda.is_foreign(a_stream(0b1000011))
    assert cuda.is_foreign(a_stream(0x7F0000001000, 0x7F0000001000))
    assert not accelerator("xpu").is_foreign(a_stream(0x1000))
    for handle, name in ((1, "cudaStreamLegacy"), (2, "cudaStreamPerThread")):
        with pytest.raises(Unsupported, match=f"{name}, a special CUDA handle: call on one of torch's streams"):
            cuda.is_foreign(a_stream(handle * 2, handle))


def test_a_stream_that_was_made_for_us_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_streams, "_created", {0x7F0000002000})
    assert not accelerator().is_foreign(a_stream(0x7F0000002000, 0x7F0000002000))


def test_streams_of_our_own_are_created_and_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        made: ClassVar[list[tuple[int, int, int]]] = []  # device, flags, priority

        def cudaStreamCreateWithPriority(self, handle: Any, flags: int, priority: int) -> int:  # noqa: N802
            handle._obj.value = 0x1000 * (1 + len(self.made))
            self.made.append((devices[-1], flags, priority))
            return 0

    devices: list[int] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        devices.append(device.index)
        yield

    monkeypatch.setattr(own_streams, "_spare", {})
    monkeypatch.setattr(own_streams, "_created", set())
    monkeypatch.setattr(own_streams.ctypes, "CDLL", lambda _: Runtime())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: a_stream(handle, handle))

    class Model:
        def __init__(self, index: int, *priorities: int) -> None:
            found = [own_streams.lend_stream(self, torch.device("cuda", index), each) for each in priorities]
            self.streams = [stream.stream_id for stream in found]

    first, second, third = Model(0, 0, -1), Model(0, 0), Model(1, 0)
    assert first.streams + second.streams + third.streams == [0x1000, 0x2000, 0x3000, 0x4000]
    assert Runtime.made == [(0, 1, 0), (0, 1, -1), (0, 1, 0), (1, 1, 0)]
    assert all(map(own_streams.is_ours, (0x1000, 0x4000)))
    del first
    assert Model(0, 0, -1).streams == [0x1000, 0x2000]
    assert len(Runtime.made) == 4


def test_torch_s_streams_are_used_if_cuda_is_linked_into_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_streams, "_spare", {})
    monkeypatch.setattr(own_streams.ctypes, "CDLL", lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    found = own_streams.lend_stream(accelerator(), torch.device("cuda", 0), -1)
    assert found == (torch.device("cuda", 0), -1)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("here", [0, 1])
def test_captures_are_checked_on_the_model_s_device(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [here]

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        devices.append(device.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: devices[-1] == 1)
    for index in (0, 1):
        cuda = accelerator()
        cuda.torch, cuda.index = torch.device("cuda", index), index
        assert cuda.is_capturing_here() == (index == 1)
    assert devices == [here]


def test_a_wait_for_an_event_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recorded:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def record(self, stream: Any) -> None:
            assert stream == "stream"

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch_device, "lend_stream", lambda *_: None)
    cuda: Any = Accelerator(torch.device("cuda", 0))
    assert isinstance(cuda.mark("stream"), Recorded)
    assert made == [{"blocking": True}]


def test_a_dropped_model_gives_its_streams_back_though_the_ring_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_rings", {})
    monkeypatch.setattr(torch_device, "lend_stream", lambda *_: None)
    first = Accelerator(torch.device("cuda", 0))
    ring, dropped = device_memory.ring_of(first), weakref.ref(first)
    del first
    assert dropped() is None
    assert device_memory.ring_of(Accelerator(torch.device("cuda", 0))) is ring


def test_collecting_an_arena_while_one_is_counted_does_not_block() -> None:
    account = _Account()

    def collected() -> None:
        with account.lock:  # the garbage collector runs anywhere
            account.add(-5)

    thread = Thread(target=collected, daemon=True)
    thread.start()
    thread.join(120)
    assert (thread.is_alive(), account.held) == (False, -5)


@pytest.mark.parametrize("own", [0, 600])
def test_calls_need_their_peak_less_arenas_and_present_memory(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {
        "allocated_bytes.all.peak": 1000 + own,
        "allocated_bytes.all.current": 300 + own // 2,
        "reserved_bytes.all.current": 900 + own // 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (50, 10_000))
    cuda = accelerator()
    cuda._account = _Account()
    for nbytes in (own, own // 2 - own):
        cuda._account.add(nbytes)
    assert cuda.needed_by_calls() == 700
    for dropped, free in ((0, 50), (400, 450), (5000, 650)):
        cuda._dropped = dropped
        assert cuda.free_bytes() == free

    def none(device: torch.device) -> Any:
        raise RuntimeError("does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", none)
    assert (cuda.needed_by_calls(), cuda.free_bytes()) == (0, 50)


class Counted(Accelerator):
    """Checks that freed bytes are counted by one thread at a time: the garbage collector runs in any thread."""

    dropped = 0

    @property
    def _dropped(self) -> int:  # type: ignore[override]
        return self.dropped

    @_dropped.setter
    def _dropped(self, nbytes: int) -> None:
        assert self._account.lock._is_owned()  # type: ignore[attr-defined]
        self.dropped = nbytes


def test_the_peak_of_calls_is_kept_over_a_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks of all memory and of arenas are at different times: their difference is too small after a staging."""
    used = {"current": 0, "peak": 0}

    def uses(nbytes: int) -> None:
        used["current"] += nbytes
        used["peak"] = max(used.values())

    def empty(nbytes: int, **_: Any) -> Any:
        uses(nbytes)
        return torch.zeros(1)

    statistics = lambda device: {f"allocated_bytes.all.{key}": value for key, value in used.items()}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_stats", statistics)
    cuda: Any = object.__new__(Counted)
    cuda._on_cuda, cuda.torch = True, torch.device("cuda", 0)
    cuda._account, cuda.staging = _Account(), None
    monkeypatch.setattr(cuda, "on", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty", empty)
    serving = cuda.allocate(40)
    uses(10)
    uses(-9)
    staged = cuda.allocate(40)
    assert cuda.needed_by_calls() == 9
    del staged
    assert cuda.dropped == 40
    uses(-40)
    uses(-1)
    assert cuda.needed_by_calls() == 10
    del serving
