"""`scripts/bench` on a small model: every row is there, with its peer, and the outputs are right. No time is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAIN = Path(__file__).parents[2] / "scripts" / "benchmarks" / "main.py"
GROUPS = ("swap", "update", "call", "diff")
FACTS = {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "weightswap", "date"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench")
    done = bench(*GROUPS, "--size-mb", "4", "--rounds", "1", "--billions", "0.01", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "bench.json").read_text())


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(str(MAIN), *arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_the_report_knows_the_machine_and_the_settings(report: tuple[str, dict[str, Any]]) -> None:
    _, made = report
    assert made["machine"].keys() >= FACTS
    assert made["settings"] == {"megabytes": 4, "rounds": 1, "billions": 0.01}


@pytest.mark.parametrize(
    ("what", "peer"),
    [
        ("stage", "preadv, "),
        ("stage", "preadv + BLAKE3"),
        ("stage", "preadv into fresh memory"),
        ("BLAKE3 alone", "preadv, "),
        ("commit in single residency", "one torch copy_"),
        ("commit in single residency", "memcpy, 1 thread"),
        ("swap", "load_state_dict(load_file())"),
        ("swap", "load_state_dict(torch.load(mmap=True))"),
        ("swap", "load_state_dict(torch.load())"),
        ("p99 of a call, staging", "p99 without staging"),
        ("swap of a delta, 4.", "swap of the full file"),
        ("diff of two files of 4.", "load_file, ‖B - A‖"),
        ("diff of two files of 4.", "load_file, the statistics"),
        ("model(x), ", "bare graph"),
        ("model(x), ", "eager module"),
        ("model(x), ", "ep.module()"),
        ("model(x), 12-layer encoder, normalised weights", "prologue=False"),
    ],
)
def test_each_subject_is_compared_with_its_peers(report: tuple[str, dict[str, Any]], what: str, peer: str) -> None:
    _, made = report
    found = [row for row in made["rows"] if row["what"].startswith(what) and (row["peer"] or "").startswith(peer)]
    assert found
    for row in found:
        assert row["samples"] >= 1
        assert min(row["median"], row["peer_median"], row["ratio"]) > 0


@pytest.mark.parametrize(
    ("what", "figure", "sense", "limit"),
    [
        ("stage ", "ratio", "at least", 0.8),
        ("looking for NaN while ", "ratio", "at least", 0.85),
        ("commit, the caller's time, 1.0 MB, idle", "p99", "at most", 100),
        ("commit, calls paused, 1.0 MB, 2 threads calling", "p99", "at most", 50),
        ("commit, the caller's time, 4.", "p99", "at most", 100),
        ("staged.commit()", "p99", "at most", 100),
        ("commit in single residency", "ratio", "at most", 1.3),
        ("p99 of a call, staging", "ratio", "at most", 1.25),
        ("cancel of a staging", "p99", "at most", 50),
        ("swap of a delta, 4.", "ratio", "at most", 0.05),
        ("model(x) minus bare graph", "median", "at most", 20),
    ],
)
def test_goals_are_judged(report: tuple[str, dict[str, Any]], what: str, figure: str, sense: str, limit: float) -> None:
    _, made = report
    judged = [row for row in made["rows"] if row["what"].startswith(what) and row["goal"]]
    assert judged
    for row in judged:
        assert row["goal"] == {"figure": figure, "sense": sense, "limit": limit}
        assert row["met"] is (row[figure] >= limit if sense == "at least" else row[figure] <= limit)


def test_the_table_has_a_line_for_each_row(report: tuple[str, dict[str, Any]]) -> None:
    printed, made = report
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
    assert "'swop' is none of swap, update, call, export, engines, open, aoti, onnx" in done.stderr


def test_a_wrong_output_fails_the_run(tmp_path: Path) -> None:
    program = """
import sys, torch
sys.path.insert(0, sys.argv.pop(1))
torch.equal = lambda one, other: False
import main
sys.exit(main.main())
"""
    done = python("-c", program, str(MAIN.parent), "call", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "wrong output: Linear(16, 16): model: the output differs from eager's" in done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == []


def test_an_interrupted_run_has_what_it_measured(tmp_path: Path) -> None:
    program = """
import sys, types
sys.path.insert(0, sys.argv.pop(1))
import main
from report import Row
def rows(settings):
    yield Row("a call", "us", 2.0, 3)
    raise KeyboardInterrupt
sys.modules["groups.call"] = types.SimpleNamespace(rows=rows)
sys.exit(main.main())
"""
    done = python("-c", program, str(MAIN.parent), "call", "--out", str(tmp_path))
    assert done.returncode == 130
    assert done.stderr == "call: a call: 2.00 us\ninterrupted\n"
    assert [row["what"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == ["a call"]
    assert "| a call | " in done.stdout


def test_plots_are_drawn_again_from_the_report(tmp_path: Path) -> None:
    row = {"group": "cuda", "what": "swap", "unit": "ms", "median": 2.0, "samples": 3, "p99": None, "met": True}
    row |= {"peer": "load_state_dict", "peer_median": 8.0, "ratio": 0.25}
    row["goal"] = {"figure": "ratio", "sense": "at most", "limit": 0.5}
    alone = row | {"what": "commit", "peer": None, "peer_median": None, "ratio": None, "goal": None}
    (tmp_path / "bench.json").write_text(json.dumps({"machine": {}, "settings": {}, "rows": [row, alone]}))
    done = python(str(MAIN.with_name("plot.py")), str(tmp_path))
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "cuda.svg").read_text()
    assert drawn.count("beside load_state_dict") == 1
    assert "0.25" in drawn
