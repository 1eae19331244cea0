"""Stagings, commits and calls on an accelerator, beside copies of the same size and torch alone."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from unittest import mock

import safetensors.torch
import torch
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import Encoder, Stack, Stored, close, quiet, stored
from timing import calling, in_turn, per_call, percentile, seconds

from weightswap_exporter import export, pack
from weightswap_runtime import Model, load
from weightswap_runtime.memory.arena import Inspected
from weightswap_runtime.memory.device_arena import BUFFER_BYTES, DeviceInspection, available
from weightswap_runtime.memory.torch_device import Accelerator
from weightswap_runtime.threads import WorkerThreads

COMMITS = 100  # for each round
CALLS = 200  # for each percentile
MORE_ROUNDS = 7  # of what is compared to within a hundredth
PATIENCE = 30.0  # seconds to wait for another thread
LARGER = 4  # times the size: fixed costs of a commit in place matter less there
MUCH = 15e9  # bytes from which the goal holds: below, fixed costs matter
PIECE = 1 << 30  # page-locked bytes that are copied again and again, as locking more takes seconds

NEARLY_A_COPY = Goal("ratio", "at least", 0.95)
ONE_COPY = Goal("ratio", "at most", 1.02)
FROM_THE_HOST = Goal("ratio", "at least", 0.95)
INSTANT = Goal("p99", "at most", 20)
UNDISTURBED = Goal("ratio", "at most", 1.05)
FOUR_TIMES = Goal("ratio", "at most", 0.25)
LITTLE_MORE = Goal("median", "at most", 0.15)
SHORT = Goal("median", "at most", 12)
BY_HAND = "CUDAGraph.replay with copy_ and clone"
IN_SECONDS = Goal("median", "at least", 61 / 1.2)  # 61 GB in 1.2 s


def rows(settings: Settings) -> Iterator[Row]:
    """Measure each part; it frees its memory before the next one starts, and a failed part does not stop the others.

    Raises SystemExit if torch finds no accelerator, and an ExceptionGroup of the parts' errors.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit("scripts/bench cuda needs a GPU, but torch finds none here")
    device, errors = accelerator.type, list[Exception]()
    log = logging.getLogger("weightswap.device")  # says who computes digests, and why
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)

    for part in _parts(settings.megabytes * 1_000_000):
        try:
            yield from part(device, settings.rounds)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            errors.append(error.with_traceback(None))  # the error's frames would keep a model alive
        gc.collect()
        torch.accelerator.empty_cache()
    if errors:
        raise ExceptionGroup("the benchmarks on the accelerator", errors)


def _parts(nbytes: int) -> Iterator[Callable[[str, int], Iterator[Row]]]:
    """Yield what is measured, what matters most first: functions of a device and the number of rounds."""
    yield _encoder
    with stored(nbytes, pickling=False) as large:
        parts = (_staging, _calls, _whole, _in_place, _across, _commits, _from_host)
        yield from (partial(part, large) for part in parts)
    yield from _larger_parts(LARGER * nbytes)  # last, as its files take longest to write


def _larger_parts(nbytes: int) -> Iterator[Callable[[str, int], Iterator[Row]]]:
    if lacks := _lacks(nbytes):
        yield partial(_not_measured, f"not measured with {nbytes / 1e9:.2f} GB, for lack of {lacks}")
        return
    with stored(nbytes, pickling=False) as larger:
        yield from (partial(part, larger) for part in (_in_place, _across, _swaps))


def _not_measured(what: str, _device: str, _rounds: int) -> Iterator[Row]:
    yield Row(what, "", None, 0, goal=ONE_COPY)


def _lacks(nbytes: int) -> str | None:
    """Return what is missing for a model of that size: two files and eager on the host, four sets on the device."""
    here = {
        "of the device's memory": (torch.accelerator.get_memory_info()[0], 4.2),
        "of memory": (available() or 0, 4),
        "in the temporary folder": (shutil.disk_usage(gettempdir()).free, 2.2),
    }
    lacks = [f"{share * nbytes / 1e9:.1f} GB {what}" for what, (free, share) in here.items() if free < share * nbytes]
    return " and ".join(lacks) or None


@contextmanager
def _hashers() -> Iterator[set[str]]:
    """Yield the set of who has computed the digests of the block's stagings."""
    found: set[str] = set()
    results = DeviceInspection.results

    def asked(inspection: DeviceInspection) -> Inspected | None:
        result = results(inspection)
        found.add("the host" if result is None else "the device's kernel")
        return result

    with mock.patch.object(DeviceInspection, "results", asked):
        yield found
    if not found:
        found.add("the host")


def settled(function: Callable[[], object]) -> float:
    """Return the seconds until the device has done all its work."""
    torch.accelerator.synchronize()

    def work() -> None:
        function()
        torch.accelerator.synchronize()

    return seconds(work)


def _answered(function: Callable[[], object]) -> float:
    """Return the seconds until the thread's own stream is done, whatever other streams do: the latency of a call."""
    stream = torch.accelerator.current_stream()
    stream.synchronize()

    def work() -> None:
        function()
        stream.synchronize()

    return seconds(work)


def _asked(function: Callable[[], object]) -> float:
    """Return the host's seconds for a call, the median of some blocks that are too short to fill the device's queue."""
    torch.accelerator.synchronize()
    blocks = []
    for _ in range(20):
        blocks.append(per_call(function, 5)())
        torch.accelerator.synchronize()
    return median(blocks)


def opened(stored: Stored, device: str, **options: object) -> Model:
    model = load(stored.artifact, stored.versions[0].path, device=device, **options)  # type: ignore[arg-type]
    check(stored, model)
    return model


def check(stored: Stored, model: Model) -> None:
    [version] = [version for version in stored.versions if version.weights_id == model.weights_id]
    output = model(stored.tokens.to(model.device)).cpu()
    close(output, version.expected, f"{version.path.name}, generation {model.generation}")


def paths_of(stored: Stored) -> Iterator[Path]:
    return cycle(version.path for version in reversed(stored.versions))


def _copies(nbytes: int, device: str) -> Callable[[], float]:
    """Return a measure of copying so many bytes from page-locked memory to the device."""
    piece = min(nbytes, PIECE)
    locked = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(piece, dtype=torch.uint8, device=device)

    def copy() -> None:
        for begin in range(0, nbytes, piece):
            size = min(piece, nbytes - begin)
            there[:size].copy_(locked[:size], non_blocking=True)

    return partial(settled, copy)


def _reads(stored: Stored) -> Callable[[], float]:
    """Return a measure of reading a file from the page cache into page-locked memory, with as many threads as we do.

    Each thread fills the same piece of memory again and again. What goes through the host can be no faster.
    """
    workers = WorkerThreads()
    locked = torch.empty(workers.threads * BUFFER_BYTES, dtype=torch.uint8, pin_memory=True).numpy().data
    free = deque(range(workers.threads))

    def read_all() -> None:
        with stored.versions[0].path.open("rb") as file:

            def read(begin: int) -> None:
                piece = free.pop()
                os.preadv(file.fileno(), [locked[piece * BUFFER_BYTES : (piece + 1) * BUFFER_BYTES]], begin)
                free.append(piece)

            workers.run_all(read, range(0, stored.nbytes, BUFFER_BYTES))

    return partial(seconds, read_all)


def _staging(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure staging from the page cache to the device with digests, beside one copy from page-locked memory."""
    model, paths = opened(stored, device), paths_of(stored)
    hashers: set[str] = set()

    def stage() -> float:
        start = time.perf_counter()
        staged = model.stage(next(paths))
        elapsed = time.perf_counter() - start
        staged.commit()
        return elapsed

    def stage_and_ask() -> float:
        with _hashers() as found:
            elapsed = stage()
        hashers.update(found)
        return elapsed

    def stage_hashing_on_host() -> float:
        with mock.patch.object(Accelerator, "inspector", return_value=None):
            return stage()

    def stage_without_native_code() -> float:
        with mock.patch.object(Accelerator, "upload", return_value=None):
            return stage()

    measures = {"stage": stage_and_ask, "copy": _copies(stored.nbytes, device), "on host": stage_hashing_on_host}
    measures |= {"in Python": stage_without_native_code, "read": _reads(stored)}
    timings = in_turn(measures, rounds)
    check(stored, model)
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what = f"stage {stored.size}, digests by {' or '.join(sorted(hashers))}"
    peer = "page-locked copy_ to the device"
    yield compared(what, "GB/s", rate["stage"], peer, rate["copy"], NEARLY_A_COPY)
    yield compared(what, "GB/s", rate["stage"], "preadv, all threads", rate["read"])
    yield compared(what, "GB/s", rate["stage"], "the same without native code", rate["in Python"])
    yield compared(what, "GB/s", rate["stage"], "digests by the host", rate["on host"])


def _commits(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure the wait of a commit's caller in double residency, while the device is busy with calls."""
    model = opened(stored, device)
    model.swap(stored.versions[1].path)
    tokens, seen = stored.tokens.to(device), []
    for _ in range(COMMITS * rounds):
        model(tokens)
        start = time.perf_counter()
        model.rollback()
        seen.append((time.perf_counter() - start) * 1e6)
    check(stored, model)
    yield spread(f"commit in double residency, the caller's time, {stored.size}", "us", seen, INSTANT)


def _in_place(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure commits in single residency, staged on the device, until the copy is done there."""
    model, paths = opened(stored, device, residency="single", staging="device"), paths_of(stored)
    one, other = (torch.empty(stored.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    held: list[float] = []
    kinds: set[str] = set()

    def commit() -> float:
        staged = model.stage(next(paths))

        def work() -> None:
            receipt = staged.commit()
            held.append(receipt.seconds_paused)
            kinds.add(receipt.staged_in.kind)

        return settled(work)

    measures = {"commit": commit, "copy": partial(settled, lambda: one.copy_(other))}
    timings = in_turn(measures, max(rounds, MORE_ROUNDS))
    check(stored, model)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    what = f"commit in single residency, staged in memory of the {' or '.join(sorted(kinds))}, {stored.size}"
    goal = ONE_COPY if stored.nbytes > MUCH else None
    yield compared(what, "ms", millis["commit"], "one copy_ on the device", millis["copy"], goal)
    yield spread(f"{what}: new calls could wait", "us", [second * 1e6 for second in held])


def _across(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure the longest call while a commit in place copies, beside one copy and one call."""
    model, paths = opened(stored, device, residency="single", staging="device"), paths_of(stored)
    one, other = (torch.empty(stored.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    tokens, spans = stored.tokens.to(device), list[tuple[float, float]]()

    def call() -> None:
        start = time.perf_counter()
        model(tokens)
        torch.accelerator.current_stream().synchronize()
        spans.append((start, time.perf_counter()))

    def longest_across() -> float:
        staged = model.stage(next(paths))
        spans.clear()
        with calling(call, 1):  # which raises its error in the end
            soon = time.perf_counter() + PATIENCE
            while len(spans) < 3 and time.perf_counter() < soon:
                time.sleep(0.001)
            begin = time.perf_counter()
            staged.commit()
            end = time.perf_counter()
        return max(stop - start for start, stop in spans if stop > begin and start < end)

    measures = {"across": longest_across, "both": partial(settled, lambda: (one.copy_(other), model(tokens)))}
    timings = in_turn(measures, max(rounds, MORE_ROUNDS))
    check(stored, model)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    what, peer = f"longest call across a commit in place, {stored.size}", "one copy_ on the device and one call"
    yield compared(what, "ms", millis["across"], peer, millis["both"])
    more = [across - least for across, least in zip(millis["across"], millis["both"], strict=True)]
    yield spread(f"{what}, less {peer}", "ms", more, LITTLE_MORE)


def _from_host(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure commits in single residency, staged in host memory, beside a copy of page-locked memory to the device."""
    model, paths = opened(stored, device, residency="single", staging="host"), paths_of(stored)
    kinds: set[str] = set()

    def commit() -> float:
        staged = model.stage(next(paths))
        start = time.perf_counter()
        kinds.add(staged.commit().staged_in.kind)
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    timings = in_turn({"commit": commit, "copy": _copies(stored.nbytes, device)}, rounds)
    check(stored, model)
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what = f"commit in single residency, staged in memory of the {' or '.join(sorted(kinds))}, {stored.size}"
    yield compared(what, "GB/s", rate["commit"], "page-locked copy_ to the device", rate["copy"], FROM_THE_HOST)


def _swaps(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure the rate from a path in the page cache to served weights."""
    model, paths = opened(stored, device), paths_of(stored)
    with _hashers() as hashers:
        measures = {"swap": lambda: settled(lambda: model.swap(next(paths))), "copy": _copies(stored.nbytes, device)}
        timings = in_turn(measures, rounds)
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what = f"swap {stored.size}, double residency, digests by {' or '.join(sorted(hashers))}"
    check(stored, model)
    yield compared(what, "GB/s", rate["swap"], "page-locked copy_ to the device", rate["copy"], IN_SECONDS)


def _whole(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure from a path to served weights; the plain way is done when they are copied over the served ones."""
    model, paths, first = opened(stored, device), paths_of(stored), stored.versions[0]
    with torch.no_grad(), torch.device(device):
        eager = Stack(stored.nbytes).eval()
    plain = "load_state_dict(load_file())"
    peers: dict[str, Callable[[], object]] = {
        plain: lambda: eager.load_state_dict(safetensors.torch.load_file(first.path)),
    }
    if device == "cuda":  # safetensors loads to no other accelerator
        load_first = partial(safetensors.torch.load_file, first.path, device=device)
        peers["load_state_dict(load_file(device))"] = lambda: eager.load_state_dict(load_first())
    measures = {"swap": lambda: settled(lambda: model.swap(next(paths)))}
    measures |= {name: partial(settled, work) for name, work in peers.items()}
    timings = in_turn(measures, rounds)
    check(stored, model)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    for name in peers:
        goal = FOUR_TIMES if name == plain else None
        yield compared(f"swap {stored.size}, double residency", "ms", millis["swap"], name, millis[name], goal)


def _calls(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure calls during a staging without pauses."""
    model, paths, tokens = opened(stored, device), paths_of(stored), stored.tokens.to(device)

    def slowest() -> float:
        timings = [_answered(lambda: model(tokens)) for _ in range(CALLS)]
        return percentile(timings, 0.99)

    stagings: list[float] = []

    def slowest_while_staging() -> float:
        begun = len(stagings)

        def stage() -> None:
            model.stage(next(paths)).discard()
            stagings.append(time.perf_counter())

        with calling(stage, 1):
            soon = time.perf_counter() + PATIENCE
            while len(stagings) == begun and time.perf_counter() < soon:  # the first one may allocate
                time.sleep(0.001)
            return slowest()

    timings = in_turn({"staging": slowest_while_staging, "alone": slowest}, rounds)
    micros = {name: [second * 1e6 for second in values] for name, values in timings.items()}
    what, peer = f"p99 of a call, staging {stored.size} without a pause", "p99 without staging"
    yield compared(what, "us", micros["staging"], peer, micros["alone"], UNDISTURBED)


def _encoder(device: str, rounds: int) -> Iterator[Row]:
    """Measure calls of a small model, which are bound by the host unless they are captured."""
    x = torch.randn(1, 16, 128, generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory(prefix="weightswap-bench-") as folder, torch.no_grad():
        eager = Encoder().eval()
        with quiet():
            artifact = export(eager, (x,), out=Path(folder) / "encoder.artifact")
        file = pack(eager, artifact, out=Path(folder) / "v.safetensors").path
        on_device, eager = x.to(device), eager.to(device)
        expected = eager(on_device).cpu()
        models = {"plain": load(artifact, file, device=device)}
        if device == "cuda":
            models["captured"] = load(artifact, file, device=device, cuda_graphs="auto")
        for name, model in models.items():
            close(model(on_device).cpu(), expected, name)
        replayed = _captured_by_hand(eager, on_device) if device == "cuda" else None

        def settled(function: Callable[[torch.Tensor], object]) -> Callable[[], None]:
            def call() -> None:
                function(on_device)
                torch.accelerator.synchronize()

            return call

        calls = {"eager": settled(eager)} | {name: settled(model) for name, model in models.items()}
        asking = {f"{name}, asking": partial(_asked, partial(model, on_device)) for name, model in models.items()}
        if replayed is not None:
            calls["by hand"] = settled(replayed)
            asking["by hand, asking"] = partial(_asked, partial(replayed, on_device))
        timings = in_turn({name: per_call(call, 50) for name, call in calls.items()} | asking, rounds)
    micros = {name: [second * 1e6 for second in values] for name, values in timings.items()}
    for name in models:
        what = f"model(x), 12-layer encoder, {name}"
        goal = FOUR_TIMES if name == "captured" else None
        yield compared(what, "us", micros[name], "eager module", micros["eager"], goal)
        asked = micros[f"{name}, asking"]
        if name == "captured":
            yield compared(what, "us", micros[name], BY_HAND, micros["by hand"])
            yield compared(f"{what}: the host's time", "us", asked, BY_HAND, micros["by hand, asking"], SHORT)
        else:
            yield spread(f"{what}: the host's time", "us", asked)


def _captured_by_hand(eager: torch.nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that replays the module with torch alone, as an application would."""
    graph, static = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    for _ in range(2):
        eager(static)
    with torch.cuda.graph(graph):
        output = eager(static)

    def call(value: torch.Tensor) -> torch.Tensor:
        static.copy_(value)
        graph.replay()
        return output.clone()

    return call
