"""Planted faults: each is found, at the right module and node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.parity.models import IDS, SHAPES, tied
from tests.support.models import Does
from weightswap_exporter import compile_engines, export, pack
from weightswap_exporter.parity import ParityReport, Run, compare, first_divergence
from weightswap_runtime import Artifact
from weightswap_runtime.engines import operators

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(tied(), (IDS,), out=tmp_path_factory.mktemp("parity") / "a", dynamic_shapes=SHAPES, engines=["onnx"])


Fault = Callable[[State], object]


def packed(artifact: Artifact, folder: Path, fault: Fault = lambda state: None) -> Path:
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    fault(state)
    return pack(state, artifact, out=folder / "faulty.safetensors").path


def only_divergence(report: ParityReport) -> Any:
    """Return the only divergence of all engines."""
    assert not any(engine.same for engine in report.engines), report.text
    places = {(engine.divergence.module, engine.divergence.operator) for engine in report.engines if engine.divergence}
    assert len(places) == 1, report.text
    return report.engines[0].divergence


def swap_ties(state: State) -> None:
    for kind in ("", "_head"):
        one, other = f"left{kind}.weight", f"right{kind}.weight"
        state[one], state[other] = state[other], state[one]


def changing(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda state: state.update({name: change(state[name])})


SQUARE, OUT, NORM = "blocks.1.square", "blocks.2.out", "blocks.0.norm"
transpose = changing(f"{SQUARE}.weight", lambda weight: weight.t().contiguous())
round_trip = changing(f"{OUT}.weight", lambda weight: weight.bfloat16().float())
last_bit = changing(f"{NORM}.weight", lambda weight: torch.nextafter(weight, weight + 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "module", "operator"),
    [
        (swap_ties, "left", "aten.embedding.default"),
        (transpose, SQUARE, "aten.linear.default"),
        (round_trip, OUT, "aten.linear.default"),
    ],
)
def test_wrong_weights(fault: Fault, module: str, operator: str, artifact: Artifact, tmp_path: Path) -> None:
    weights = packed(artifact, tmp_path, fault)
    report = compare(tied(), artifact, weights)
    found = only_divergence(report)
    assert (found.module, found.operator) == (module, operator)
    assert f"{module}.weight" in found.weights
    assert f"{module}.weight" in report.other_values
    assert f"first divergence: {module} (" in report.text
    clean = Run(pack(tied(), artifact, out=tmp_path / "clean.safetensors").path)
    between = first_divergence(artifact, clean, Run(weights))
    assert between is not None
    assert (between.module, between.operator, between.weights) == (module, operator, found.weights)


def test_one_bit_of_one_weight_is_found_by_the_exact_engine_alone(artifact: Artifact, tmp_path: Path) -> None:
    report = compare(tied(), artifact, packed(artifact, tmp_path, last_bit))
    torch_, onnx = report.engines
    assert onnx.same
    assert torch_.divergence is not None
    assert (torch_.divergence.module, torch_.divergence.kind) == ("blocks.0.norm", "LayerNorm")


@pytest.mark.slow
def test_a_wrong_constant(artifact: Artifact, tmp_path: Path) -> None:
    model = tied()
    model.table[3] += 0.25
    found = only_divergence(report := compare(model, artifact))
    assert (found.module, found.kind, found.operator) == ("", "Tied", "aten.mul.Tensor")
    assert "table" in found.weights
    assert report.other_values == ("table",)


def test_a_wrong_literal_in_the_graph(tmp_path: Path) -> None:
    other = tied()
    other.blocks[1].scale = 0.75
    found = only_divergence(compare(tied(), export(other, (IDS,), out=tmp_path / "a")))
    assert (found.module, found.kind, found.operator) == ("blocks.1", "Block", "aten.mul.Tensor")
    assert found.within == ("",)


def stack(wrong: set[int]) -> nn.Module:
    """Return layers, of which some round their outputs to bfloat16."""
    torch.manual_seed(0)
    acts = [lambda m, x: m.layer(x), lambda m, x: m.layer(x).bfloat16().float()]
    return nn.Sequential(*(Does(acts[place in wrong], layer=nn.Linear(6, 6)) for place in range(4))).eval()


def chain(activations: list[type[nn.Module]]) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), activation(), nn.Linear(6, 6)) for activation in activations]
    return nn.Sequential(*blocks).eval()


G, S = nn.GELU, nn.SiLU


@pytest.mark.parametrize(
    ("eager", "exported", "module", "alone"),
    [
        (stack({1}), stack(set()), "1", ("the eager model: aten::_to_copy",) * 2),
        (stack({3}), stack(set()), "3", ("the eager model: aten::_to_copy",) * 2),
        (stack(set()), stack({3}), "3", ("the graph: aten::_to_copy",) * 2),
        (chain([G, G]), chain([G, S]), "1.1", ("the eager model: aten::gelu", "the graph: aten::silu")),
        (chain([G] * 6), chain([G, S] * 3), "1.1", ("the eager model: aten::gelu", "the graph: aten::silu")),
    ],
)
def test_operators_that_only_one_side_computes(
    eager: nn.Module, exported: nn.Module, module: str, alone: tuple[str, ...], tmp_path: Path
) -> None:
    found = only_divergence(report := compare(eager, export(exported, (torch.randn(2, 6),), out=tmp_path / "a")))
    assert (found.module, found.alone) == (module, alone)
    assert f"only one side calls {', '.join(alone)}" in report.text


class Harmless(nn.Sequential):
    """The eager model alone casts zeros, which changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self[0](x) * 0
        return self[1](y if torch.compiler.is_exporting() else y.bfloat16().float())


def test_operators_of_one_side_are_not_blamed_for_a_wrong_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Harmless(nn.Linear(6, 6), nn.Linear(6, 6)).eval()
    artifact = export(model, (torch.randn(2, 6),), out=tmp_path / "a")
    weights = pack(model, artifact, out=tmp_path / "v.safetensors").path
    with torch.no_grad():
        model[1].bias += 1
    found = only_divergence(compare(model, artifact, weights))
    assert (found.module, found.weights, found.alone) == ("1", ("1.weight", "1.bias"), ())


def test_a_layer_that_is_called_twice(tmp_path: Path) -> None:
    """Under two names."""
    torch.manual_seed(0)
    one, head = nn.Linear(6, 6), nn.Linear(6, 6)
    model = Does(lambda m, x: m.head(m.other(m.one(x)).relu()), one=one, other=one, head=head).eval()
    artifact = export(model, (torch.randn(2, 6),), out=tmp_path / "a")
    weights = pack(model, artifact, out=tmp_path / "v.safetensors").path
    with torch.no_grad():
        model.head.bias += 1
    assert only_divergence(compare(model, artifact, weights)).module == "head"


def test_a_fault_in_a_view_shows_in_the_outputs(tmp_path: Path) -> None:
    """Some rows of a layer's output."""
    layer = nn.Linear(6, 6)
    parts = [Does(lambda m, x, first=first: m.layer(x)[first : first + 2], layer=layer) for first in (0, 1)]
    found = only_divergence(compare(parts[0], export(parts[1], (torch.randn(4, 6),), out=tmp_path / "a")))
    assert (found.kind, found.agreed) == ("its outputs", 1)


@pytest.fixture
def fast_gelu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make an engine use a cheaper function for GELU."""

    def fast(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    monkeypatch.setitem(operators._FASTER, torch.ops.aten.gelu.default, fast)
    operators.find_operator.cache_clear()
    yield
    operators.find_operator.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("fast_gelu")
def test_an_engine_with_fast_math(artifact: Artifact) -> None:
    torch_, onnx = compare(tied(), artifact).engines
    assert onnx.same, onnx
    assert torch_.divergence is not None
    assert (torch_.divergence.module, torch_.divergence.operator) == ("blocks.0", "aten.gelu.default")
    assert "the engine torch with" in torch_.divergence.text


def compile_fast(patch: pytest.MonkeyPatch, made: Artifact) -> None:
    """Compile with a fault in every graph."""
    from weightswap_exporter.engines import onnx as onnx_graphs

    adapt = onnx_graphs._adapt

    def fast_adapt(program: torch.export.ExportedProgram) -> None:
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.kwargs = {"approximate": "tanh"}
        adapt(program)

    patch.setattr(onnx_graphs, "_adapt", fast_adapt)
    compile_engines(made, ["onnx"], trial=False)


@pytest.mark.slow
def test_a_compiler_with_fast_math(artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is in every graph that is compiled here, with or without intermediate results."""
    made = export(tied(), (IDS,), out=tmp_path / "a", dynamic_shapes=SHAPES)
    compile_fast(monkeypatch, made)
    report = compare(tied(), tmp_path / "a", tolerance=(1e-5, 1e-6))
    torch_, onnx = report.engines
    assert torch_.same
    assert onnx.divergence is not None
    assert (onnx.divergence.module, onnx.divergence.operator) == ("blocks.0", "aten.gelu.default")


@pytest.mark.slow
def test_a_compiled_graph_that_compiling_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of the compiler, or if somebody has replaced a file and its digest."""
    made = export(tied(), (IDS,), out=tmp_path / "a", dynamic_shapes=SHAPES)
    with monkeypatch.context() as block:
        compile_fast(block, made)
    report = compare(tied(), tmp_path / "a", tolerance=(1e-5, 1e-6))
    onnx = report.engines[1]
    assert not onnx.same
    assert onnx.divergence is None
    assert "does not match its graph on this machine. Run: weightswap compile" in onnx.note


@pytest.mark.slow
def test_an_engine_that_compiles_machine_code(artifact: Artifact, tmp_path: Path) -> None:
    made = export(tied(), (IDS,), out=tmp_path / "a", dynamic_shapes=SHAPES, engines=["aoti"])
    clean = pack(tied(), made, out=tmp_path / "clean.safetensors").path
    assert compare(tied(), made, clean).same
    found = first_divergence(made, Run(clean), Run(packed(made, tmp_path, round_trip), "aoti"))
    assert found is not None
    assert (found.module, found.operator) == ("blocks.2.out", "aten.linear.default")


def test_nothing_is_found_where_nothing_is_wrong(artifact: Artifact, tmp_path: Path) -> None:
    report = compare(tied(), artifact)
    assert report.same
    assert [engine.divergence for engine in report.engines] == [None, None]
    weights = packed(artifact, tmp_path)
    assert compare(tied(), artifact, weights).other_values == ()
    for run in (Run(weights), Run(weights, "onnx")):
        assert first_divergence(artifact, tied(), run) is None
        assert first_divergence(artifact, Run(weights), run) is None


def test_the_modules_that_are_off_are_listed_in_order(artifact: Artifact, tmp_path: Path) -> None:
    found = first_divergence(artifact, tied(), Run(packed(artifact, tmp_path, transpose)))
    assert found is not None
    right = [error.module for error in found.modules if not error.scaled]
    wrong = [error.module for error in found.modules if error.scaled]
    assert wrong[0] == "blocks.1.square"
    assert {"left", "right", "blocks.0", "blocks.0.norm", "blocks.0.square", "blocks.0.out", "blocks.1.norm"} < {*right}
    assert set(wrong[1:]) >= {"blocks.1.out", "blocks.2", "left_head", "right_head"}
    assert 0 < found.agreed < found.compared
