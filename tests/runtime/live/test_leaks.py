"""Swaps leak no memory, no thread and no descriptor, in every mode and with every outcome."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.promises.all_or_nothing.test_faults import EACH_WAY, FAULTS, WAYS, Way, prepare
from tests.support.faults import failing
from tests.support.varied import RichFiles, small_blocks
from weightswap_runtime import Model, StageCancelled, StageClosed, Staged, load
from weightswap_runtime.memory.arena import HostArena

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RichFiles]:
    with small_blocks():
        yield RichFiles(tmp_path_factory.mktemp("leaks"), 3)


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """Disable logging: pytest keeps every record, with its error and the frames of the traceback."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def arenas() -> Iterator[weakref.WeakSet[HostArena]]:
    """The arenas that are alive."""
    alive: weakref.WeakSet[HostArena] = weakref.WeakSet()
    original = HostArena.__init__

    def recording(arena: HostArena, *args: object) -> None:
        alive.add(arena)
        original(arena, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostArena, "__init__", recording)
        yield alive


@functools.cache
def model_of(files: RichFiles, residency: str) -> Model:
    return load(files.artifact, files.full[0], residency=residency, keep_previous="host")  # type: ignore[arg-type]


def settles(arenas: weakref.WeakSet[HostArena], most: int) -> bool:
    """Return whether no more arenas are alive, once the worker threads have released their last job."""
    deadline = time.monotonic() + 120
    while len(arenas) > most and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(arenas) <= most


class Held(NamedTuple):
    """Resources of this process: resident bytes, mappings, threads, descriptors, Python objects."""

    resident: int
    mappings: int
    threads: int
    descriptors: int
    objects: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is freed, but kept for later, comes and goes by chance
        return cls(
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            threads=threading.active_count(),
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            objects=len(gc.get_objects()),
        )


def round_of_swaps(model: Model, files: RichFiles) -> int:
    """Run every way once, with refusals, discards and cancels in between; return the number of commits."""
    before = model.generation or 0
    for way in WAYS.values():
        prepare(model, files, way)
        way.change(model, files)
        model.stage(files.full[2]).discard()
        with suppress(StageCancelled):
            staged = model.stage(files.full[2], background=True, rate_limit=1e6)
            staged.cancel()
            staged.wait()
        with failing(FAULTS["a read fails"], 1), suppress(Exception):
            model.swap(files.full[1])
    return (model.generation or 0) - before


@pytest.mark.slow
def test_five_hundred_swaps_hold_what_ten_hold(residency: str, files: RichFiles) -> None:
    model = model_of(files, residency)
    for _ in range(3):
        round_of_swaps(model, files)
    tenth, swaps = Held.now(), 0
    while swaps < 500:
        swaps += round_of_swaps(model, files)
    after = Held.now()
    assert after.threads <= tenth.threads
    assert after.descriptors <= tenth.descriptors
    assert after.mappings <= tenth.mappings + 8
    assert after.objects <= tenth.objects + 2000  # receipts, up to a hundred
    assert after.resident <= tenth.resident + (8 << 20)


@pytest.mark.pairwise
@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("fault", ["a read fails", "a hash fails", "a copy fails", "a transform fails"])
@pytest.mark.parametrize("way", EACH_WAY)
def test_a_failure_frees_its_memory_at_once(
    fault: str, way: Way, residency: str, files: RichFiles, arenas: weakref.WeakSet[HostArena]
) -> None:
    """A set of weights is too large to be left to the garbage collector."""
    model = model_of(files, residency)
    model.swap(files.checkpoints[1])
    model.swap(files.full[0])
    whole = len(arenas)
    for number in (0, 3):
        prepare(model, files, way)
        before = len(arenas)
        with failing(FAULTS[fault], number), suppress(Exception):
            way.change(model, files)
        assert settles(arenas, before + (residency == "single"))  # a failed commit keeps a whole copy
        model.swap(files.full[0])
        model.swap(files.full[0])
        assert settles(arenas, whole)


@pytest.mark.usefixtures("_uncollected")
def test_a_staging_that_is_given_up_frees_its_memory_at_once(
    files: RichFiles, arenas: weakref.WeakSet[HostArena]
) -> None:
    model = load(files.artifact, files.full[0], residency="single")
    whole = len(arenas)
    ends: list[Callable[[Staged], object]] = [Staged.discard, Staged.cancel, Staged.commit]
    for end, background in itertools.product(ends, (False, True)):
        staged = model.stage(files.full[1], background=background).wait()
        end(staged)
        assert settles(arenas, whole)
        with pytest.raises(StageClosed):
            staged.commit()
    model.stage(files.full[2])
    assert settles(arenas, whole)
