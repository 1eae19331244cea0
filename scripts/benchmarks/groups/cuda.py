"""Swaps and calls on an accelerator, normally CUDA. Each peer does the same with torch alone."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from unittest import mock
from zipfile import ZipFile

import safetensors.torch
import torch
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import Encoder, Stack, Stored, close, quiet, stored
from timing import in_turn, per_call, percentile, seconds

from weightswap_exporter import export, pack
from weightswap_runtime import Model, load
from weightswap_runtime.memory.device.torch_device import Accelerator

COMMITS = 100  # for each round
CALLS = 200  # for each percentile

NEARLY_A_COPY = Goal("ratio", "at least", 0.8)
ONE_COPY = Goal("ratio", "at most", 1.053)  # goal: at least 0.95 of its rate
FROM_THE_HOST = Goal("ratio", "at least", 0.9)
INSTANT = Goal("p99", "at most", 50)
UNDISTURBED = Goal("ratio", "at most", 1.15)
FOUR_TIMES = Goal("ratio", "at most", 0.25)


def rows(settings: Settings) -> Iterator[Row]:
    """Measure each part; it frees its memory before the next one starts, and a failed part does not stop the others.

    Raises SystemExit if torch finds no accelerator, and an ExceptionGroup of the parts' errors.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit("scripts/bench cuda needs a GPU, but torch finds none here")
    device, errors = accelerator.type, list[Exception]()
    with stored(settings.megabytes * 1_000_000) as large:
        parts = [
            partial(part, large) for part in (_staging, _commits, _in_place, _from_host, _calls, _whole, _constants)
        ]
        for part in (_encoder, *parts):
            try:
                yield from part(device, settings.rounds)
            except Exception as error:
                errors.append(error.with_traceback(None))  # the error's frames would keep a model alive
            gc.collect()
            torch.accelerator.empty_cache()
    if errors:
        raise ExceptionGroup("the benchmarks on the accelerator", errors)


def _settled(function: Callable[[], object]) -> float:
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


def _opened(stored: Stored, device: str, **options: object) -> Model:
    model = load(stored.artifact, stored.versions[0].path, device=device, **options)  # type: ignore[arg-type]
    _check(stored, model)
    return model


def _check(stored: Stored, model: Model) -> None:
    [version] = [version for version in stored.versions if version.weights_id == model.weights_id]
    output = model(stored.tokens.to(model.device)).cpu()
    close(output, version.expected, f"{version.path.name}, generation {model.generation}")


def _paths(stored: Stored) -> Iterator[Path]:
    return cycle(version.path for version in reversed(stored.versions))


def _staging(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure staging from the page cache to the device with digests, beside one copy from page-locked memory."""
    model, paths = _opened(stored, device), _paths(stored)
    locked = torch.empty(stored.nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(stored.nbytes, dtype=torch.uint8, device=device)

    def stage() -> float:
        start = time.perf_counter()
        staged = model.stage(next(paths))
        elapsed = time.perf_counter() - start
        staged.commit()
        return elapsed

    def stage_hashing_on_host() -> float:
        with mock.patch.object(Accelerator, "hasher", return_value=None):
            return stage()

    copy = partial(_settled, lambda: on_device.copy_(locked, non_blocking=True))
    timings = in_turn({"stage": stage, "copy": copy, "on host": stage_hashing_on_host}, rounds)
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    peer = "page-locked copy_ to the device"
    yield compared(f"stage {stored.size}, digests on", "GB/s", rate["stage"], peer, rate["copy"], NEARLY_A_COPY)
    yield compared(f"stage {stored.size}, digests on", "GB/s", rate["stage"], "digests on the host", rate["on host"])
    _check(stored, model)


def _commits(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure the wait of a commit's caller in double residency, while the device is busy with calls."""
    model = _opened(stored, device)
    model.swap(stored.versions[1].path)
    tokens, seen = stored.tokens.to(device), []
    for _ in range(COMMITS * rounds):
        model(tokens)
        start = time.perf_counter()
        model.rollback()
        seen.append((time.perf_counter() - start) * 1e6)
    yield spread(f"commit in double residency, the caller's time, {stored.size}", "us", seen, INSTANT)
    _check(stored, model)


def _in_place(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure commits in single residency, staged on the device, until the copy is done there."""
    model, paths = _opened(stored, device, residency="single", staging="device"), _paths(stored)
    one, other = (torch.empty(stored.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    held: list[float] = []

    def commit() -> float:
        staged = model.stage(next(paths))
        return _settled(lambda: held.append(staged.commit().seconds_paused))

    timings = in_turn({"commit": commit, "copy": partial(_settled, lambda: one.copy_(other))}, rounds)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    what = f"commit in single residency, {stored.size}"
    yield compared(what, "ms", millis["commit"], "one copy_ on the device", millis["copy"], ONE_COPY)
    yield spread(f"{what}: new calls could wait", "us", [second * 1e6 for second in held])
    _check(stored, model)


def _from_host(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure commits in single residency, staged in host memory, beside a copy of page-locked memory to the device."""
    model, paths = _opened(stored, device, residency="single", staging="host"), _paths(stored)
    locked = torch.empty(stored.nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(stored.nbytes, dtype=torch.uint8, device=device)
    kinds: set[str] = set()

    def commit() -> float:
        staged = model.stage(next(paths))
        start = time.perf_counter()
        kinds.add(staged.commit().staged_in.kind)
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    copy = partial(_settled, lambda: on_device.copy_(locked, non_blocking=True))
    timings = in_turn({"commit": commit, "copy": copy}, rounds)
    rate = {name: [stored.nbytes / second / 1e9 for second in values] for name, values in timings.items()}
    what = f"commit in single residency from host memory ({', '.join(sorted(kinds))}), {stored.size}"
    yield compared(what, "GB/s", rate["commit"], "page-locked copy_ to the device", rate["copy"], FROM_THE_HOST)
    _check(stored, model)


def _whole(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure from a path to served weights; the plain way is done when they are copied over the served ones."""
    model, paths, first = _opened(stored, device), _paths(stored), stored.versions[0]
    with torch.no_grad():
        eager = Stack(stored.nbytes).eval().to(device)
    plain = "load_state_dict(load_file())"
    peers: dict[str, Callable[[], object]] = {
        plain: lambda: eager.load_state_dict(safetensors.torch.load_file(first.path)),
        "load_state_dict(torch.load())": lambda: eager.load_state_dict(torch.load(stored.pickled, weights_only=True)),
    }
    if device == "cuda":  # safetensors loads to no other accelerator
        load_first = partial(safetensors.torch.load_file, first.path, device=device)
        peers["load_state_dict(load_file(device))"] = lambda: eager.load_state_dict(load_first())
    measures = {"swap": lambda: _settled(lambda: model.swap(next(paths)))}
    measures |= {name: partial(_settled, work) for name, work in peers.items()}
    timings = in_turn(measures, rounds)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    for name in peers:
        goal = FOUR_TIMES if name == plain else None
        yield compared(f"swap {stored.size}, double residency", "ms", millis["swap"], name, millis[name], goal)
    _check(stored, model)


def _constants(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure AOTInductor's ways to take new weights: over the served ones, or beside them and exchanged."""
    if device != "cuda":
        return
    if lacks := _lacks():
        print(f"skipped: AOTInductor's ways to take new weights, which need {lacks}", file=sys.stderr)
        return
    model, paths, first = _opened(stored, device), _paths(stored), stored.versions[0]
    package = _compiled(stored, device)
    with quiet():
        loaded = torch._inductor.aoti_load_package(str(package))
    with ZipFile(package) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".so"))
        library = archive.extract(member, package.parent)
    runner = torch._C._aoti.AOTIModelContainerRunnerCuda(library, 1, device)
    names = {fqn: name for name, fqn in runner.get_constant_names_to_original_fqns().items()}
    tokens = stored.tokens.to(device)

    def load_constants() -> None:
        loaded.load_constants(safetensors.torch.load_file(first.path, device=device), check_full_update=True)

    def swap_constants() -> None:
        tensors = safetensors.torch.load_file(first.path, device=device)
        runner.update_constant_buffer({names[fqn]: tensor for fqn, tensor in tensors.items()}, True, True)
        runner.swap_constant_buffer()

    peers = {"AOTInductor, load_constants": load_constants, "AOTInductor, swap_constant_buffer": swap_constants}
    for (name, work), call in zip(peers.items(), (loaded, lambda x: runner.run([x])[0]), strict=True):
        work()
        close(call(tokens).cpu(), first.expected, name)
    measures = {"swap": lambda: _settled(lambda: model.swap(next(paths)))}
    timings = in_turn(measures | {name: partial(_settled, work) for name, work in peers.items()}, rounds)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    for name in peers:
        yield compared(f"swap {stored.size}, double residency", "ms", millis["swap"], name, millis[name])
    _check(stored, model)


def _lacks() -> str | None:
    """Return what AOTInductor needs to compile and is missing here."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "a C++ compiler"
    try:
        from torch.utils.cpp_extension import CUDA_HOME
    except ImportError as error:
        return f"a module that torch imports ({error})"
    return None if CUDA_HOME else "the CUDA toolkit, with its folder in CUDA_HOME"


def _compiled(stored: Stored, device: str) -> Path:
    with torch.device(device), torch.no_grad():
        eager = Stack(stored.nbytes).eval()
    with quiet(), torch.no_grad():
        program = torch.export.export(eager, (stored.tokens.to(device),))
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(stored.pickled.with_name("compiled.pt2")),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.embed_kernel_binary": True,
            },
        )
    return Path(package)


def _calls(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure calls during a staging without pauses."""
    model, paths, tokens = _opened(stored, device), _paths(stored), stored.tokens.to(device)

    def slowest() -> float:
        timings = [_answered(lambda: model(tokens)) for _ in range(CALLS)]
        return percentile(timings, 0.99)

    def slowest_while_staging() -> float:
        stop = Event()

        def stage() -> None:
            while not stop.is_set():
                model.stage(next(paths)).discard()

        thread = Thread(target=stage)
        thread.start()
        try:
            return slowest()
        finally:
            stop.set()
            thread.join()

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

        def settled(function: Callable[[torch.Tensor], object]) -> Callable[[], None]:
            def call() -> None:
                function(on_device)
                torch.accelerator.synchronize()

            return call

        calls = {"eager": settled(eager)} | {name: settled(model) for name, model in models.items()}
        timings = in_turn({name: per_call(call, 50) for name, call in calls.items()}, rounds)
    micros = {name: [second * 1e6 for second in values] for name, values in timings.items()}
    for name in models:
        goal = FOUR_TIMES if name == "captured" else None
        what = f"model(x), 12-layer encoder, {name}"
        yield compared(what, "us", micros[name], "eager module", micros["eager"], goal)
