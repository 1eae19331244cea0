"""Swaps of whole models on the stand-in: every call reads exactly the weights that were served when it began."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sessions import sessions_of
from tests.support.standin import Broken, Memory, StandIn
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import Artifact, DeviceError, Model, ModelFailed, OutOfMemory
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.device_arena import DeviceArena, Ring
from weightswap_runtime.memory.device_memory import RESERVE, DeviceMemory
from weightswap_runtime.tensors import TensorBytes

STAGINGS = ("device", "host", "auto")


class Reader:
    """An engine whose calls copy the arena, in the current stream, to memory that the test reads at the end."""

    name = "reader"
    tensor_type = np.ndarray
    dtypes: Mapping[Any, str] = {np.dtype("f4"): "F32"}

    def __init__(self, device: StandIn) -> None:
        self._device = device

    runs: Mapping[str, str] = {}

    def misplaced(self, value: Any) -> None: ...

    def kind(self, value: Any) -> Hashable:
        return value.shape

    def tensor(self, content: TensorBytes) -> Any:
        raise NotImplementedError

    def content(self, value: Any) -> TensorBytes:
        raise NotImplementedError

    def environment(self) -> None: ...

    def default_torch_modes(self) -> AbstractContextManager[object]:
        return nullcontext()

    def bind(self, arena: Arena) -> Any:
        return BoundReader(self._device, arena)


class BoundReader:
    has_prologue = False

    def __init__(self, device: StandIn, arena: Arena) -> None:
        self._device = device
        self._arena = arena

    def run(self, method: str, inputs: list[Any], state: Any = None, chosen: Any = None) -> list[Any]:
        size = self._arena.layout.nbytes
        if not isinstance(self._arena, DeviceArena):
            return [bytes(self._arena.fetch(0, size))]
        target = Memory(size, False, set())
        foreign = self._arena.use()
        self._device.copy(target, 0, self._arena.buffer, 0, size)
        if foreign:
            self._arena.leave()
        return [target]

    def run_prologue(self) -> None: ...

    def copy_prologue_from(self, other: object) -> bool:
        return True


class Served:
    """A model on a stand-in, and what its arena must hold for each seed."""

    def __init__(
        self,
        tiny: TinyArtifact,
        residency: str,
        staging: str,
        device: StandIn,
        keep: str | None,
        ring: Ring | None = None,
    ) -> None:
        self.device = device
        artifact = Artifact.open(tiny.path)
        memory = DeviceMemory(device, ring or Ring(device, 12), staging)
        store = WeightStore(artifact.manifest.weights, residency, keep, memory)
        self.model = Model(artifact, store, device=device.name, engine=Reader(device))

    def call(self, caller: Any = None) -> Memory:
        found: Memory = (caller or self.model)(np.zeros((2, 3), "f4"))
        return found

    def weights(self, content: bytes | bytearray) -> dict[str, bytes]:
        slots = sessions_of(self.model)[0].arena.layout.slots
        return {name: bytes(content[slot.offset : slot.offset + slot.nbytes]) for name, slot in slots.items()}


def values_of(seed: int) -> dict[str, bytes]:
    return {name: bytes(value.numpy().tobytes()) for name, value in TinyArtifact.values(seed).items()}


class Storm:
    """Calls in several streams, swaps of all kinds, and a device that takes its time, in random order."""

    def __init__(self, served: Served, files: list[Path], seed: int) -> None:
        self._served = served
        self._model = served.model
        self._files = files
        self._chance = random.Random(seed)
        self._device = served.device
        self._streams = [self._device.default, self._device.stream(), self._device.stream()]
        self._now, self._before = 0, 0
        self.calls: list[tuple[int, Memory | bytes]] = []
        self._model.swap(files[0])
        self._model.swap(files[0])

    def run(self, steps: int) -> None:
        deeds = [self.call] * 6 + [self.let_the_device_work] * 6
        deeds += [self.swap, self.swap_a_part, self.roll_back, self.discard, self.try_out]
        for _ in range(steps):
            with self._device.on(self._chance.choice(self._streams)):
                self._chance.choice(deeds)()
        self._device.drain()

    def _file(self) -> tuple[int, Path]:
        number = self._chance.randrange(len(self._files))
        return number, self._files[number]

    def call(self) -> None:
        self.calls.append((self._now, self._served.call()))

    def let_the_device_work(self) -> None:
        for _ in range(self._chance.randrange(6)):
            self._device.step()

    def swap(self) -> None:
        number, file = self._file()
        self._model.swap(file)
        self._before, self._now = self._now, number

    def swap_a_part(self) -> None:
        number, file = self._file()
        self._model.swap(file, only="*")
        self._before, self._now = self._now, number

    def roll_back(self) -> None:
        self._model.rollback()
        self._before, self._now = self._now, self._before

    def discard(self) -> None:
        self._model.stage(self._file()[1]).discard()

    def try_out(self) -> None:
        number, file = self._file()
        with self._model.stage(file) as staged:
            self.calls.append((number, self._served.call(staged)))


@pytest.mark.pairwise
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("staging", STAGINGS)
def test_each_call_gives_one_generation(
    staging: str, seed: int, residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    served = Served(tiny, residency, staging, StandIn(seed), "host")
    storm = Storm(served, [weight_file(number) for number in range(4)], seed)
    storm.run(120)
    assert len(storm.calls) > 20
    for number, found in storm.calls:
        assert served.weights(found if isinstance(found, bytes) else found.content) == values_of(number)


def test_addresses_stay(residency: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    served = Served(tiny, residency, "auto", StandIn(0), None)
    served.model.swap(weight_file(0))
    sessions = sessions_of(served.model)
    addresses = [session.arena.address for session in sessions]
    for number in range(40):
        served.model.swap(weight_file(number % 3))
    assert [session.arena.address for session in sessions_of(served.model)] == addresses


def test_an_exchange_asks_the_device_for_nothing(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StandIn(0)
    served = Served(tiny, "double", "auto", device, None)
    served.model.swap(weight_file(0))
    with served.model.stage(weight_file(1)) as staged:
        served.call()
        device.drain()
        for name in ("mark", "wait", "copy", "on", "finish"):
            monkeypatch.delattr(StandIn, name)
        staged.commit()
        served.model.rollback()
    assert served.model.generation == 2


CASES = {
    "room on the device": (1 << 30, 0, "auto", "device", "bytes free"),
    "no room on the device": (1 << 20, 0, "auto", "host", f"and {RESERVE} are left for calls"),
    "calls need it": (1 << 30, 1 << 30, "auto", "host", f"and {1 << 30} are left for calls"),
    "host memory asked for": (1 << 30, 0, "host", "host", "was asked for"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_receipt_says_where_it_was_staged(case: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    capacity, for_calls, mode, kind, reason = CASES[case]
    device = StandIn(0, capacity)
    device.for_calls = for_calls
    served = Served(tiny, "single", mode, device, None)
    assert served.model.swap(weight_file(0)).staged_in.kind == "in place"
    receipt = served.model.swap(weight_file(1))
    assert receipt.staged_in.kind == kind
    assert reason in receipt.staged_in.reason
    part = served.model.swap(weight_file(2), only="*")
    assert part.staged_in.kind == ("device" if kind == "device" else "host")
    found = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(2)


def test_what_does_not_fit_is_refused_with_numbers(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    device = StandIn(0)
    served = Served(tiny, "single", "device", device, None)
    served.model.swap(weight_file(0))
    device.capacity = 100
    with pytest.raises(OutOfMemory, match=r'1024 bytes are needed, 100 are free. Load with staging="host"'):
        served.model.swap(weight_file(1))
    found = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(0)
    with pytest.raises(OutOfMemory, match='residency="single"'):
        Served(tiny, "double", "auto", StandIn(0, capacity=100), None)


def test_nothing_is_locked_once_a_model_is_loaded(
    residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    """While the driver locks pages, it serves no thread, which no staging and no commit must cause."""
    device = StandIn(0)
    served = Served(tiny, residency, "host", device, "host")
    device.lockable = 0
    for seed in range(3):
        served.model.swap(weight_file(seed))
    served.model.swap(weight_file(0), only="*")
    served.model.rollback()
    found = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(2)


def test_an_error_of_the_device_while_staging_is_a_refused_swap(
    residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    device = StandIn(0)
    served = Served(tiny, residency, "auto", device, None)
    served.model.swap(weight_file(0))
    device.broken = True
    with pytest.raises(DeviceError, match=r"v1\.safetensors: Broken: an illegal memory access"):
        served.model.swap(weight_file(1))
    device.broken = False
    found = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(0)
    assert (served.model.generation, served.model.failed) == (0, False)
    assert served.model.swap(weight_file(1)).generation == 1


@pytest.mark.parametrize(
    ("where", "name", "says"),
    [
        (StandIn, "copy", r"operation not permitted when stream is capturing"),
        (BoundReader, "run_prologue", r"an illegal memory access.*restart it"),
    ],
)
def test_a_device_error_raised_by_torch_is_a_refused_swap_and_no_fault_of_the_weights(
    where: type,
    name: str,
    says: str,
    residency: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AcceleratorError(RuntimeError):
        pass

    def refuse(*_: object) -> None:
        raise AcceleratorError(says.partition(".*")[0])

    served = Served(tiny, residency, "device", StandIn(0), None)
    served.model.swap(weight_file(0))
    with monkeypatch.context() as patch:
        patch.setattr(where, name, refuse)
        with pytest.raises(DeviceError, match=rf"v1\.safetensors: {says}"):
            served.model.swap(weight_file(1))
    assert served.model.swap(weight_file(1)).generation == 1


@pytest.mark.parametrize("when", ["asked for", "done"])
def test_a_device_that_fails_in_a_commit_in_place_leaves_a_model_that_a_swap_revives(
    when: str, tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StandIn(0)
    served = Served(tiny, "single", "device", device, "host")
    for seed in range(2):
        served.model.swap(weight_file(seed))
    arena = sessions_of(served.model)[0].arena
    staged = served.model.stage(weight_file(2))

    def broken(*args: object) -> None:
        raise Broken("an illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "copy_part" if when == "asked for" else "synchronize", broken)
        with pytest.raises(ModelFailed, match="an illegal memory access"):
            staged.commit()
    staged.discard()
    assert served.model.failed
    with pytest.raises(ModelFailed, match="swap or roll back to serve again"):
        served.call()
    assert served.model.rollback().weights_id
    found = served.call()
    served.model.swap(weight_file(2))
    last = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(1)
    assert served.weights(last.content) == values_of(2)


def test_a_part_that_fits_on_the_device_is_tried_in_host_memory_where_a_full_set_does_not(
    tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    device = StandIn(0)
    served = Served(tiny, "single", "auto", device, "host")
    served.model.swap(weight_file(0))
    device.capacity = RESERVE + 500  # a full set takes 1024 bytes, the bias 20
    staged = served.model.stage(weight_file(1), only="bias")
    tried: Any = served.call(staged)
    assert served.weights(tried) == values_of(0) | {"bias": values_of(1)["bias"]}
    assert staged.commit().staged_in.kind == "device"
    found = served.call()
    served.model.rollback()
    last = served.call()
    device.drain()
    assert served.weights(found.content) == served.weights(tried)
    assert served.weights(last.content) == values_of(0)


def test_commits_do_not_wait_for_the_files_of_other_stagings(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    device = StandIn(0)
    ring = Ring(device, 1, urgent=Ring(device, 1))
    served = Served(tiny, "single", "host", device, None, ring)
    served.model.swap(weight_file(0))
    with ring.acquire(device.staging):  # as a staging of another model that reads a slow file does
        pass
    staged = served.model.stage(weight_file(1), only="*")
    with ring.acquire(device.staging):
        staged.commit()
    found = served.call()
    device.drain()
    assert served.weights(found.content) == values_of(1)
