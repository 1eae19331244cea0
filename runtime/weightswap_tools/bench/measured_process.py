"""A process that measures one engine in one residency: reads a request as JSON, and writes the result as JSON.

In a separate process, memory is that of one engine alone, and a crash ends one measurement only.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from weightswap_runtime.format.signature import call_arguments
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import engine_of
from weightswap_tools.inputs import engine_inputs, named_inputs, random_values, read_tensors

from .running import BenchRequest, CallTimes, EngineBench, Memory, SwapTimes

_WARM_UP = 5  # calls that are not counted
_Call = Callable[[], object]


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
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=BenchRequest)
    try:
        result = measure(request)
    except Exception as error:  # also of operators; the parent process prints it
        text = f"{type(error).__name__}: {error}"
        result = EngineBench(engine=request.engine, residency=request.residency, failed=text)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main()
