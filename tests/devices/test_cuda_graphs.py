"""The recorder of CUDA graphs, on a stand-in for what torch does when a capture begins, ends and fails."""

from __future__ import annotations

import gc
import weakref
from itertools import count
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.standin import Queue, StandIn
from weightswap_runtime.engines import cuda_graphs
from weightswap_runtime.engines.cuda_graphs import CudaRecorder
from weightswap_runtime.errors import Unsupported

Pool = tuple[int, int]


class Cuda:
    """Process-wide state that a capture changes, as in torch 2.11: a failed `capture_end` does not restore it."""

    def __init__(self) -> None:
        self.pools = count(1)
        self.recording: set[Pool] = set()  # the allocator's; memory that was lent is freed only when there are none
        self.recording_on_host: set[Pool] = set()
        self.graphs: dict[Pool, int] = {}  # number of graphs of each pool
        self.generator_captures = False
        self.invalid = False

    def new_pool(self) -> Pool:
        return 0, next(self.pools)

    def stop(self, device: int, pool: Pool) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: Pool) -> None:
        self.graphs[pool] -= 1

    @property
    def in_order(self) -> bool:
        return not self.recording and not self.generator_captures


class Graph:
    """A CUDA graph."""

    cuda: Cuda

    def __init__(self) -> None:
        self.began = self.ended = False

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        self.pool = pool or self.cuda.new_pool()
        self.cuda.generator_captures = True
        if {self.pool} & (self.cuda.recording | self.cuda.recording_on_host):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        assert self.cuda.graphs.get(self.pool) != 0, "nobody can share a pool whose graphs are gone"
        assert capture_error_mode == "thread_local"
        self.cuda.recording.add(self.pool)
        self.cuda.recording_on_host.add(self.pool)
        self.cuda.graphs[self.pool] = self.cuda.graphs.get(self.pool, 0) + 1
        self.began = True

    def capture_end(self) -> None:
        if not self.began or self.ended:
            raise RuntimeError("CUDA error: no capture")
        self.ended = True
        if self.cuda.invalid:
            self.cuda.invalid = False
            raise torch.AcceleratorError("operation failed due to a previous error during capture")
        self.cuda.recording.remove(self.pool)
        self.cuda.recording_on_host.remove(self.pool)
        self.cuda.generator_captures = False

    def replay(self) -> None: ...

    def reset(self) -> None:
        self.cuda.release(0, self.pool)


class Accelerator(StandIn):
    """A stand-in that claims to be a CUDA device."""

    def __init__(self) -> None:
        super().__init__(0)
        self.torch = SimpleNamespace(type="cuda", lend=self.lend_stream)
        self.index = next(self.indices)
        self.spare: list[Queue] = []
        self.lent = 0

    indices = count()

    def lend_stream(self, owner: Any, priority: int, purpose: str) -> Queue:
        """Lend a stream for as long as `owner` lives."""
        assert (priority, purpose) == (0, "captures")
        self.lent += not self.spare
        stream = self.spare.pop() if self.spare else self.stream()
        weakref.finalize(owner, self.spare.append, stream)
        return stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(Graph, "cuda", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.new_pool)
    monkeypatch.setattr(cuda_graphs, "lend_stream", lambda owner, device, *which: device.lend(owner, *which))
    monkeypatch.setattr(cuda_graphs, "is_ours", lambda handle: True)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.stop, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr("weightswap_runtime.engines.cuda_graphs.torch.zeros", lambda *args, **kwargs: None)
    return made


def recorder(accelerator: Accelerator) -> CudaRecorder:
    return CudaRecorder(accelerator)  # type: ignore[arg-type]


def warm_ups(accelerator: Accelerator) -> Any:
    return cuda_graphs._shared_stream("warm-ups", accelerator)  # type: ignore[arg-type]


def returning(value: Any) -> Any:
    return lambda: [value]


def test_graphs_of_one_recorder_share_a_pool_and_no_stream_with_another(cuda: Cuda) -> None:
    accelerator, kept = Accelerator(), []
    for value in (1, 2):
        one = recorder(accelerator)
        kept.append(one)
        assert one.record(returning(value))[1] == [value]
        assert one.record(returning(value + 10))[1] == [value + 10]
    assert sorted(cuda.graphs.values()) == [2, 2]
    assert accelerator.lent == 3  # one each, and one for warm-ups
    assert cuda.in_order


def test_a_stream_is_lent_again_once_its_graphs_are_gone(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    seen: list[int] = []
    free_at_ends: list[int] = []
    monkeypatch.setattr(Graph, "__del__", lambda _: free_at_ends.append(len(accelerator.spare)), raising=False)

    def record(one: CudaRecorder) -> Any:
        return one.record(lambda: seen.append(accelerator.current_key()) or [])[0]  # type: ignore[func-returns-value]

    one = recorder(accelerator)
    replay = record(one)
    first = seen[-1]
    del one
    second = record(recorder(accelerator))
    assert seen[-1] != first  # the graph still replays
    del replay
    third = recorder(accelerator)
    record(third)
    assert seen[-1] == first
    assert set(free_at_ends) == {0}
    del second, third


def test_without_streams_of_our_own_graphs_are_refused(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "is_ours", lambda handle: False)
    with pytest.raises(Unsupported, match="cuda_graphs: CUDA creates no stream that is ours alone"):
        recorder(Accelerator())


def test_no_garbage_is_collected_while_a_graph_is_captured(cuda: Cuda) -> None:
    enabled: list[bool] = []
    recorder(Accelerator()).record(lambda: enabled.append(gc.isenabled()) or [])  # type: ignore[func-returns-value]
    assert enabled == [True, True, False]
    assert gc.isenabled()


def test_a_signal_handler_may_call_a_model_while_another_is_captured(cuda: Cuda) -> None:
    accelerator, kept = Accelerator(), list[Any]()

    def handled() -> list[Any]:
        if not kept:
            kept.append(recorder(accelerator))
            assert kept[0].record(returning(1))[1] == [1]
        return [2]

    found: list[Any] = []
    thread = Thread(target=lambda: found.append(recorder(accelerator).record(handled)[1]), daemon=True)
    thread.start()
    thread.join(120)
    assert found == [[2]]
    assert cuda.in_order


@pytest.mark.parametrize("before", [0, 1])
def test_torch_recovers_from_a_failed_capture(before: int, cuda: Cuda) -> None:
    one, calls = recorder(Accelerator()), count()
    for _ in range(before):
        one.record(returning(0))

    def refused() -> list[Any]:
        if next(calls) == 2:  # after the warm-ups
            cuda.invalid = True
            raise torch.AcceleratorError("operation not permitted when stream is capturing")
        return []

    with pytest.raises(torch.AcceleratorError):
        one.record(refused)
    assert cuda.in_order
    assert one.record(returning(3))[1] == [3]
    assert cuda.in_order


def test_the_repairing_capture_has_a_stream_of_its_own(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its graph, torch drops cuBLAS's memory of its stream, which must not be that of another graph."""
    accelerator, began, calls = Accelerator(), list[Any](), count()
    one, other = recorder(accelerator), recorder(accelerator)
    begin = Graph.capture_begin
    where = lambda graph, *args, **kwargs: (began.append(accelerator.current()), begin(graph, *args, **kwargs))  # noqa: E731
    monkeypatch.setattr(Graph, "capture_begin", where)

    def refused() -> list[Any]:
        if next(calls) == 2:
            cuda.invalid = True
            raise torch.AcceleratorError("operation not permitted when stream is capturing")
        return []

    other.record(returning(0))
    with pytest.raises(torch.AcceleratorError):
        one.record(refused)
    assert len(began) == 3
    assert not {id(began[2])} & {id(began[0]), id(began[1]), id(warm_ups(accelerator)), id(accelerator.default)}


def test_an_error_that_is_not_cuda_s_ends_the_capture(cuda: Cuda) -> None:
    one, calls = recorder(Accelerator()), count()

    def wrong() -> list[Any]:
        if next(calls) == 2:
            raise ValueError("an operator of a package")
        return []

    with pytest.raises(ValueError, match="of a package"):
        one.record(wrong)
    assert cuda.in_order
    assert not cuda.recording_on_host
    assert one.record(returning(3))[1] == [3]


def test_work_of_a_failed_warm_up_precedes_later_work(cuda: Cuda) -> None:
    accelerator, seen = Accelerator(), list[str]()

    def ask(what: str) -> None:
        accelerator.ask(lambda: seen.append(what) is None)

    def wrong() -> list[Any]:
        ask("warm-up")
        raise ValueError("an operator of a package")

    accelerator.slow = warm_ups(accelerator)
    ask("before")
    with pytest.raises(ValueError):
        recorder(accelerator).record(wrong)
    ask("after")
    accelerator.drain()
    assert seen == ["before", "warm-up", "after"]
    assert cuda.in_order


def test_other_devices_have_no_cuda_graphs() -> None:
    accelerator = Accelerator()
    accelerator.torch.type = "xpu"
    with pytest.raises(Unsupported, match="cuda_graphs on the device 'standin:0': CUDA graphs need a CUDA device"):
        recorder(accelerator)
