"""`weightswap bench`: measurements and output. No test asserts a time."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.program import document, run, said
from tests.support.tiny import TinyArtifact
from tests.support.tiny import WriteWeights as Weights
from weightswap_runtime import Artifact, Unsupported, WeightFileError
from weightswap_tools import bench as benchmarks
from weightswap_tools.bench import BenchReport, BenchRequest, CallTimes, EngineBench, bench
from weightswap_tools.bench.command import bench_report, call_plots, call_table, fitting_scale


def request(tiny: TinyArtifact, weights: Path, **more: Any) -> BenchRequest:
    fixed: dict[str, Any] = {"engine": "torch", "method": "forward", "residency": "double", "seconds": 0.0, "swaps": 2}
    return BenchRequest(artifact=str(tiny.path), weights=str(weights), **({"sizes": ({"batch": 3},)} | fixed | more))


def test_calls_swaps_and_memory(tiny: TinyArtifact, weight_file: Weights, residency: str) -> None:
    found = benchmarks.measure(request(tiny, weight_file(1), residency=residency, threads=3, seconds=0.02))
    (calls,) = found.calls
    assert (calls.sizes, calls.threads, calls.samples_per_second) == ({"batch": 3}, 3, None)
    assert calls.calls >= 3
    assert 0 < calls.p50 <= calls.p90 <= calls.p99 <= calls.seconds
    assert calls.calls_per_second == calls.calls / calls.seconds
    assert [swap.bytes_read for swap in found.swaps] == [15 * 4 + 5 * 4 + 4 + 8] * 2
    assert found.memory is not None
    # no order: what earlier tests of this process have left may be freed meanwhile
    assert min(found.memory.before_load, found.memory.after_load, found.memory.peak_swapping) > 0
    assert (found.engine, found.residency, found.failed) == ("torch", residency, "")


def test_inputs_from_a_file(tiny: TinyArtifact, weight_file: Weights, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((7, 3), "f4"))
    found = benchmarks.measure(request(tiny, weight_file(1), sizes=({},), inputs=str(tmp_path / "in.npz")))
    assert [calls.samples_per_second for calls in found.calls] == [None]


def test_samples_are_those_of_all_threads_together(tiny: TinyArtifact, weight_file: Weights) -> None:
    sizes = tuple({"batch": batch} for batch in (0, 1, 7))
    found = benchmarks.measure(request(tiny, weight_file(1), sizes=sizes, threads=2, batch_dimension="batch"))
    assert [calls.samples_per_second for calls in found.calls] == [
        calls.sizes["batch"] * calls.calls / calls.seconds for calls in found.calls
    ]


FAILURES = {
    "no such input": ({"inputs": "in.npz"}, "InputMismatch: forward: x: missing from the inputs (--input FILE)"),
    "an input too many": ({"inputs": "more.npz"}, "InputMismatch: forward: y: not an input (the inputs are x)"),
    "no such file": ({"weights": "nowhere"}, "WeightFileError: nowhere: cannot be opened"),
}


@pytest.mark.parametrize(("more", "says"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_a_result(
    more: dict[str, str],
    says: str,
    tiny: TinyArtifact,
    weight_file: Weights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "in.npz", y=np.ones(3, "f4"))
    np.savez(tmp_path / "more.npz", x=np.ones((7, 3), "f4"), y=np.ones(3, "f4"))
    wanted = msgspec.structs.replace(request(tiny, weight_file(1)), **more)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(wanted))))
    benchmarks.main()
    found = msgspec.json.decode(capfdbinary.readouterr().out.splitlines()[-1], type=EngineBench)
    assert found.failed.startswith(says)
    assert found.calls == ()


def test_a_crashed_process_is_a_failure(
    tiny: TinyArtifact, weight_file: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = benchmarks._run(request(tiny, weight_file(1)))
    assert found.failed == "the measuring process exited with status 1: no output"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[BenchRequest]:
    """The requests of a benchmark; each gets an empty result."""
    requests: list[BenchRequest] = []

    def run(wanted: BenchRequest) -> EngineBench:
        requests.append(wanted)
        return EngineBench(engine=wanted.engine, residency=wanted.residency)

    monkeypatch.setattr(benchmarks, "_run", run)
    return requests


def test_requests_and_progress(tiny: TinyArtifact, weight_file: Weights, recorded: list[BenchRequest]) -> None:
    told: list[tuple[int, int]] = []
    found = bench(tiny.path, weight_file(1), batches=(0, 1, 8, 9), progress=lambda *done: told.append(done))
    assert [(wanted.engine, wanted.residency) for wanted in recorded] == [("torch", "double"), ("torch", "single")]
    assert recorded[0].sizes == ({"batch": 0}, {"batch": 1}, {"batch": 8})
    assert recorded[1].sizes == recorded[0].sizes
    assert {wanted.batch_dimension for wanted in recorded} == {found.batch_dimension} == {"batch"}
    assert told == [(0, 2), (1, 2)]
    assert found.left_out == {
        "aoti": f"not compiled: weightswap compile {tiny.path} --engine aoti",
        "onnx": f"not compiled: weightswap compile {tiny.path} --engine onnx",
        "batch=9": "the method has batch from 0 to 8",
    }
    assert (found.graph_id, found.method) == (Artifact.open(tiny.path).graph_id, "forward")


def test_sizes_by_name(tiny: TinyArtifact, weight_file: Weights, recorded: list[BenchRequest]) -> None:
    bench(tiny.path, weight_file(1), sizes={"batch": 4}, batches=(1, 2), engines=["torch", "auto"])
    assert [wanted.sizes for wanted in recorded] == [({"batch": 4},)] * 2


def test_the_batch_size_of_inputs_from_a_file_is_unknown(
    tiny: TinyArtifact, weight_file: Weights, recorded: list[BenchRequest]
) -> None:
    assert bench(tiny.path, weight_file(1), inputs="in.npz").batch_dimension is None
    assert [(wanted.batch_dimension, wanted.sizes) for wanted in recorded] == [(None, ({},))] * 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an engine that is not compiled": ({"engines": ["aoti"]}, "engine 'aoti': not compiled: weightswap compile"),
    "an engine that there is not": ({"engines": ["tvm"]}, "engine 'tvm': expected 'torch'"),
    "another method": ({"method": "encode"}, "'encode' is not a method"),
    "sizes out of range": ({"batches": (9, 10)}, "takes none of {'batch': 9}, {'batch': 10}; it has batch from 0 to 8"),
    "an unknown dimension": (
        {"sizes": {"length": 3}},
        "'length' is not a dynamic dimension of the method, which has: batch",
    ),
}


@pytest.mark.parametrize(("more", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_are_refused(more: dict[str, Any], says: str, tiny: TinyArtifact, weight_file: Weights) -> None:
    with pytest.raises(Unsupported) as refused:
        bench(tiny.path, weight_file(1), **more)
    assert says in str(refused.value)


def test_weights_that_are_not_there(tiny: TinyArtifact) -> None:
    with pytest.raises(WeightFileError, match="nowhere"):
        bench(tiny.path, "nowhere")


def timed(batch: int, rate: float) -> CallTimes:
    """A second of calls by two threads, each making `rate` calls."""
    return CallTimes(
        sizes={"batch": batch, "length": 3},
        threads=2,
        calls=int(2 * rate),
        seconds=1.0,
        p50=1 / rate,
        p90=2 / rate,
        p99=4 / rate,
        samples_per_second=2 * rate * batch,
    )


def measured(*calls: CallTimes, dimension: str | None = "batch") -> BenchReport:
    return BenchReport(
        artifact="a",
        graph_id="g",
        weights="w",
        method="forward",
        machine="m",
        engines=(EngineBench(engine="torch", residency="double", calls=calls),),
        left_out={},
        batch_dimension=dimension,
    )


def test_calls_are_plotted_over_the_batch() -> None:
    latency, calls, samples = call_plots(measured(timed(32, 10.0), timed(1, 1000.0), timed(8, 100.0)))
    assert [line.style for line in latency.lines] == ["p50", "p99"]
    assert latency.lines[1].points == ((1, 4.0), (8, 40.0), (32, 400.0))
    assert calls.lines[0].points == ((1, 2000.0), (8, 200.0), (32, 20.0))
    assert samples.lines[0].points == ((1, 2000.0), (8, 1600.0), (32, 640.0))
    assert [plot.x.scale for plot in (latency, calls, samples)] == ["log"] * 3
    assert [plot.y.scale for plot in (latency, calls, samples)] == ["log", "log", "linear"]
    assert {line.group for plot in (latency, calls, samples) for line in plot.lines} == {"torch, double"}


@pytest.mark.parametrize("found", [measured(timed(8, 1.0)), measured(), measured(timed(1, 1.0), dimension=None)])
def test_one_batch_is_no_plot(found: BenchReport) -> None:
    assert list(call_plots(found)) == []
    assert bench_report(found).sections[1].blocks[-1] == call_table(found.engines)


@pytest.mark.parametrize(
    ("values", "scale"),
    [((), "linear"), ((1, 19), "linear"), ((20, 1), "log"), ((0, 1000), "linear"), ((-1, 100), "linear")],
)
def test_the_range_decides_the_axis(values: tuple[float, ...], scale: str) -> None:
    assert fitting_scale(values) == scale


@pytest.mark.slow
def test_the_command_measures_in_separate_processes(tiny: TinyArtifact, weight_file: Weights, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    fast = ("--batch", "2", "--seconds", "0", "--swaps", "1")
    out = said("bench", tiny.path, weight_file(1), *fast, "--html", page)
    for title in ("calls of forward", "swaps of the same file", "resident memory", "left out    onnx: not compiled"):
        assert title in out
    assert "batch=2" in out
    assert "samples/s" in out
    assert "How fast it serves and swaps" in page.read_text()


def test_json_and_failures(
    tiny: TinyArtifact, weight_file: Weights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = EngineBench(engine="torch", residency="double", failed="[red]\x1b it broke")
    monkeypatch.setattr(benchmarks, "_run", lambda _: failed)
    command = ("bench", tiny.path, weight_file(1))
    assert msgspec.convert(document(*command, status=1), BenchReport).engines == (failed, failed)
    out = said(*command, "--html", tmp_path / "b.html", status=1)
    assert "failed      torch, double: [red]\\x1b it broke" in out
    assert "2 failed" in (tmp_path / "b.html").read_text()


@pytest.mark.parametrize(
    "arguments", [("--batch", "x"), ("--batch", "-1"), ("--size", "length"), ("--threads", "0"), ("--engine", "tvm")]
)
def test_bad_usage(arguments: tuple[str, ...], tiny: TinyArtifact, weight_file: Weights) -> None:
    run("bench", tiny.path, weight_file(1), *arguments, status=2)
