"""`scripts/bench` on a small model: every row is there, with its peer, and the outputs are right. No time is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.support import warm
from tests.support.ray_turns import ray_turn

BENCHMARKS = ROOT / "scripts" / "benchmarks"
MAIN = "import main\nsys.exit(main.main())"
LOADS = ("1 client", "8 clients", "32 clients")
LONGER = ("serve", "update", "call", "diff", "generate")
FACTS = {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "weightswap", "date"}
PEERS = {
    "swap": [
        ("stage", "preadv, "),
        ("stage", "preadv + BLAKE3"),
        ("stage", "preadv into fresh memory"),
        ("BLAKE3 alone", "preadv, "),
        ("commit in single residency", "one torch copy_"),
        ("commit in single residency", "memcpy, 1 thread"),
        ("swap", "load_state_dict(load_file())"),
        ("swap", "load_state_dict(torch.load(mmap=True))"),
        ("swap", "load_state_dict(torch.load())"),
    ],
    "update": [
        ("p99 of a call, staging", "p99 without staging"),
        ("swap of a delta, 4.", "swap of the full file"),
    ],
    "diff": [
        ("diff of two files of 4.", "load_file, ‖B - A‖"),
        ("diff of two files of 4.", "load_file, the statistics"),
    ],
    "call": [
        ("model(x), ", "bare graph"),
        ("model(x), ", "eager module"),
        ("model(x), ", "ep.module()"),
        ("model(x), 12-layer encoder, normalised weights", "prologue=False"),
    ],
    "state": [
        ("model(x, context=...)", "a fresh state for each call"),
        ("8 fitted members over one base", "one member"),
    ],
    "serve": [(f"serve, {load}: calls", "fastapi_protocol") for load in LOADS],
    "generate": [
        ("model.generate, torch, a token of 4 layers", "transformers, dynamic cache"),
        ("model.generate, aoti, a token of 4 layers", "transformers, static cache"),
        ("export_decoder, ", "torch.export of both methods"),
    ],
}
"""What is measured in each group, and beside what: how both begin."""
GOALS = {
    "swap": [
        ("stage ", "ratio", "at least", 0.8),
        ("looking for NaN while ", "ratio", "at least", 0.85),
        ("commit, the caller's time, 1.0 MB, idle", "p99", "at most", 100),
        ("commit, calls paused, 1.0 MB, 2 threads calling", "p99", "at most", 50),
        ("commit, the caller's time, 4.", "p99", "at most", 100),
        ("staged.commit()", "p99", "at most", 100),
        ("commit in single residency", "ratio", "at most", 1.3),
    ],
    "update": [
        ("p99 of a call, staging", "ratio", "at most", 1.25),
        ("cancel of a staging", "p99", "at most", 50),
        ("swap of a delta, 4.", "ratio", "at most", 0.05),
    ],
    "call": [
        ("model(x) minus bare graph", "median", "at most", 20),
    ],
    "state": [
        ("model(x, context=...)", "median", "at most", 10),
    ],
    "serve": [
        ("tritonclient.http, binary, 1 client", "median", "at most", 0.8),
        ("tritonclient.grpc, binary, 1 client", "median", "at most", 1.0),
        *((f"serve, {load}: calls", "ratio", "at least", 1.0) for load in LOADS),
        *((f"serve, {load}: p99 of a call", "ratio", "at most", 1.0) for load in LOADS),
    ],
}
Measure = Callable[[str], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """`measured(group)` is what is printed and written of a group, which is measured once."""

    @cache
    def measure(group: str) -> tuple[str, dict[str, Any]]:
        out = tmp_path_factory.mktemp("bench")
        done = bench(group, "--size-mb", "4", "--rounds", "1", "--billions", "0.01", "--out", str(out))
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((out / "bench.json").read_text())

    return measure


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(MAIN, *arguments)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code that finds the modules of the benchmarks."""
    start = f"import sys, warnings\nwarnings.simplefilter('ignore')\nsys.path.insert(0, {str(BENCHMARKS)!r})\n"
    command = [warm.python(), "-c", start + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("group", ["swap"])
@pytest.mark.slow
def test_the_report_knows_the_machine_and_the_settings(measured: Measure, group: str) -> None:
    _, made = measured(group)
    assert made["machine"].keys() >= FACTS
    assert made["settings"] == {"megabytes": 4, "rounds": 1, "billions": 0.01}


GROUPS = [pytest.param(group, marks=[pytest.mark.slow] if group in LONGER else []) for group in {**PEERS, **GOALS}]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.slow
def test_subjects_are_compared_with_peers_and_goals_are_judged(measured: Measure, group: str) -> None:
    _, made = measured(group)
    for what, peer in PEERS.get(group, []):
        found = [row for row in made["rows"] if row["what"].startswith(what) and (row["peer"] or "").startswith(peer)]
        assert found, (what, peer)
        for row in found:
            assert row["samples"] >= 1
            assert min(row["median"], row["peer_median"], row["ratio"]) > 0
    for what, figure, sense, limit in GOALS.get(group, []):
        judged = [row for row in made["rows"] if row["what"].startswith(what) and row["goal"]]
        assert judged, what
        for row in judged:
            assert row["goal"] == {"figure": figure, "sense": sense, "limit": limit}
            assert row["met"] is (row[figure] >= limit if sense == "at least" else row[figure] <= limit)


@pytest.mark.parametrize("group", ["swap"])
@pytest.mark.slow
def test_the_table_has_a_line_for_each_row(measured: Measure, group: str) -> None:
    printed, made = measured(group)
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len([line for line in lines if not line.startswith("| what")]) == len(made["rows"])


@pytest.mark.slow
def test_exports(tmp_path: Path) -> None:
    done = bench("export", "--rounds", "2", "--billions", "0.01", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    goals = {(row["what"], row["peer"]): row["goal"] for row in rows}
    start = "Llama, 0.0065 billion, 2 layers: class to artifact"
    assert goals[f"{start}, time", "torch.export.export"] == {"figure": "ratio", "sense": "at most", "limit": 1.5}
    for what in ("peak memory", "written"):
        assert goals[f"{start}, {what}", "torch.export.export and save"] is None
    families = [
        what for what, peer in goals if what.endswith("model to artifact, time") and peer == "torch.export.export"
    ]
    assert len(families) == 7


@pytest.mark.slow
def test_fleet(tmp_path: Path) -> None:
    """With two replicas, as more take minutes to begin."""
    program = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import groups.fleet as fleet
fleet.NODES, fleet.REPLICAS, fleet.SWAPS = 2, 2, 2
{MAIN}"""
    command = [sys.executable, "-W", "ignore", "-c", program, "fleet", "--rounds", "1", "--out", str(tmp_path)]
    with ray_turn():
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    goals = {row["what"]: row["goal"]["limit"] for row in rows if row["goal"] and row["goal"]["figure"] == "p99"}
    assert goals == {"fleet.swap, 2 replicas on 2 nodes": 500, "fleet.swap, from the first commit to the last": 50}
    peers = [row for row in rows if row["peer"]]
    assert len({row["peer"] for row in peers}) == 4
    for row in peers:
        assert min(row["median"], row["peer_median"], row["ratio"]) > 0


def test_the_model_of_a_fleet() -> None:
    """Against what can be said without simulating: one machine, a network that takes no time, and a chain."""
    program = """
from fleet_model import Rates, commit_skew, from_bucket, through_tree
alone = Rates(network=3, reader=2, bucket=100, staging=8, relay=8)
assert from_bucket(1, 100, alone) == through_tree(1, 100, alone, chunks=1000) == 50
assert from_bucket(1000, 100, alone) == 1000
at_once = Rates(network=1e9, reader=2, bucket=100, staging=1e9, relay=1e9)
assert abs(through_tree(1000, 100, at_once, chunks=100) - 50) < 1e-3
even = Rates(network=2, reader=2, bucket=2, staging=9, relay=9)
for nodes in (1, 2, 10):
    chunks = 50 + nodes - 1
    assert abs(through_tree(nodes, 100, even, fanout=1, chunks=50) - chunks * 1.0) < 1e-9
assert abs(through_tree(3, 100, even, fanout=2, chunks=50) - (1 + 100)) < 1e-9  # two children share the network
slow = even._replace(relay=1)
assert abs(through_tree(2, 100, slow, chunks=50) - (1 + 100)) < 1e-9
assert commit_skew(1, 5.0) == 0
"""
    done = python(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_verify(tmp_path: Path) -> None:
    done = bench("verify", "--size-mb", "4", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["what"] == "weightswap verify, 12-layer encoder, 2 MB, 3 engines"
    assert row["goal"] == {"figure": "median", "sense": "at most", "limit": 60}


@pytest.mark.slow
def test_all_engines(tmp_path: Path) -> None:
    done = bench("engines", "--size-mb", "4", "--rounds", "2", "--billions", "0.01", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    goals = {(row["what"], row["peer"]): row["goal"]["limit"] for row in rows if row["goal"]}
    assert goals["model(x), engine aoti, 12 layers, 32 tokens", "AOTInductor, weights inside"] == 1.03
    assert goals["model(x), engine onnx, 12 layers, 64 tokens", "ONNX Runtime, weights inside"] == 1.1
    assert goals["swap 38 MB, engine onnx", "a new InferenceSession"] == 0.05
    peers = {row["peer"] for row in rows}
    assert {"torch.export.load().module()", "import torch", "ep.module()", "--engine torch"} <= peers
    assert {"AOTInductor, load_constants(load_file())", "ONNX Runtime, a new InferenceSession"} <= peers
    drawn = (tmp_path / "engines.svg").read_text()
    assert drawn.count("beside ") == len({(row["what"], row["peer"]) for row in rows if row["ratio"] is not None})


def test_an_unknown_group_is_refused_by_name() -> None:
    done = bench("swop")
    assert done.returncode == 2
    assert "'swop' is not one of swap, update, call, export, engines, open, aoti, onnx" in done.stderr


def test_a_wrong_output_fails_the_run(tmp_path: Path) -> None:
    program = f"import torch\ntorch.equal = lambda one, other: False\n{MAIN}"
    done = python(program, "call", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "wrong output: Linear(16, 16): model: the output differs from eager's" in done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == []


def test_an_interrupted_run_has_what_it_measured(tmp_path: Path) -> None:
    program = """
import types
from report import Row
def rows(settings):
    yield Row("a call", "us", 2.0, 3)
    raise KeyboardInterrupt
sys.modules["groups.call"] = types.SimpleNamespace(rows=rows)
"""
    done = python(program + MAIN, "call", "--out", str(tmp_path))
    assert done.returncode == 130
    assert done.stderr == "call: a call: 2.00 us\ninterrupted\n"
    assert [row["what"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == ["a call"]
    assert "| a call | " in done.stdout


@pytest.mark.slow
def test_plots_are_drawn_again_from_the_report(tmp_path: Path) -> None:
    row = {"group": "cuda", "what": "swap", "unit": "ms", "median": 2.0, "samples": 3, "p99": None, "met": True}
    row |= {"peer": "load_state_dict", "peer_median": 8.0, "ratio": 0.25}
    row["goal"] = "ratio", "at most", 0.5
    alone = row | {"what": "commit", "peer": None, "peer_median": None, "ratio": None, "goal": None}
    (tmp_path / "bench.json").write_text(json.dumps({"machine": {}, "settings": {}, "rows": [row, alone]}))
    done = python("import runpy\nrunpy.run_module('plot', run_name='__main__')", str(tmp_path))
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "cuda.svg").read_text()
    assert drawn.count("beside load_state_dict") == 1
    assert "0.25" in drawn


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ("import os; os.environ['CXX'] = 'no-such-compiler'", "a C++ compiler"),
        (
            "import torch.utils.cpp_extension as found; found.CUDA_HOME = None",
            "the CUDA toolkit, with its folder in CUDA_HOME",
        ),
        (
            "sys.modules['torch.utils.cpp_extension'] = None",
            "a module that torch imports (import of torch.utils.cpp_extension halted; None in sys.modules)",
        ),
    ],
)
def test_a_comparison_that_compiles_says_what_it_lacks(
    change: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare GPU servers have neither g++ nor the toolkit."""
    monkeypatch.setenv("CXX", sys.executable)
    done = python(f"{change}\nimport torch\ntorch.cuda.is_available = lambda: True\n{MAIN}", "constants")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(lacks), done.stderr


@pytest.mark.parametrize("group", ["cuda", "constants"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so(group: str, tmp_path: Path) -> None:
    done = bench(group, "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == f"scripts/bench {group} needs a GPU, but torch finds none here"


def test_what_there_is_no_room_for_is_a_goal_that_is_not_met() -> None:
    program = """
import json, torch
from groups.cuda import _larger_parts
from report import document, line, table
torch.accelerator.get_memory_info = lambda: (0, 0)
[part] = _larger_parts(16_000_000_000)
rows = list(part("cuda", 1))
table("cuda", rows)
print(line(rows[0]))
print(json.dumps(document({}, {}, {"cuda": rows})["rows"][0]["met"]))
"""
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not measured with 16.00 GB, for lack of 67.2 GB of the device's memory")
    assert done.stdout.endswith("\nfalse\n")


def test_the_document_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    """Others read it meanwhile."""
    program = f"""
import os
from main import *
progress = Progress(Path({str(tmp_path)!r}), Settings(1, 1))
first = progress.write()
os.link({str(tmp_path / "bench.json")!r}, {str(tmp_path / "kept")!r})
progress.groups["call"] = [Row("a call", "us", 2.0, 3)]
assert progress.write() != first
assert Path({str(tmp_path / "kept")!r}).read_text() == first
"""
    done = python(program)
    assert done.returncode == 0, done.stderr


TOKENS = """
import torch
from groups.generate import LENGTH, SMALL, _check_tokens, _ours, _theirs
from functools import partial
from subjects import WrongOutput
from weightswap_exporter import export_decoder, pack
from weightswap_runtime import load

size, folder = SMALL._replace(dtype=torch.bfloat16), sys.argv[1]
eager, prompt = size.model(), torch.arange(16)[None]
artifact = export_decoder(eager, out=f"{folder}/a.artifact", length=LENGTH)
model = load(artifact, pack(eager, artifact, out=f"{folder}/v.safetensors").path)
_check_tokens(size, eager, prompt, {"torch": partial(_ours, model, prompt)})
try:
    _check_tokens(size, eager, prompt, {"torch": lambda: [*_ours(model, prompt)[:-1], 0]})
except WrongOutput as error:
    print(error)
"""


@pytest.mark.slow
def test_tokens_in_bfloat16_are_compared(tmp_path: Path) -> None:
    done = python(TOKENS, str(tmp_path))
    assert "width 128, bfloat16: tokens differ from transformers'" in done.stdout, done.stderr
