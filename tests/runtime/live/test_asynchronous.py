"""Swaps from asyncio: the event loop is not blocked, and a cancelled task leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support.damage import damaged
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import (
    DigestMismatch,
    Event,
    Model,
    StageClosed,
    StagingBusy,
    Unsupported,
    WaitTimeout,
    WeightFileError,
    load,
)


class Timed:
    """An awaitable that records for how long each of its steps blocks the event loop."""

    def __init__(self, work: Awaitable[Any], seconds: list[float]) -> None:
        self._steps = work.__await__()
        self._seconds = seconds

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            begin = time.perf_counter()
            try:
                step = next(self._steps)
            except StopIteration as end:
                return end.value
            finally:
                self._seconds.append(time.perf_counter() - begin)
            yield step


def test_what_is_staged_is_committed_when_it_is_awaited(model: Model, weight_file: WriteWeights) -> None:
    async def work() -> None:
        assert (await model.aswap(weight_file(1), by="loop")).by == "loop"
        async with model.astage(weight_file(2)) as staged:
            assert serves(model, 1)
            assert staged.progress.phase == "staged"
            assert (await staged.acommit()).generation == 1
        async with model.astage(weight_file(3), onto=()) as left:
            pass
        with pytest.raises(StageClosed):
            await left.acommit()

    asyncio.run(work())
    assert serves(model, 2)


def test_errors_are_those_of_a_swap(model: Model, weight_file: WriteWeights, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(WeightFileError):
            await model.aswap(tmp_path / "none.safetensors")
        with pytest.raises(Unsupported):
            await model.aswap(weight_file(1), verify="no")  # type: ignore[typeddict-item]
        with pytest.raises(DigestMismatch):
            async with model.astage(bad):
                raise AssertionError("it was staged")
        with model.stage(weight_file(2)), pytest.raises(StagingBusy):
            await model.aswap(weight_file(1))
        await model.aswap(weight_file(1))

    bad = damaged(weight_file(4))
    asyncio.run(work())
    assert (model.generation, serves(model, 1)) == (0, True)


def test_many_tasks_swap_one_after_another(model: Model, weight_file: WriteWeights) -> None:
    async def work() -> list[int]:
        receipts = await asyncio.gather(*(model.aswap(weight_file(seed)) for seed in range(8)))
        return sorted(receipt.generation for receipt in receipts)

    assert asyncio.run(work()) == list(range(8))


def test_a_task_that_is_cancelled_ends_its_staging(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))

    async def work() -> None:
        for method in (model.aswap, staged):
            task = asyncio.ensure_future(method(weight_file(1), rate_limit=SLOW))
            while model.progress is None:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert model.progress is None
        await model.aswap(weight_file(2))  # nobody else stages any more

    async def staged(path: Path, **options: Any) -> None:
        async with model.astage(path, **options):
            raise AssertionError("it was staged")

    asyncio.run(work())
    assert [receipt.generation for receipt in model.history] == [0, 1]
    assert serves(model, 2)


@pytest.mark.parametrize("times", [1, 2])
def test_a_task_that_is_cancelled_as_its_weights_are_staged_keeps_none(
    tiny: TinyArtifact, weight_file: WriteWeights, times: int
) -> None:
    model, cancelled = load(tiny.path, weight_file(0)), threading.Event()

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            for number in range(times):
                loop.call_later(0.02 * number, task.cancel)
            loop.call_later(0.02 * times, cancelled.set)

        def late(event: Event) -> None:
            if event.kind == "staged":  # nothing asks afterwards whether it was cancelled
                loop.call_soon_threadsafe(cancel)
                assert cancelled.wait(120)

        task = asyncio.ensure_future(staged())
        model.listen(late)
        try:
            await task
        except asyncio.CancelledError:  # its traceback keeps what the task had
            model.stage(weight_file(2)).discard()

    async def staged() -> None:
        async with model.astage(weight_file(1)):
            raise AssertionError("the block began")

    asyncio.run(work())
    assert serves(model, 0)


def test_a_task_in_the_queue_may_be_cancelled(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))

    async def work() -> None:
        first = asyncio.ensure_future(model.aswap(weight_file(1), rate_limit=SLOW))
        while model.progress is None:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(model.aswap(weight_file(2)))
        await asyncio.sleep(0.05)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())
    assert model.generation == 0


def test_a_commit_that_waits_may_be_cancelled(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single")

    async def work() -> None:
        async with model.astage(weight_file(1)) as staged:
            with model.pin():
                with pytest.raises(WaitTimeout):
                    await staged.acommit(timeout=0.01)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(staged.acommit(timeout=None), 0.1)

    asyncio.run(work())
    assert (model.generation, serves(model, 0)) == (0, True)
    model.swap(weight_file(1))


@pytest.mark.usefixtures("_uncollected")
def test_nothing_of_a_swap_is_kept(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    model = load(tiny.path, weight_file(0))

    async def work(model: Model) -> None:
        await model.aswap(weight_file(1))
        with pytest.raises(WeightFileError):
            await model.aswap(tmp_path / "none.safetensors")

    asyncio.run(work(model))
    dropped = weakref.ref(model)
    del model
    # tasks and their errors refer to each other; the last thread may not have ended
    assert eventually(lambda: gc.collect() >= 0 and dropped() is None)


class Big(NamedTuple):
    """A model whose swap takes many times as long as a step of the event loop may."""

    model: Model
    files: list[Path]


@pytest.fixture
def big(residency: Any, tmp_path: Path) -> Big:
    with skeleton():
        wide = nn.Linear(2048, 2048)
    artifact = export(wide, (torch.zeros(1, 2048),), out=tmp_path / "wide.artifact")
    files = []
    for seed in range(2):
        values = {"weight": torch.full((2048, 2048), float(seed)), "bias": torch.zeros(2048)}
        files.append(pack(values, artifact, out=tmp_path / f"v{seed}.safetensors").path)
    return Big(load(artifact.path, files[0], residency=residency), files)


def test_the_event_loop_is_never_blocked(big: Big) -> None:
    """The test takes each step's shortest time over several runs, as other processes use the machine, too."""

    async def work() -> list[list[float]]:
        runs = []
        for run in range(7):
            path = big.files[run % 2]
            entered = big.model.astage(path)
            seconds: list[float] = []
            await Timed(big.model.aswap(path), seconds)
            staged = await Timed(entered.__aenter__(), seconds)
            await Timed(staged.acommit(), seconds)
            await Timed(entered.__aexit__(None, None, None), seconds)
            runs.append(seconds)
        return runs

    runs = asyncio.run(work())
    shortest = [min(steps) for steps in zip(*runs, strict=True)]
    assert len(shortest) == 8  # each begins, and ends
    assert max(shortest) < min(receipt.seconds_staged for receipt in big.model.history) / 4
