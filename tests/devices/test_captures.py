"""Captured calls: replayed over the same addresses, in memory of their own, and only where that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.support.standin import StandIn
from weightswap_runtime.engines.cuda_graphs import MOST, Captures, Shapes
from weightswap_runtime.engines.torch_device import AcceleratedEngine, AcceleratedState, BoundAccelerated
from weightswap_runtime.errors import DeviceError, Unsupported
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.memory.arena import ArenaLayout
from weightswap_runtime.memory.device_arena import DeviceArena, Ring


class SynchronousDevice:
    """A device that does everything synchronously."""

    name = "nothing:0"

    def __init__(self) -> None:
        self.key = 0
        self.capturing: set[int] = set()
        self.waits: list[tuple[int, int]] = []

    def current(self) -> int:
        return self.key

    def current_key(self) -> int:
        return self.key

    def mark(self, stream: int) -> int:
        return stream

    def wait(self, stream: int, mark: int) -> None:
        self.waits.append((stream, mark))

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing


class Replayer:
    """Records as CUDA does: a replay does the same work with the same memory, whatever the values are."""

    def __init__(self) -> None:
        self.records = 0
        self.replays = 0
        self.lent: list[torch.Tensor] = []

    def record(self, function: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        self.records += 1
        function()
        outputs = function()

        def replay() -> None:
            self.replays += 1
            for static, value in zip(outputs, function(), strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(value)

        return replay, outputs

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        self.lent += tensors


class Small:
    """A method with a weight, a counter of runs, an integer input, and an input that it writes to."""

    def __init__(self, named: list[tuple[str, list[Any]]] | None = None, auto: bool = False) -> None:
        self.weight = torch.full((3,), 2.0)
        self.count = torch.zeros(())
        self.device = SynchronousDevice()
        self.recorder = Replayer()
        self.shapes = Shapes(named or [], auto)
        self.captures = self.session()

    def session(self) -> Captures:
        return Captures(self.device, self.recorder, self.shapes, self.run)  # type: ignore[arg-type]

    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        x, number, *rest = inputs
        if method == "broken":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.count += 1
        for each in rest:
            each.add_(1)
        return [x * self.weight + number, self.count.clone(), number, None]


def x(rows: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(start, start + rows * 3).reshape(rows, 3)


def test_named_shapes_are_captured_once_and_others_are_not() -> None:
    small = Small([("forward", [x(2), 5])])
    small.captures.capture_named()
    small.captures.capture_named()
    assert small.recorder.records == 1
    found = small.captures.replay("forward", [x(2, 7.0), 5])
    assert found is not None
    assert torch.equal(found[0], x(2, 7.0) * 2 + 5)
    assert found[2:] == [5, None]
    for other in ([x(3), 5], [x(2), 6], [x(2).t().contiguous().t(), 5]):
        assert small.captures.replay("forward", other) is None
    assert small.recorder.records == 1


def test_outputs_are_the_caller_s_own_and_follow_the_weights() -> None:
    small = Small(auto=True)
    found = [small.captures.replay("forward", [x(2, start), 0]) for start in (0.0, 1.0)]
    small.weight.fill_(-1.0)
    found.append(small.captures.replay("forward", [x(2, 2.0), 0]))
    for each, start, weight in zip(found, (0.0, 1.0, 2.0), (2, 2, -1), strict=True):
        assert each is not None
        assert torch.equal(each[0], x(2, start) * weight)
    assert [int(each[1]) for each in found if each] == [3, 4, 5]  # two runs were the capture's
    assert (small.recorder.records, small.recorder.replays) == (1, 3)


def test_another_session_captures_what_the_first_has_seen() -> None:
    small = Small(auto=True)
    small.captures.replay("forward", [x(2), 0])
    small.captures.replay("forward", [x(4), 0])
    other = small.session()
    other.capture_named()
    assert small.recorder.records == 4
    assert other.replay("forward", [x(4), 0]) is not None
    assert small.recorder.records == 4


def test_writes_to_an_input_reach_the_caller_s_tensor() -> None:
    small = Small(auto=True)
    for _ in range(2):
        given = x(2), torch.zeros(4)
        small.captures.replay("forward", [given[0], 0, given[1]])
        assert torch.equal(given[0], x(2))
        assert torch.equal(given[1], torch.ones(4))


def test_inputs_with_gradients_leave_no_trace() -> None:
    small = Small(auto=True)
    with torch.no_grad():
        found = small.captures.replay("forward", [x(2).requires_grad_(), 0])
    assert found is not None
    assert not found[0].requires_grad


def test_captured_inputs_have_the_caller_s_strides() -> None:
    """Otherwise a kernel could choose another algorithm than in eager."""
    small, seen = Small(auto=True), list[tuple[int, ...]]()

    def run(method: str, inputs: list[Any]) -> list[Any]:
        seen.append(inputs[0].stride())
        return small.run(method, inputs)

    captures = Captures(small.device, small.recorder, small.shapes, run)  # type: ignore[arg-type]
    for wide in (torch.arange(20.0).reshape(4, 5), torch.arange(20.0).reshape(5, 4).t()):
        found = captures.replay("forward", [wide[:, 1:4], 1])
        assert found is not None
        assert torch.equal(found[0], wide[:, 1:4] * 2 + 1)
        assert set(seen) == {wide.stride()}
        seen.clear()


def test_inputs_with_overlapping_elements_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    small = Small(auto=True)
    for _ in range(2):
        assert small.captures.replay("forward", [x(1).expand(4, 3), 0]) is None
    assert small.recorder.records == 0
    assert caplog.text.count("more than one element of the written-to tensor") == 1


def test_memory_for_inputs_is_lent_to_every_stream_once() -> None:
    small = Small(auto=True)
    for key in (0, 0, 7, 0, 7):
        small.device.key = key
        small.captures.replay("forward", [x(2), 0, torch.zeros(4)])
    assert [tensor.shape for tensor in small.recorder.lent] == [(2, 3), (4,)] * 2


def test_a_call_that_cannot_be_captured_is_logged_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    small = Small(auto=True)

    def run(method: str, inputs: list[Any]) -> list[Any]:
        return [torch.relu(inputs[0]).cumsum(0), small.run("broken", inputs)]

    captures = Captures(SynchronousDevice(), small.recorder, small.shapes, run)  # type: ignore[arg-type]
    for _ in range(2):
        assert captures.replay("forward", [x(2), 0]) is None
    captures.capture_named()
    assert captures.replay("forward", [x(2), 0]) is None
    assert small.recorder.records == 1
    (reason,) = small.shapes.failures.values()
    assert reason == "aten.cumsum.default: RuntimeError: operation not permitted when stream is capturing"
    assert "forward: calls run without a CUDA graph: aten.cumsum" in caplog.text


def test_the_number_of_captured_shapes_is_limited() -> None:
    small = Small(auto=True)
    for rows in range(MOST + 10):
        small.captures.replay("forward", [x(rows + 1), 0])
    assert small.recorder.records == MOST


def test_a_lack_of_memory_is_tried_again_after_the_next_swap() -> None:
    small = Small(auto=True)
    failing = True

    def run(method: str, inputs: list[Any]) -> list[Any]:
        if failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return small.run(method, inputs)

    captures = Captures(small.device, small.recorder, small.shapes, run)  # type: ignore[arg-type]
    for _ in range(2):
        assert captures.replay("forward", [x(2), 0]) is None
    assert small.recorder.records == 1
    failing = False
    captures.capture_named()  # as a swap does
    assert captures.replay("forward", [x(2), 0]) is not None


def served(device: StandIn, small: Small) -> BoundAccelerated:
    """Bind an engine to an arena that serves; small's shapes are captured."""
    layout = ArenaLayout([NamedTensor(name="a", dtype="U8", shape=(8,))])
    arena = DeviceArena(device, layout, Ring(device, 1), serves=True)
    bound = BoundAccelerated({}, arena, [], lambda: None, device)  # type: ignore[arg-type, return-value]
    bound._captures = small.captures
    return bound


@pytest.mark.parametrize("computed", [True, False])
def test_nothing_is_captured_while_a_commit_holds_calls(computed: bool) -> None:
    small, device = Small([("forward", [x(2), 0])]), StandIn(0)
    bound, other = served(device, small), served(device, Small())
    small.shapes.failed(next(iter(small.shapes.samples)), "forward", "no memory", passing=True)
    with bound._arena.writing(urgent=True):
        if computed:
            bound.run_prologue()
        else:
            assert bound.copy_prologue_from(other)
    assert small.recorder.records == 0
    assert small.captures.replay("forward", [x(2), 0]) is not None
    assert small.recorder.records == 1


def test_before_an_arena_serves_its_calls_are_captured() -> None:
    small, device = Small([("forward", [x(2), 0])]), StandIn(0)
    bound = served(device, small)
    with bound._arena.writing():
        bound.run_prologue()
    assert small.recorder.records == 1


def test_replays_wait_for_each_other_only_across_streams() -> None:
    small = Small(auto=True)
    for _ in range(3):
        small.captures.replay("forward", [x(2), 0])
    assert small.device.waits == []
    for key in (7, 7, 0):
        small.device.key = key
        small.captures.replay("forward", [x(2), 0])
    assert small.device.waits == [(7, 0), (0, 7)]


def test_a_replay_never_joins_an_application_s_capture() -> None:
    small = Small(auto=True)
    small.captures.replay("forward", [x(2), 0])
    small.device.capturing.add(0)
    small.device.key = 7
    with pytest.raises(DeviceError, match="being captured in a CUDA graph of the application"):
        small.captures.replay("forward", [x(2), 0])
    small.device.capturing.clear()
    assert small.captures.replay("forward", [x(2), 0]) is not None


@pytest.mark.parametrize("what", ["a new state", "a state that is put back", "a state that is read"])
def test_work_on_a_state_never_joins_an_application_s_capture(what: str) -> None:
    device: Any = StandIn(0)
    engine: Any = object.__new__(AcceleratedEngine)
    engine._accelerator = device
    state = AcceleratedState([], {}, device)
    deeds: dict[str, Callable[[], object]] = {
        "a new state": engine.new_state,
        "a state that is put back": state.reset,
        "a state that is read": lambda: state.content("count"),
    }
    device.current().capturing = True
    with pytest.raises(Unsupported, match=f"^{what} during a capture by the application"):
        deeds[what]()
