"""Benchmarks of an artifact's engines: latency and throughput of calls, cost of swaps.

Each engine is measured in a process of its own, which reads a request as JSON and writes the result as JSON: memory is
that of one engine alone, and a crash ends one measurement only.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from weightswap_runtime.decoding import from_json
from weightswap_runtime.engines.choosing import ENGINES, available_engines, choose_engine, compiled_methods
from weightswap_runtime.engines.engine import AUTO
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.expressions import all_hold
from weightswap_runtime.format.signature import Signature, call_arguments, in_range
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.live.residency import RESIDENCIES, ResidencyName
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.sources.location import printable
from weightswap_tools.inputs import common_sizes, engine_inputs, named_inputs, random_values, read_tensors

_BATCH = "batch"
_WARM_UP = 5  # calls that are not counted
_Call = Callable[[], object]


class _BenchPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


class BenchReport(_BenchPart, frozen=True):
    """The measurements of all engines."""

    artifact: str
    graph_id: str
    weights: str
    method: str
    machine: str  # processors and system
    engines: tuple[EngineBench, ...]
    left_out: dict[str, str]  # an engine or sizes -> why they were not measured
    batch_dimension: str | None = None  # whose size is the number of samples in a call; None without, or for a file

    @property
    def weights_id(self) -> str:
        """The id of the served weights; empty if every engine failed."""
        return next((result.weights_id for result in self.engines if result.weights_id), "")


class EngineBench(_BenchPart, frozen=True):
    """Measurements of one engine in one residency."""

    engine: str
    residency: ResidencyName
    weights_id: str = ""
    load_seconds: float = 0.0
    calls: tuple[CallTimes, ...] = ()
    swaps: tuple[SwapTimes, ...] = ()
    memory: Memory | None = None
    failed: str = ""  # the reason if there are no measurements


class CallTimes(_BenchPart, frozen=True):
    """Calls with inputs of one set of sizes, without warm-up calls."""

    sizes: dict[str, int]
    threads: int  # that call concurrently
    calls: int  # of all threads together
    seconds: float  # that all of it took
    p50: float  # percentiles of the latency of one call, in seconds
    p90: float
    p99: float
    samples_per_second: float | None = None  # None if the batch size is unknown: none is dynamic, or inputs of a file

    @property
    def calls_per_second(self) -> float:
        return self.calls / self.seconds


class SwapTimes(_BenchPart, frozen=True):
    """One swap of the same file, from its receipt. Times are in seconds."""

    staged: float
    verified: float
    paused: float
    bytes_read: int


class Memory(_BenchPart, frozen=True):
    """Resident memory of the measuring process, in bytes. The load includes the engine's library."""

    before_load: int
    after_load: int
    peak_swapping: int


def bench(
    artifact: str | os.PathLike[str],
    weights: str | os.PathLike[str],
    *,
    engines: Sequence[str] = (),
    method: str | None = None,
    batches: Sequence[int] = (1, 8, 32),
    sizes: Mapping[str, int] | None = None,
    inputs: str | os.PathLike[str] | None = None,
    threads: int = 1,
    seconds: float = 1.0,
    swaps: int = 5,
    op_libraries: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> BenchReport:
    """Measure calls and swaps of every engine on the CPU, each in processes of its own, one for each residency.

    engines: names; by default those that the artifact has and this machine can run. batches: sizes of the dimension
    named "batch", or of the first dynamic one; sizes that the signature does not allow are left out. sizes: of other
    dynamic dimensions, by name; by default 2, 3 or 5. inputs: a .safetensors or .npz file with inputs by name, instead
    of random ones. threads: the number of concurrent callers. seconds: the duration of calls for each batch in each
    residency. swaps: the number of swaps of the same file. op_libraries: packages and .so files that register
    operators, as for `load`. progress: called with the processes done and the processes in all.

    If an engine fails, its result holds the reason. Raises ArtifactError, WeightFileError, and Unsupported for an
    engine, a method or sizes that the artifact does not have.
    """
    opened = Artifact.open(artifact)
    name = method or ("forward" if "forward" in opened.methods else opened.methods[0])
    if name not in opened.methods:
        raise Unsupported(f"{name!r} is not a method of {opened.path}, which has: {', '.join(opened.methods)}")
    signature = opened.manifest.methods[name].signature
    chosen = _choose_engines(opened, engines, name)
    with open_weights(weights):
        pass  # report a file that cannot be opened once, not for each engine
    dimension = None if inputs is not None else _batch_dimension(signature, sizes or {})
    requested = [] if inputs is not None else _size_sets(signature, dimension, batches, sizes or {})
    allowed = [item for item in requested if in_range(item, signature.dims) and all_hold(signature.conditions, item)]
    if requested and not allowed:
        raise Unsupported(f"the method takes none of {', '.join(map(str, requested))}; it has {_ranges(signature)}")
    refused = {sizes_text(item): f"the method has {_ranges(signature)}" for item in requested if item not in allowed}
    unavailable = {engine: _why_unavailable(opened, engine, name) for engine in ENGINES if engine not in chosen}
    request = BenchRequest(
        artifact=os.fspath(artifact),
        weights=os.fspath(weights),
        engine="",
        method=name,
        sizes=tuple(allowed) or ({},),
        residency="double",
        threads=threads,
        seconds=seconds,
        swaps=swaps,
        inputs=None if inputs is None else os.fspath(inputs),
        op_libraries=tuple(op_libraries),
        batch_dimension=dimension,
    )
    return BenchReport(
        artifact=str(opened.path),
        graph_id=opened.graph_id,
        weights=printable(os.fspath(weights)),
        method=name,
        machine=f"{len(os.sched_getaffinity(0))} processors, {platform.machine()}, {platform.system()}",
        engines=tuple(_measure(request, chosen, progress)),
        left_out=({} if engines else unavailable) | refused,
        batch_dimension=dimension,
    )


def _choose_engines(artifact: Artifact, engines: Sequence[str], method: str) -> list[str]:
    """Return the engines of these names, or all that run the method. Raises Unsupported for one that does not."""
    offered = [engine for engine in available_engines(artifact) if method in compiled_methods(engine, artifact)]
    named = [choose_engine(engine, artifact) for engine in engines]
    if AUTO in engines and named[engines.index(AUTO)] not in offered:
        named[engines.index(AUTO)] = "torch"  # it runs the methods that the chosen engine lacks
    chosen = list(dict.fromkeys(named)) or offered
    if missing := [engine for engine in chosen if engine not in offered]:
        raise Unsupported(f"engine {missing[0]!r}: {_why_unavailable(artifact, missing[0], method)}")
    return chosen


def _why_unavailable(artifact: Artifact, engine: str, method: str) -> str:
    compiled = compiled_methods(engine, artifact)
    if method in compiled:
        return "this machine cannot run it"
    option = f" --method {method}" if compiled else ""
    return f"not compiled: weightswap compile {artifact.path} --engine {engine}{option}"


def _ranges(signature: Signature) -> str:
    ranges = [
        f"{name} from {limits.min} to {'any' if limits.max is None else limits.max}"
        for name, limits in signature.dims.items()
    ]
    return ", ".join([*ranges, *signature.conditions]) or "no dynamic dimensions"


def _batch_dimension(signature: Signature, sizes: Mapping[str, int]) -> str | None:
    """Return the dimension named "batch", else the first dynamic one without a given size."""
    return _BATCH if _BATCH in signature.dims else next((name for name in signature.dims if name not in sizes), None)


def _size_sets(
    signature: Signature, batch_dimension: str | None, batches: Sequence[int], sizes: Mapping[str, int]
) -> list[dict[str, int]]:
    """Return a set of sizes for each batch; one empty set without dynamic dimensions."""
    unknown = [name for name in sizes if name not in signature.dims]
    if unknown:
        known = ", ".join(signature.dims) or "none"
        raise Unsupported(f"{unknown[0]!r} is not a dynamic dimension of the method, which has: {known}")
    common = next(iter(common_sizes(signature)), {})
    if batch_dimension is None or batch_dimension in sizes:
        return [{**common, **sizes}]
    return [{**common, **sizes, batch_dimension: batch} for batch in batches]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as `batch=8, length=3`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


# The processes that measure: first from outside, then from inside.


class BenchRequest(_BenchPart, frozen=True):
    """A request to one process."""

    artifact: str
    weights: str
    engine: str
    method: str
    sizes: tuple[dict[str, int], ...]  # of the dynamic dimensions, for each measurement; one empty set for a file
    residency: ResidencyName
    threads: int = 1
    seconds: float = 1.0
    swaps: int = 5
    inputs: str | None = None  # a file of inputs to use instead of random ones
    op_libraries: tuple[str, ...] = ()
    batch_dimension: str | None = None  # whose size is the number of samples in a call


def _measure(
    request: BenchRequest, engines: Sequence[str], progress: Callable[[int, int], None] | None
) -> Iterator[EngineBench]:
    runs = [(engine, residency) for engine in engines for residency in RESIDENCIES]
    for done, (engine, residency) in enumerate(runs):
        if progress:
            progress(done, len(runs))
        yield _run(msgspec.structs.replace(request, engine=engine, residency=residency))


def _run(request: BenchRequest) -> EngineBench:
    """Measure one engine in a separate process."""
    command = [sys.executable, "-c", f"import {__name__} as bench; bench.main()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run(
        command, input=msgspec.json.encode(request), capture_output=True, env=environment, check=False
    )
    if process.returncode:
        last = (process.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        text = f"the measuring process exited with status {process.returncode}: {last}"
        return EngineBench(engine=request.engine, residency=request.residency, failed=text)
    return from_json(process.stdout.splitlines()[-1], EngineBench)


def measure(request: BenchRequest) -> EngineBench:
    """Load the model, then measure calls and swaps. Raises as these do."""
    before = _resident("VmRSS")
    start = time.perf_counter()
    model = load(
        request.artifact,
        request.weights,
        engine=request.engine,  # type: ignore[arg-type]
        residency=request.residency,
        op_libraries=request.op_libraries,
    )
    loaded = time.perf_counter() - start
    after = _resident("VmRSS")
    calls = tuple(_measure_calls(_call(model, request, sizes), sizes, request) for sizes in request.sizes)
    _reset_peak()
    _swap(model, request.weights)  # not counted: it allocates the second arena and first calls its session
    swaps = tuple(_swap(model, request.weights) for _ in range(request.swaps))
    memory = Memory(before_load=before, after_load=after, peak_swapping=_resident("VmHWM"))
    return EngineBench(
        engine=model.engine,
        residency=request.residency,
        weights_id=model.weights_id or "",
        load_seconds=loaded,
        calls=calls,
        swaps=swaps,
        memory=memory,
    )


def _resident(field: str) -> int:
    """Return this process's memory in bytes: VmRSS now, VmHWM the peak since `_reset_peak`; 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def _reset_peak() -> None:
    """Reset VmHWM to the current memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # the peak is then since the start of the process
        return


def _call(model: Model, request: BenchRequest, sizes: Mapping[str, int]) -> _Call:
    """Return a function that calls the method with prepared inputs."""
    signature, engine = model.signatures[request.method], engine_of(model)
    if request.inputs is None:
        flat = random_values(signature, sizes, np.random.default_rng(0))
    else:
        flat = named_inputs(request.method, signature, read_tensors(Path(request.inputs)))
    args, kwargs = call_arguments(signature, engine_inputs(flat, engine))
    method = model.method(request.method)
    return lambda: method(*args, **kwargs)


def _measure_calls(call: _Call, sizes: dict[str, int], request: BenchRequest) -> CallTimes:
    for _ in range(_WARM_UP):
        call()
    times: list[list[float]] = [[] for _ in range(request.threads)]
    start = time.perf_counter()
    threads = [threading.Thread(target=_call_until, args=(call, start + request.seconds, own)) for own in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    latencies = np.concatenate(times)
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)).tolist()
    batch = sizes.get(request.batch_dimension or "")
    return CallTimes(
        sizes=sizes,
        threads=request.threads,
        calls=len(latencies),
        seconds=seconds,
        p50=p50,
        p90=p90,
        p99=p99,
        samples_per_second=None if batch is None else batch * len(latencies) / seconds,
    )


def _call_until(call: _Call, end: float, times: list[float]) -> None:
    """Call until the time `end`, at least once, and record the seconds of each call."""
    begin = time.perf_counter()
    while not times or begin < end:
        call()
        now = time.perf_counter()
        times.append(now - begin)
        begin = now


def _swap(model: Model, weights: str) -> SwapTimes:
    receipt = model.swap(weights)
    return SwapTimes(
        staged=receipt.seconds_staged,
        verified=receipt.seconds_verified,
        paused=receipt.seconds_paused,
        bytes_read=receipt.bytes_read,
    )


def main() -> None:
    """Measure what standard input asks for."""
    request = from_json(sys.stdin.buffer.read(), BenchRequest)
    try:
        result = measure(request)
    except Exception as error:  # also of operators; the parent process prints it
        text = f"{type(error).__name__}: {error}"
        result = EngineBench(engine=request.engine, residency=request.residency, failed=text)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(result) + b"\n")
