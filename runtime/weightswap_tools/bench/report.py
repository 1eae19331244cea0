"""Requests for measurements, and reports of them. Times are in seconds, memory in bytes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weightswap_runtime.live.residency.residency import ResidencyName


class _BenchPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as `batch=8, length=3`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


class BenchRequest(_BenchPart, frozen=True):
    """A request to one process. `sizes` has a set of sizes of the dynamic dimensions for each measurement.

    `batch_dimension` is the dimension whose size is the number of samples in a call; None if there is none. `inputs` is
    a file of inputs to use instead of random ones; `sizes` then has one empty set.
    """

    artifact: str
    weights: str
    engine: str
    method: str
    sizes: tuple[dict[str, int], ...]
    residency: ResidencyName
    threads: int = 1
    seconds: float = 1.0
    swaps: int = 5
    inputs: str | None = None
    op_libraries: tuple[str, ...] = ()
    batch_dimension: str | None = None


class CallTimes(_BenchPart, frozen=True):
    """Calls with inputs of one set of sizes, made by `threads` concurrent threads for `seconds`, without warm-up calls.

    The percentiles are of the latency of one call. `samples_per_second` is the number of calls per second of all
    threads together times the batch size. It is None if the batch size is unknown: the method has no dynamic dimension,
    or the inputs come from a file.
    """

    sizes: dict[str, int]
    threads: int
    calls: int
    seconds: float
    p50: float
    p90: float
    p99: float
    samples_per_second: float | None = None

    @property
    def calls_per_second(self) -> float:
        return self.calls / self.seconds


class SwapTimes(_BenchPart, frozen=True):
    """One swap of the same file, from its receipt."""

    staged: float
    verified: float
    paused: float
    bytes_read: int


class Memory(_BenchPart, frozen=True):
    """Resident memory of the measuring process: before the load, after it, and the peak while swapping.

    The load includes the engine's library.
    """

    before_load: int
    after_load: int
    peak_swapping: int


class EngineBench(_BenchPart, frozen=True):
    """Measurements of one engine in one residency. `failed` is the reason if there are none, else empty."""

    engine: str
    residency: ResidencyName
    weights_id: str = ""
    load_seconds: float = 0.0
    calls: tuple[CallTimes, ...] = ()
    swaps: tuple[SwapTimes, ...] = ()
    memory: Memory | None = None
    failed: str = ""


class BenchReport(_BenchPart, frozen=True):
    """The measurements of all engines.

    `left_out`: an engine or sizes -> why they were not measured. `machine`: processors and system. `batch_dimension`:
    the dynamic dimension whose size is the number of samples in a call; None if there is none, or for inputs of a file.
    """

    artifact: str
    graph_id: str
    weights: str
    method: str
    machine: str
    engines: tuple[EngineBench, ...]
    left_out: dict[str, str]
    batch_dimension: str | None = None

    @property
    def weights_id(self) -> str:
        """The id of the served weights; empty if every engine failed."""
        return next((result.weights_id for result in self.engines if result.weights_id), "")
