"""`compare()`: its cases, engines and references, and invalid comparisons."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from tests.exporter.parity.models import IDS, SHAPES, tied
from tests.support.accelerators import on_every_device
from tests.support.models import Counter, Does, Everything, Nested
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_exporter.parity import Run, compare, first_divergence
from weightswap_runtime import Artifact, ParityError, Unsupported, WeightFileError, WeightswapError


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(tied(), (IDS,), out=tmp_path_factory.mktemp("compare") / "a", dynamic_shapes=SHAPES, engines=["onnx"])


@pytest.mark.slow
def test_generated_calls_reach_the_ends_of_the_ranges(artifact: Artifact) -> None:
    report = compare(tied(), artifact)
    assert report.same
    exact, onnx = report.engines
    assert (exact.engine, onnx.engine) == ("torch", "onnx")
    sizes = [(2, 3), (1, 1), (32, 1), (1, 64), (0, 1), (1, 0)]
    signs = [f"random with {sign} values and batch=2, length=3" for sign in ("positive", "negative")]
    names = [f"random with batch={batch}, length={length}" for batch, length in sizes] + signs
    assert [case.case for case in exact.cases] == names
    assert {output.name for case in exact.cases for output in case.outputs} == {"left", "right"}
    measures = [output.measure for case in onnx.cases for output in case.outputs]
    assert any(measure and 0 < measure.max_abs < 1e-5 for measure in measures)  # onnx does compute it by itself
    assert [line.partition(": InputMismatch")[0] for line in report.text.splitlines()[1:]] == [
        "torch: equal bit for bit, 8 calls",
        "onnx: equal within the tolerances of the dtypes, 8 calls",
        *(f"onnx refuses this call: forward, {name}" for name in names[4:6]),
    ]


@pytest.mark.slow
def test_the_seed_decides_the_inputs(artifact: Artifact) -> None:
    def sizes(seed: int) -> list[Any]:
        report = compare(tied(), artifact, cases="generated", engines=["onnx"], seed=seed)
        return [output.measure for case in report.engines[0].cases for output in case.outputs]

    assert sizes(1) == sizes(1) != sizes(2)


def test_calls_are_given_in_the_form_of_goldens(artifact: Artifact) -> None:
    report = compare(tied(), artifact, cases=[(IDS,), ((), {"ids": IDS[:1]})], engines=["torch"])
    assert [(case.case, case.origin) for case in report.engines[0].cases] == [("case 0", "given"), ("case 1", "given")]
    assert report.same


def test_recorded_inputs_are_used_whatever_they_were_recorded_for(tmp_path: Path) -> None:
    made = export(tied(1), (IDS,), out=tmp_path / "a", goldens=[(IDS,)])
    weights = pack(tied(), made, out=tmp_path / "v.safetensors", goldens=[(IDS.flip(0),)]).path
    report = compare(tied(), made, weights, cases="goldens")
    assert [case.case for case in report.engines[0].cases] == ["golden 0", "golden 0 of the artifact"]
    assert [case.origin for case in compare(tied(), made).engines[0].cases] == ["golden", *["generated"] * 3]
    assert report.same


def test_without_a_model_the_reference_is_the_engine_torch(artifact: Artifact, tmp_path: Path) -> None:
    weights = pack(tied(), artifact, out=tmp_path / "v.safetensors").path
    report = compare(None, artifact, weights)
    assert (report.reference, [engine.engine for engine in report.engines]) == ("torch", ["onnx"])
    assert report.same


def test_methods_state_literals_and_nested_inputs(tmp_path: Path) -> None:
    x = torch.randn(2, 1, 8, 8)
    methods = {"forward": MethodSpec("forward", (x,)), "codes": MethodSpec("encode", (IDS % 6,))}
    made = export(Everything().eval(), out=tmp_path / "methods", methods=methods)
    torch.manual_seed(0)
    model = Everything().eval()
    report = compare(model, made, functions={"codes": "encode"})
    assert {case.method for case in report.engines[0].cases} == {"forward", "codes"}
    assert report.same, report.text
    counter = Counter().eval()
    counted = export(counter, (torch.ones(2, 3),), out=tmp_path / "state")
    assert compare(counter, counted, cases=[(torch.ones(2, 3),)] * 3).same
    assert counter.steps == 0
    nested = Nested().eval()
    parts = [torch.randn(4), {"deep": torch.randn(4)}]
    call = ((torch.randn(2, 4), parts, torch.randn(2, 4)), {"options": {"gain": 2.0}, "flag": True})
    made = export(nested, *call, out=tmp_path / "nested")
    report = compare(nested, made, cases=[call])
    assert report.same, report.text
    assert [output.name for output in report.engines[0].cases[0].outputs][:2] == ["0.0", "0.1"]


def test_a_report_is_one_json_document(artifact: Artifact) -> None:
    report = compare(tied(), artifact, engines=["torch"])
    document = msgspec.json.decode(msgspec.json.encode(report))
    assert document["engines"][0]["cases"][0]["outputs"][0]["measure"]["max_ulp"] == 0


def test_weights_without_a_stamp_are_loaded_by_their_keys(artifact: Artifact, tmp_path: Path) -> None:
    save_model(tied(), str(tmp_path / "model.safetensors"))
    assert compare(tied(), artifact, tmp_path / "model.safetensors").same


def test_an_error_of_an_engine_is_a_difference(tmp_path: Path) -> None:
    def shifted(shift: int) -> nn.Module:
        """Return a model that looks up rows at an offset."""
        buffer = nn.Buffer(torch.tensor(shift), persistent=False)
        return Does(lambda m, ids: m.table(ids + m.shift), table=nn.Embedding(10, 2), shift=buffer)

    made = export(shifted(100), (IDS % 3,), out=tmp_path / "a")
    report = compare(shifted(0), made, cases=[(IDS % 3,)])
    assert not report.same
    assert report.engines[0].cases[0].error.startswith("IndexError: ")
    assert "forward, case 0: raised IndexError" in report.text
    says = "the graph raises in table (Embedding), node embedding, aten.embedding.default: IndexError: "
    assert report.engines[0].note.startswith(says)


@on_every_device
def test_a_model_is_compared_on_a_device_with_a_copy_of_it(device: str, artifact: Artifact) -> None:
    model = tied()
    report = compare(model, artifact, cases=[(IDS,)], engines=["torch"], devices=["cpu", device])
    assert report.same, report.text
    assert [engine.device for engine in report.engines] == ["cpu", device]
    assert model.left.weight.device.type == "cpu"


def random() -> nn.Module:
    return Does(lambda m, x: m.linear(x) + torch.rand(3), linear=nn.Linear(3, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train()


@pytest.mark.parametrize("build", [random, dropping])
def test_a_model_that_is_not_deterministic_is_no_mismatch(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    made = export(build().eval(), (torch.randn(2, 3),), out=tmp_path / "a")
    with pytest.raises(ParityError, match=r"not deterministic: two runs of the eager model differ") as caught:
        compare(model, made)
    assert "call model.eval()" in str(caught.value)
    assert caught.value.problems[0].startswith("forward, random, output is not deterministic")


def test_a_graph_that_is_not_deterministic(tmp_path: Path) -> None:
    made = export(random(), (torch.randn(2, 3),), out=tmp_path / "a")
    with pytest.raises(ParityError, match=r"two runs of the engine torch with random\.safetensors differ"):
        compare(None, made, pack(random(), made, out=tmp_path / "random.safetensors").path, engines=["onnx"])


def test_a_model_whose_calls_write_to_a_weight(tmp_path: Path) -> None:
    """The second call writes the same as the first."""

    def clamping(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.weight.data = model.weight.detach().clamp(-0.1, 0.1)
        return x * model.weight

    plain = Does(lambda m, x: x * m.weight, weight=nn.Parameter(torch.randn(3)))
    made = export(plain, (torch.randn(3),), out=tmp_path / "a")
    weights = pack(plain, made, out=tmp_path / "v.safetensors").path
    with pytest.raises(ParityError, match=r"a call of the model changed weight, which is not state"):
        compare(Does(clamping, weight=nn.Parameter(torch.randn(3))), made, weights)
    with pytest.raises(ParityError, match=r"Build the model again: its parameters keep what was written to them"):
        first_divergence(made, Does(clamping, weight=nn.Parameter(torch.randn(3))), weights)


def picky(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Accept ones alone, by a check in Python, which no graph has."""
    if not torch.compiler.is_exporting() and (x != 1).any():
        raise ValueError("another number")
    return x.sqrt() * model.weight


def test_generated_inputs_that_the_model_refuses_are_left_out(tmp_path: Path) -> None:
    model = Does(picky, weight=nn.Parameter(torch.ones(3)))
    made = export(model, (torch.ones(3),), out=tmp_path / "a", goldens=[(torch.ones(3),)])
    report = compare(model, made)
    assert [case.case for case in report.engines[0].cases] == ["golden 0 of the artifact"]
    says = r"forward, random: the eager model raised \w+ \(test_compare.py, line \d+\): ValueError: another number"
    assert re.fullmatch(says, report.skipped[0])
    assert "left out: forward, random" in report.text
    with pytest.raises(ParityError, match="give cases="):
        compare(model, made, cases="generated")


def hollow() -> nn.Module:
    with skeleton():
        return tied()


def one_sided() -> nn.Module:
    model = tied()
    forward = model.forward
    model.forward = lambda ids: {"left": forward(ids)["left"]}  # type: ignore[method-assign]
    return model


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cases": [(IDS.float(),)]}, "case 0, forward: ids: expected dtype I64, got F32"),
    ({"cases": [(IDS.expand(3, 2, 5),)]}, "case 0, forward: ids: expected 2 dimensions [batch, length], got [3, 2, 5]"),
    ({"cases": []}, "no calls to record"),
    ({"cases": {"encode": [(IDS,)]}}, "no method 'encode'; the methods are forward"),
    ({"cases": "recorded"}, "unknown cases='recorded'"),
    ({"cases": "goldens"}, "there are no goldens for these weights"),
    ({"cases": [(IDS + 50,)]}, "case 0: the eager model raised"),
    ({"model": None}, "there are no weights"),
    ({"model": nn.Linear(2, 2)}, "the model has no such tensor"),
    ({"model": tied().double()}, "the artifact has F32[16, 8] on the CPU, the model has F64[16, 8] on cpu"),
    ({"model": hollow()}, "build the model outside skeleton"),
    ({"model": one_sided()}, "the graph gives left, right, the model left"),
    ({"devices": ()}, "devices is empty"),
    ({"tolerance": (float("inf"), 0.0)}, "finite and not negative"),
    ({"tolerance": 1e-3}, "expected (rtol, atol), finite and not negative, got 0.001"),
    ({"tolerance": ("a", "b")}, "finite and not negative, got ('a', 'b')"),
    ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
    ({"seed": 1.5}, "seed: expected an integer >= 0, got 1.5"),
    ({"engines": "torch"}, "engines: expected a list of names, got 'torch'"),
    ({"devices": "cpu"}, "devices: expected a list of names, got 'cpu'"),
]


@pytest.mark.parametrize(("changed", "says"), BAD, ids=[says for _, says in BAD])
def test_invalid_comparisons_are_refused(changed: dict[str, Any], says: str, artifact: Artifact) -> None:
    arguments: dict[str, Any] = {"model": tied(), "artifact": artifact} | changed
    with pytest.raises(ParityError) as caught:
        compare(**arguments)
    assert says in str(caught.value)


def test_goldens_of_another_graph_and_damaged_ones(artifact: Artifact, tmp_path: Path) -> None:
    other = export(Counter(), (torch.ones(2, 3),), out=tmp_path / "other")
    pack(Counter(), other, out=tmp_path / "v.safetensors", goldens=[(torch.ones(2, 3),)])
    pack(tied(), artifact, out=tmp_path / "w.safetensors")
    beside = tmp_path / "w.goldens.safetensors"
    beside.write_bytes((tmp_path / "v.goldens.safetensors").read_bytes())
    with pytest.raises(WeightFileError):
        compare(tied(), artifact, tmp_path / "w.safetensors")
    beside.write_bytes(b"no safetensors file")
    with pytest.raises(WeightswapError, match=r"w\.goldens\.safetensors"):
        compare(tied(), artifact, tmp_path / "w.safetensors")


def test_a_call_that_an_engine_refuses_is_a_mismatch_unless_it_was_generated(artifact: Artifact) -> None:
    generated = compare(tied(), artifact, engines=["onnx"])
    assert generated.same
    assert "onnx refuses this call: forward, random with batch=0, length=1: InputMismatch" in generated.text
    asked = compare(tied(), artifact, engines=["torch", "onnx"], cases=[(IDS[:0],)], locate=False)
    exact, onnx = asked.engines
    assert (exact.same, onnx.same) == (True, False)
    assert "ids: is empty, which the engine 'onnx' does not accept" in onnx.cases[0].error


def test_what_cannot_be_compared_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    weights = pack(tied(), artifact, out=tmp_path / "v.safetensors").path
    with pytest.raises(ParityError, match="nothing to compare the engine 'torch' with"):
        compare(None, artifact, weights, engines=["torch"])
    with pytest.raises(ParityError):
        first_divergence(artifact, nn.Linear(2, 2), Run(weights))
    for engine, says in (("aoti", "not compiled for the engine 'aoti'"), ("tensorrt", "engine 'tensorrt'")):
        with pytest.raises(Unsupported, match=says):
            compare(tied(), artifact, engines=[engine])
    model = Does(lambda m, x: x)
    model.encode = lambda x: x * 2
    made = export(model, out=tmp_path / "a", methods={"enc": MethodSpec("forward", (torch.ones(2, 3),))})
    with pytest.raises(ParityError, match="the model has no attribute 'enc' to call for the method 'enc'"):
        compare(model, made)


def test_nan_on_both_sides_is_reported(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    made = export(model, (torch.ones(2, 3),), out=tmp_path / "a")
    model.weight.data[0, 0] = math.nan
    report = compare(model, made)
    assert report.same
    assert report.notes[0].startswith("NaN on both sides: forward, random, output")
    assert report.text.endswith(report.notes[0])


def test_checkpoints_are_taken_wherever_weights_are(artifact: Artifact, tmp_path: Path) -> None:
    torch.save(tied().state_dict(), tmp_path / "c.pt")
    assert compare(tied(), artifact, tmp_path / "c.pt").same
    assert first_divergence(artifact, tied(), tmp_path / "c.pt") is None


def test_first_divergence_tells_dropout_from_a_difference(tmp_path: Path) -> None:
    model = dropping()
    made = export(model.eval(), (torch.randn(2, 3),), out=tmp_path / "a")
    weights = pack(model, made, out=tmp_path / "v.safetensors").path
    assert first_divergence(made, model, weights) is None
    with pytest.raises(ParityError):
        first_divergence(made, model.train(), weights)
