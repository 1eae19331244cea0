"""Every system call and allocation of a swap fails once: the served weights stay, and the next swap works."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.faults import Fault, after, each_call, failing, raises
from tests.support.sessions import addresses, live_bytes
from tests.support.varied import Origin, RichFiles, X, small_blocks
from weightswap_exporter import MethodSpec, export
from weightswap_runtime import (
    Model,
    ModelFailed,
    OutOfMemory,
    SwapError,
    WeightFileError,
    WeightswapError,
    byte_ranges,
    load,
)
from weightswap_runtime import tensors as digests
from weightswap_runtime import threads as worker_threads
from weightswap_runtime.engines.torch_cpu import TorchEngine
from weightswap_runtime.format import safetensors as weightfile
from weightswap_runtime.staging import delta as overlay
from weightswap_runtime.staging import reading
from weightswap_runtime.staging.transforms import Transforms

A, B, C = 0, 1, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RichFiles]:
    with small_blocks():
        yield RichFiles(tmp_path_factory.mktemp("faults"), 3)


def nothing_read(original: Any, *args: Any) -> int:
    return 0


def half_read(original: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
    full = next((buffer for buffer in buffers if len(buffer)), memoryview(b""))
    return original(fd, [full[: (len(full) + 1) // 2]], offset)


def closed_with_an_error(original: Any, fd: int) -> None:
    original(fd)
    raise OSError(errno.EIO, "Input/output error")


NO_MEMORY = raises(MemoryError("injected"))
BROKEN = raises(RuntimeError("injected"))
IO_ERROR = raises(OSError(errno.EIO, "Input/output error"))
NO_THREAD = raises(RuntimeError("can't start new thread"))
FAULTS = {
    "no descriptor": Fault(os, "open", raises(OSError(errno.EMFILE, "Too many open files"))),
    "no status": Fault(os, "fstat", IO_ERROR),
    "a read fails": Fault(os, "preadv", IO_ERROR),
    "a read ends early": Fault(os, "preadv", nothing_read, lasts=True),
    "a read is short": Fault(os, "preadv", half_read),
    "a close fails": Fault(os, "close", closed_with_an_error),
    "no memory to read into": Fault(os, "preadv", NO_MEMORY),
    "no arena": Fault(mmap, "mmap", raises(OSError(errno.ENOMEM, "Cannot allocate memory"))),
    "no scratch": Fault(reading, "bytearray", NO_MEMORY),
    "no scratch to lay over": Fault(overlay, "bytearray", NO_MEMORY),
    "no header": Fault(weightfile, "bytearray", NO_MEMORY),
    "no view": Fault(np, "frombuffer", NO_MEMORY),
    "a hash fails": Fault(reading, "blake3", NO_MEMORY),
    "a hash of a changed block fails": Fault(overlay, "blake3", NO_MEMORY),
    "a hash of a tensor fails": Fault(digests, "blake3", NO_MEMORY),
    "a hash of a set fails": Fault(weightfile, "blake3", NO_MEMORY),
    "a copy of ranges fails": Fault(byte_ranges, "address", NO_MEMORY),
    "a copy fails": Fault(ctypes, "memmove", BROKEN),
    "no thread": Fault(threading.Thread, "start", NO_THREAD),
    "no helper": Fault(worker_threads.ThreadPoolExecutor, "submit", NO_THREAD),
    "no memory for a helper": Fault(worker_threads.ThreadPoolExecutor, "submit", NO_MEMORY),
    "no batch": Fault(worker_threads, "deque", NO_MEMORY),
    "no session": Fault(TorchEngine, "bind", NO_MEMORY),
    "a transform fails": Fault(Transforms, "_run", BROKEN),
    "no memory to transform": Fault(Transforms, "_run", raises(RuntimeError("can't allocate memory"))),
}
TOLERATED = {"a read is short", "a close fails", "no helper"}


class Way(NamedTuple):
    """Way from the weights A to `goal`: by `change`, after `prepare`."""

    goal: Callable[[RichFiles], Origin]
    change: Callable[[Model, RichFiles], object]
    prepare: Callable[[Model, RichFiles], object] = lambda model, files: None


def background(model: Model, path: Path, **options: Any) -> None:
    with model.stage(path, background=True, **options) as staged:
        staged.commit()


def tried(model: Model, path: Path) -> None:
    with model.stage(path) as staged:
        staged(X)
        staged.commit()


def to_b(files: RichFiles) -> Origin:
    return files.whole(B)


def part_b(files: RichFiles) -> Origin:
    return files.mixed(files.whole(A), "[cf]*", B)


def from_b(model: Model, files: RichFiles) -> None:
    """Serve B, and then A again, so that a rollback leads to B."""
    model.swap(files.full[B])
    model.swap(files.full[A])


def restored(model: Model, files: RichFiles) -> None:
    """Serve B, then A, and stage C: in double residency a rollback then has to restore B."""
    from_b(model, files)
    model.stage(files.full[C]).discard()


WAYS = {
    "full": Way(to_b, lambda model, files: model.swap(files.full[B])),
    "checkpoint": Way(to_b, lambda model, files: model.swap(files.checkpoints[B])),
    "delta": Way(to_b, lambda model, files: model.swap(files.deltas[A, B])),
    "delta on what a swap has left": Way(to_b, lambda model, files: model.swap(files.deltas[A, B]), from_b),
    "part": Way(part_b, lambda model, files: model.swap(files.full[B], only="[cf]*")),
    "part of a checkpoint": Way(part_b, lambda model, files: model.swap(files.checkpoints[B], only="[cf]*")),
    "tried delta": Way(to_b, lambda model, files: tried(model, files.deltas[A, B])),
    "background": Way(to_b, lambda model, files: background(model, files.full[B])),
    "background delta": Way(to_b, lambda model, files: background(model, files.deltas[A, B])),
    "rollback": Way(to_b, lambda model, files: model.rollback(), from_b),
    "rollback of a delta": Way(
        to_b, lambda model, files: model.rollback(), lambda m, f: (m.swap(f.full[B]), m.swap(f.deltas[B, A]))
    ),
    "restoring rollback": Way(to_b, lambda model, files: model.rollback(), restored),
}


USUAL = ("full", "checkpoint", "delta on what a swap has left", "part", "background", "restoring rollback")
EACH_WAY = [pytest.param(WAYS[name], id=name) for name in USUAL]
EACH_WAY += [pytest.param(way, id=name, marks=pytest.mark.slow) for name, way in WAYS.items() if name not in USUAL]


class Served(NamedTuple):
    """Everything that a refused swap must not change."""

    outputs: bytes
    memory: dict[str, bytes]
    addresses: list[int]
    weights_id: str | None
    generation: int | None

    @classmethod
    def by(cls, model: Model) -> Served:
        return cls(model(X).numpy().tobytes(), live_bytes(model), addresses(model), model.weights_id, model.generation)


def serves(model: Model, files: RichFiles, origin: Origin) -> None:
    """Check that outputs, bytes and id are those of one set, and that the model has not failed."""
    assert not model.failed
    assert torch.equal(model(X), files.eager(origin))
    assert live_bytes(model) == files.arena_bytes(origin)
    assert model.weights_id == files.weights_id(origin)


def open_descriptors() -> set[tuple[str, str]]:
    """Return the descriptors of temporary files, such as weights; threads of libraries have others."""
    descriptors = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that reads this directory
            descriptors.add((entry.name, str(entry.readlink())))
    return {(name, target) for name, target in descriptors if target.startswith(tempfile.gettempdir())}


@functools.cache
def model_of(files: RichFiles, residency: str) -> Model:
    """Return the one model that all tests use."""
    return load(files.artifact, residency=residency, keep_previous="host")  # type: ignore[arg-type]


@pytest.mark.pairwise
@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize(("name", "fault"), FAULTS.items(), ids=FAULTS)
@pytest.mark.parametrize("most", [2, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_fault_at_any_call_changes_nothing(
    most: int, name: str, fault: Fault, way: Way, residency: str, files: RichFiles
) -> None:
    model = model_of(files, residency)

    model.swap(files.checkpoints[A])  # opens the conversion's graph, which stays open
    prepare(model, files, way)
    for number in each_call(fault, lambda: way.change(model, files), most):
        prepare(model, files, way)
        before, descriptors = Served.by(model), open_descriptors()
        with failing(fault, number) as calls:
            error = attempt(lambda: way.change(model, files))
        if error is None:
            assert name in TOLERATED or not calls.happened
            serves(model, files, way.goal(files))
        elif isinstance(error, ModelFailed):
            assert residency == "single"
            refuses_until_revived(model, files, before, number)
        else:
            assert isinstance(error, WeightswapError | MemoryError | RuntimeError), repr(error)
            assert Served.by(model) == before
        del error
        assert open_descriptors() <= descriptors  # the garbage collector may have closed leftovers of an earlier test
        model.swap(files.full[C])
        serves(model, files, files.whole(C))


def prepare(model: Model, files: RichFiles, way: Way) -> None:
    model.swap(files.full[A])
    way.prepare(model, files)


def attempt(change: Callable[[], object]) -> Exception | None:
    try:
        change()
    except Exception as error:
        return error.with_traceback(None)
    return None


def refuses_until_revived(model: Model, files: RichFiles, before: Served, number: int) -> None:
    assert model.failed
    with pytest.raises(ModelFailed):
        model(X)
    assert (model.weights_id, model.generation, addresses(model)) == (
        before.weights_id,
        before.generation,
        before.addresses,
    )
    if number % 2:
        model.rollback()
        assert Served.by(model)._replace(generation=before.generation) == before
    else:
        model.swap(files.full[B])
        serves(model, files, files.whole(B))
        model.rollback()
        serves(model, files, files.whole(A))


def overwrite(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path, other: Path) -> None:
    shutil.copy(other, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def remove(path: Path, other: Path) -> None:
    path.unlink()


EVENTS = {event.__name__: event for event in (overwrite, truncate, replace, remove)}
PHASES = {"open": (os, "open"), "fstat": (os, "fstat"), "preadv": (os, "preadv"), "hash": (reading, "blake3")}


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "way", ["full", "checkpoint", *(pytest.param(way, marks=pytest.mark.slow) for way in ("delta", "part"))]
)
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_a_file_may_change_at_any_time(
    event: Callable[[Path, Path], None], phase: tuple[Any, str], way: str, residency: str, files: RichFiles
) -> None:
    """The swap is refused, or it serves exactly one content of the file."""
    model = model_of(files, residency)
    sources = {
        "delta": (files.deltas[A, B], files.deltas[A, C]),
        "checkpoint": (files.checkpoints[B], files.checkpoints[C]),
    }
    meant, other = sources.get(way, (files.full[B], files.full[C]))
    victim, only = files.folder / "victim.safetensors", "[cf]*" if way == "part" else None
    shutil.copy(meant, victim)
    model.swap(files.full[A])
    numbers = each_call(Fault(*phase, raises(OSError())), lambda: model.swap(victim, only=only), 3)
    for number in numbers:
        model.swap(files.full[A])
        shutil.copy(meant, victim)
        before = Served.by(model)
        with failing(Fault(*phase, after(lambda: event(victim, other))), number):
            error = attempt(lambda: model.swap(victim, only=only))
        if error is not None:
            assert isinstance(error, SwapError), repr(error)
            assert Served.by(model) == before
            continue
        sets = [files.mixed(files.whole(A), only or "*", seed) for seed in (B, C)]
        (origin,) = [origin for origin in sets if files.weights_id(origin) == model.weights_id]
        serves(model, files, origin)


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_that_cannot_be_bound_leaves_the_others_alone(
    number: int, residency: str, files: RichFiles, tmp_path: Path
) -> None:
    first = load(files.artifact, files.full[A], residency=residency)
    other = export(files.models[A], methods={"count": MethodSpec("count", (X,))}, out=tmp_path / "other.artifact")
    with failing(Fault(TorchEngine, "bind", NO_MEMORY), number) as calls:
        error = attempt(lambda: load(other, share=first))
    assert (error is not None) == calls.happened == (number < len(addresses(first)))
    second = load(files.artifact, share=first)
    for seed in (B, C, B):
        second.swap(files.full[seed])
        assert torch.equal(first(X), files.eager(files.whole(seed)))
        assert torch.equal(second(X), files.eager(files.whole(seed)))


def test_refusals_have_names(files: RichFiles) -> None:
    """System errors are raised as errors of weightswap's family."""
    model = load(files.artifact, files.full[A])
    expected = {"no descriptor": WeightFileError, "no status": WeightFileError, "a read fails": WeightFileError}
    expected |= {"a read ends early": WeightFileError, "no memory to read into": OutOfMemory}
    expected |= {"no arena": OutOfMemory, "no header": OutOfMemory, "a hash fails": OutOfMemory}
    expected |= {"no thread": OutOfMemory}
    for name, kind in expected.items():
        with failing(FAULTS[name], 0) as calls, pytest.raises(kind):
            background(model, files.full[B])
        assert calls.happened
