"""The report of what was measured, and what was asked for. Times in seconds, memory in bytes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weightswap_runtime.live.residency.residency import ResidencyName


class _BenchPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


def sizes_text(sizes: Mapping[str, int]) -> str:
    """`batch=8, length=3`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


class BenchRequest(_BenchPart, frozen=True):
    """What one process is to measure. `sizes` are of the dynamic dimensions, one set for each measurement.

    `batch_dimension` is the one whose size is the number of samples in a call, None if that is not known.
    `inputs` is a file of inputs, instead of random ones; there is one set of sizes then, which says nothing.
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
    """Calls with inputs of one set of sizes, made by `threads` at once for `seconds`, after a few that do not count.

    The percentiles are of the time that one call took. `samples_per_second` are those of all threads together: calls
    per second times the size of the batch dimension. It is None where that size is not known: the method has no dynamic
    dimension, or the inputs come from a file.
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
    """One swap of the same file, as its receipt tells."""

    staged: float
    verified: float
    paused: float
    bytes_read: int


class Memory(_BenchPart, frozen=True):
    """Resident memory of a process that has only this: before the load, after it, and at most while it swapped.

    The load brings in the engine's library, too.
    """

    before_load: int
    after_load: int
    peak_swapping: int


class EngineBench(_BenchPart, frozen=True):
    """One engine in one residency, in a process of its own. `failed` says why there is nothing; else it is empty."""

    engine: str
    residency: ResidencyName
    weights_id: str = ""
    load_seconds: float = 0.0
    calls: tuple[CallTimes, ...] = ()
    swaps: tuple[SwapTimes, ...] = ()
    memory: Memory | None = None
    failed: str = ""


class BenchReport(_BenchPart, frozen=True):
    """Everything. `left_out`: an engine or sizes -> why they were not measured. `machine`: processors and system.

    `batch_dimension`: the dynamic dimension whose size is the number of samples in a call; None if there is none, or
    if the inputs came from a file.
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
        """Of what was served; empty if every engine failed."""
        return next((each.weights_id for each in self.engines if each.weights_id), "")
