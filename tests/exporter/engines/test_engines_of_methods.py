"""Engines of each method: `MethodSpec(engines=)`, `compile_engines(methods=)`, and reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.decoding import Decoder, Files, specs
from tests.support.program import document, said
from weightswap_exporter import compile_engines, export
from weightswap_exporter.engines import compiling, engine_check
from weightswap_exporter.parity import Run, compare, first_divergence
from weightswap_runtime import Artifact, UnknownName, Unsupported
from weightswap_runtime.engines.torch_calls import GraphCall
from weightswap_tools.bench import BenchRequest, EngineBench, bench
from weightswap_tools.commands.swap import swaps_report
from weightswap_tools.reports.blocks import Facts


@pytest.fixture
def empty_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the compilers with ones that return empty files."""
    for engine in ("aoti", "onnx"):
        file = f"engines/{engine}/{{}}".format
        monkeypatch.setitem(compiling._MAKERS, engine, lambda _, method, __, file=file: (file(f"{method}.bin"), b""))
    monkeypatch.setattr(engine_check, "try_engine", lambda *_: None)


def compiled(artifact: Artifact) -> list[str]:
    return [name.removeprefix("engines/") for name in artifact.manifest.files if name.startswith("engines/")]


@pytest.mark.usefixtures("empty_compilers")
def test_a_method_has_the_engines_of_the_export_or_its_own(tmp_path: Path) -> None:
    told: list[str] = []
    methods = specs(prefill=("torch",), decode=("torch", "aoti"))
    artifact = export(Decoder(), methods=methods, out=tmp_path / "a", engines=["onnx"], on_step=told.append)
    assert compiled(artifact) == ["aoti/decode.bin", "onnx/plain.bin"]
    compiled_ones = ["decode for the engine aoti (1 of 2)", "plain for the engine onnx (2 of 2)"]
    assert told[1:] == [*(f"compiling {each}" for each in compiled_ones), "trying what was compiled"]
    more = compile_engines(artifact, ["onnx", "aoti"], methods=["prefill"])
    assert compiled(more) == ["aoti/decode.bin", "aoti/prefill.bin", "onnx/plain.bin", "onnx/prefill.bin"]
    assert more.graph_id == artifact.graph_id == export(Decoder(), methods=specs(), out=tmp_path / "b").graph_id


@pytest.mark.parametrize("engines", ["onnx", ["tensorrt"], {"onnx"}, 3])
def test_unknown_engines_are_refused(engines: Any, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"method 'decode': engines=.*expected a sequence of 'torch', 'aoti', 'onnx'"):
        export(Decoder(), methods=specs(decode=engines), out=tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("empty_compilers")
def test_methods_by_name(tmp_path: Path) -> None:
    artifact = export(Decoder(), methods=specs(), out=tmp_path / "a")
    says = "'encode' is not a method of this artifact, which has: prefill, decode, plain"
    with pytest.raises(UnknownName, match=says):
        compile_engines(artifact, ["onnx"], methods=["decode", "encode"])
    command = ("compile", artifact.path, "--engine", "onnx", "--method")
    assert said(*command, "decode") == "added  engines/onnx/decode.bin, 0 B\n"
    made = document(*command, "plain", "--method", "prefill")["files"]
    assert made == ["engines/onnx/plain.bin", "engines/onnx/prefill.bin"]
    assert says in " ".join(said(*command, "encode", status=1).split())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("onnx"), "onnx")


@pytest.mark.slow
def test_the_trial_calls_compiled_methods_alone(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(engine_check.differences(files.artifact, "onnx")) == []
    called: list[str] = []
    monkeypatch.setattr(engine_check, "_one_call", lambda name, *_: called.append(name) or ())
    list(engine_check.differences(files.artifact, "onnx"))
    assert set(called) == {"decode"}


def test_inspect_shows_the_methods_of_each_engine(files: Files) -> None:
    assert "torch, onnx (decode only)" in said("inspect", files.artifact.path)
    told = document("inspect", files.artifact.path)
    assert told["engines"] == ["torch", "onnx"]
    assert told["engine_methods"] == {"torch": ["prefill", "decode", "plain"], "onnx": ["decode"]}


def test_a_report_of_swaps_shows_the_engine_of_each_method(files: Files) -> None:
    for engine, text in (("onnx", "onnx; torch runs prefill, plain"), ("torch", "torch")):
        blocks = swaps_report(files.load(engine=engine), []).sections[0].blocks
        (facts,) = (each for each in blocks if isinstance(each, Facts))
        assert ("engine", text) in facts.rows


def test_an_engine_is_measured_on_its_own_methods(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(wanted: BenchRequest) -> EngineBench:
        return EngineBench(engine=wanted.engine, residency=wanted.residency)

    monkeypatch.setattr("weightswap_tools.bench._run", run)
    for method, engines, expected in (
        ("decode", (), ["torch", "onnx"]),
        ("plain", (), ["torch"]),
        ("plain", ("auto",), ["torch"]),
        ("decode", ("onnx",), ["onnx"]),
    ):
        found = bench(files.artifact.path, files.weights[0], method=method, engines=engines)
        assert list(dict.fromkeys(each.engine for each in found.engines)) == expected
    says = f"not compiled: weightswap compile {files.artifact.path} --engine onnx --method plain"
    assert bench(files.artifact.path, files.weights[0], method="plain").left_out["onnx"] == says
    with pytest.raises(Unsupported, match=says):
        bench(files.artifact.path, files.weights[0], method="plain", engines=["onnx"])


def test_parity_compares_all_methods_on_every_engine(files: Files) -> None:
    report = compare(files.models[0], files.artifact, cases={name: [((x,), {})] for name, x in CALLS.items()})
    assert report.same
    assert [[case.method for case in engine.cases] for engine in report.engines] == [[*CALLS]] * 2


CALLS = {"prefill": torch.ones(2, 4), "decode": torch.ones(4), "plain": torch.ones(4)}


def test_the_first_divergence_is_sought_on_the_engine_of_the_method(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: GraphCall, inputs: list[Any], state: Any = None, chosen: Any = None) -> Any:
        return [value * 2 for value in right(self, inputs, state, chosen)]

    right = GraphCall.__call__
    monkeypatch.setattr(GraphCall, "__call__", wrong)
    report = compare(files.models[0], files.artifact, cases={"plain": [((torch.ones(4),), {})]}, engines=["onnx"])
    assert not report.same
    runs = [Run(files.weights[0], name) for name in ("torch", "onnx")]
    assert first_divergence(files.artifact, *runs, cases={"plain": [((torch.ones(4),), {})]}) is None
    (engine,) = report.engines
    assert engine.divergence is not None
    assert engine.divergence.found.startswith("the engine torch with")
