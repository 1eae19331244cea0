"""Staging, commits and whole swaps."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import safetensors.torch
import torch
from blake3 import blake3
from peers import Memory, Peers
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import Stack, Stored, equal, stored
from timing import Measure, calling, in_turn, per_call, seconds

from weightswap_runtime import Model, load
from weightswap_runtime.format.identity import count_nonfinite
from weightswap_runtime.staging import reading
from weightswap_runtime.tensors import BLOCK

SMALL = 1_000_000
COMMITS = 100  # for each round
CALLERS = 2
Part = Callable[[Stored, Model, int], Iterator[Row]]

NEARLY_AS_FAST = Goal("ratio", "at least", 0.8)
NEARLY_FREE = Goal("ratio", "at least", 0.85)
INSTANT = Goal("p99", "at most", 100)
AT_ONCE = Goal("median", "at most", 15)
UNFELT = Goal("p99", "at most", 50)
ONE_COPY = Goal("ratio", "at most", 1.3)


def rows(settings: Settings) -> Iterator[Row]:
    """Measure each part; it frees its memory before the next one starts."""
    with stored(settings.megabytes * 1_000_000) as large:
        yield from _parts(large, settings.rounds, (_staging, _looking, _commits, _whole))
        yield from _kinds(settings.rounds)
        yield from _first_staging(large, settings.rounds)
        gc.collect()
        yield from _single(large, settings.rounds)
        gc.collect()
    with stored(SMALL) as small:
        yield from _parts(small, settings.rounds, (_commits, _staged_commits))


def _parts(stored: Stored, rounds: int, parts: tuple[Part, ...]) -> Iterator[Row]:
    """Measure on a model in double residency that has used both of its arenas, and can roll back."""
    first, second = stored.versions
    model = load(stored.artifact, first.path)
    stored.check(model)
    model.swap(second.path)
    stored.check(model)
    for part in parts:
        yield from part(stored, model, rounds)
        stored.check(model)
        gc.collect()


def _staging(stored: Stored, model: Model, rounds: int) -> Iterator[Row]:
    """Measure staging into memory that was written before, digests and checks included."""
    peers = Peers()
    path = stored.versions[0].path
    memory = Memory(path.stat().st_size, touched=True)
    timings = in_turn(
        {
            "stage": _stage(model, _paths(stored)),
            "read": lambda: seconds(lambda: peers.read(path, memory)),
            "both": lambda: seconds(lambda: peers.read_and_hash(path, memory)),
            "hash": lambda: seconds(lambda: peers.hash(memory)),
        },
        rounds,
    )
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what, read = f"stage {stored.size}, warm arena", f"preadv, {peers.threads} threads"
    yield compared(what, "GB/s", rate["stage"], read, rate["read"], NEARLY_AS_FAST)
    yield compared(what, "GB/s", rate["stage"], "preadv + BLAKE3, no checks", rate["both"])
    yield compared(f"BLAKE3 alone, {peers.threads} threads", "GB/s", rate["hash"], read, rate["read"])


def _looking(stored: Stored, model: Model, rounds: int) -> Iterator[Row]:
    """Measure the cost of the search for non-finite values: the same staging with and without it."""
    paths = _paths(stored)
    stage = _stage(model, paths)

    def blind() -> float:
        with patch.object(reading, "count_nonfinite", lambda *_: None):
            return stage()

    timings = in_turn({"stage": stage, "blind": blind}, rounds)
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what = f"looking for NaN while {stored.size} are staged"
    yield compared(what, "GB/s", rate["stage"], "without looking", rate["blind"], NEARLY_FREE)


def _kinds(rounds: int) -> Iterator[Row]:
    """Measure the search in a block that was just hashed and is in the cache, by element size; one thread."""
    block = memoryview(bytearray(BLOCK))
    for dtype in ("F64", "F32", "BF16", "F8_E4M3"):
        measures = {
            "look": per_call(partial(count_nonfinite, dtype, block), 200),
            "hash": per_call(lambda: blake3(block).digest(), 200),
        }
        timings = in_turn(measures, rounds)
        rate = {name: [BLOCK / second / 1e9 for second in values] for name, values in timings.items()}
        yield compared(f"looking for NaN, {dtype}, in the cache", "GB/s", rate["look"], "BLAKE3", rate["hash"])


def _first_staging(stored: Stored, rounds: int) -> Iterator[Row]:
    """Measure staging into untouched memory, which includes the kernel's page faults on both sides."""
    peers = Peers()
    path = stored.versions[0].path

    def stage() -> float:
        return _stage(load(stored.artifact), iter([path]))()

    def read() -> float:
        memory = Memory(path.stat().st_size, touched=False)
        return seconds(lambda: peers.read(path, memory))

    timings = in_turn({"stage": stage, "read": read}, -(-rounds // 2))
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what, peer = f"stage {stored.size}, fresh arena", "preadv into fresh memory"
    yield compared(what, "GB/s", rate["stage"], peer, rate["read"])


def _commits(stored: Stored, model: Model, rounds: int) -> Iterator[Row]:
    """Measure rollbacks, which are commits that read no file, so many are possible at any size."""
    yield from _rollbacks(model, f"{stored.size}, idle", rounds)
    loops = [seconds(lambda: [model.rollback() for _ in range(COMMITS)]) / COMMITS * 1e6 for _ in range(rounds)]
    yield spread(f"rollback in a tight loop, {stored.size}", "us", loops, AT_ONCE)
    with calling(lambda: model(stored.tokens), CALLERS):
        yield from _rollbacks(model, f"{stored.size}, {CALLERS} threads calling", rounds)


def _rollbacks(model: Model, where: str, rounds: int) -> Iterator[Row]:
    seen, paused = [], []
    for _ in range(COMMITS * rounds):
        time.sleep(0.0005)  # lets the calling threads run, like any pause between two commits
        start = time.perf_counter()
        receipt = model.rollback()
        seen.append((time.perf_counter() - start) * 1e6)
        paused.append(receipt.seconds_paused * 1e6)
    yield spread(f"commit, the caller's time, {where}", "us", seen, INSTANT)
    yield spread(f"commit, calls paused, {where}", "us", paused, UNFELT)


def _staged_commits(stored: Stored, model: Model, rounds: int) -> Iterator[Row]:
    paths = _paths(stored)
    timings = []
    for _ in range(COMMITS * rounds):
        staged = model.stage(next(paths))
        timings.append(seconds(staged.commit) * 1e6)
    yield spread(f"staged.commit(), the caller's time, {stored.size}, idle", "us", timings, INSTANT)


def _single(stored: Stored, rounds: int) -> Iterator[Row]:
    """Measure single residency, where a commit copies. The goal is relative to one `copy_` of a flat tensor."""
    peers, paths = Peers(), _paths(stored)
    model = load(stored.artifact, next(paths), residency="single")
    target, source = (Memory(stored.nbytes, touched=True) for _ in range(2))
    target_tensor, source_tensor = target.tensor(), source.tensor()
    timings = in_turn(
        {
            "commit": lambda: model.swap(next(paths)).seconds_paused,
            "copy_": lambda: seconds(lambda: target_tensor.copy_(source_tensor)),
            "threads": lambda: seconds(lambda: peers.copy(target, source)),
            "memmove": lambda: seconds(lambda: ctypes.memmove(target.address, source.address, stored.nbytes)),
        },
        rounds,
    )
    stored.check(model)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    what = f"commit in single residency, {stored.size}"
    yield compared(what, "ms", millis["commit"], "one torch copy_", millis["copy_"], ONE_COPY)
    yield compared(what, "ms", millis["commit"], f"memcpy, {peers.threads} threads", millis["threads"])
    yield compared(what, "ms", millis["commit"], "memcpy, 1 thread", millis["memmove"])


def _whole(stored: Stored, model: Model, rounds: int) -> Iterator[Row]:
    """Measure from a path to served weights."""
    paths = _paths(stored)
    first = stored.versions[0]
    with torch.no_grad():
        eager = Stack(stored.nbytes).eval()

    def unpickle(mmap: bool) -> Callable[[], object]:
        return lambda: eager.load_state_dict(torch.load(stored.pickled, weights_only=True, mmap=mmap))

    others: dict[str, Callable[[], object]] = {
        "load_state_dict(load_file())": lambda: eager.load_state_dict(safetensors.torch.load_file(first.path)),
        "load_state_dict(torch.load(mmap=True))": unpickle(mmap=True),
        "load_state_dict(torch.load())": unpickle(mmap=False),
    }
    measures: dict[str, Measure] = {"swap": lambda: seconds(lambda: model.swap(next(paths)))}
    measures |= {name: partial(seconds, work) for name, work in others.items()}
    timings = in_turn(measures, rounds)
    with torch.no_grad():
        equal(eager(stored.tokens), first.expected, "the eager model after its own load")
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    for name in others:
        yield compared(f"swap {stored.size}, double residency", "ms", millis["swap"], name, millis[name])


def _paths(stored: Stored) -> Iterator[Path]:
    return cycle(version.path for version in stored.versions)


def _stage(model: Model, paths: Iterator[Path]) -> Measure:
    """Time only the staging; the commit afterwards makes the other arena the next target."""

    def measure() -> float:
        start = time.perf_counter()
        staged = model.stage(next(paths))
        elapsed = time.perf_counter() - start
        staged.commit()
        return elapsed

    return measure
