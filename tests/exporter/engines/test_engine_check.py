"""Trial of compiled files before they become part of an artifact, with planted faults and faults of torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Counter
from weightswap_exporter import MethodSpec, compile_engines, export
from weightswap_exporter.engines import aoti_rewrites, engine_check, onnx_rewrites
from weightswap_runtime import Artifact, CaptureError, load

ROWS = {0: Dim("rows", max=64)}
Function = Callable[..., Any]


class Applied(nn.Module):
    """A module that applies a function to its weight and the inputs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.weight, *inputs)


X, PLACES = torch.randn(3, 4), torch.tensor([0, 1, 1])


def compiled(function: Function, folder: Path, *inputs: torch.Tensor, **options: Any) -> Artifact:
    artifact = export(Applied(function), inputs, out=folder / "a", **options)
    return compile_engines(artifact, ["onnx"])


WRONG: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "a pooling with a divisor": (lambda w, x: nn.functional.avg_pool2d((x @ w)[None], 2, divisor_override=1), (X,)),
    "strides of something that is not in order": (lambda w, x: (x @ w).t().as_strided((3, 4), (4, 1)) * 2, (X,)),
}
OFF = "forward: output: off by"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_translations_are_refused(name: str, tmp_path: Path) -> None:
    function, inputs = WRONG[name]
    with pytest.raises(CaptureError, match=OFF) as refused:
        compiled(function, tmp_path, *inputs)
    assert "trial=False" not in str(refused.value)  # it would serve these outputs
    artifact = Artifact.open(tmp_path / "a")
    assert not any(file.startswith("engines/") for file in artifact.manifest.files)
    assert "engines/onnx/forward.onnx" in compile_engines(artifact, ["onnx"], trial=False).manifest.files


@pytest.mark.slow
def test_sizes_for_which_machine_code_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor keeps a dynamic dimension that `squeeze` removes where it is 1, and its least of bytes is 0 if they
    fill a vector (pytorch#191499), which is here left as it is.
    """
    monkeypatch.setattr(aoti_rewrites, "_EXTREMES", ())
    eager = Applied(lambda w, x, signed, plain: ((x @ w)[:, :1].squeeze(), signed.amin(0), plain.amin(0)))
    bytes_ = torch.arange(1, 19)
    artifact = export(
        eager,
        (X, bytes_.to(torch.int8), bytes_.to(torch.uint8)),
        out=tmp_path / "a",
        dynamic_shapes=(({0: Dim("n")}, {0: Dim("k", min=1)}, {0: Dim("m", min=1)}),),
    )
    made = compile_engines(artifact, ["aoti"], trial=False)
    found = " ".join(engine_check.differences(made, "aoti"))
    assert re.search(r"'n': 1.* 0: F32\[1\], expected F32\[\]", found)
    for output in "12":
        assert re.search(rf": 64.* positive values: {output}: other integers", found)


@pytest.mark.slow
def test_a_trial_starts_an_interpreter_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have it forked from one that is warm: see tests/support/quick.py."""
    monkeypatch.setattr(engine_check, "sys", sys)
    test_wrong_translations_are_refused("a pooling with a divisor", tmp_path)


def test_an_export_that_asks_for_the_engine_is_refused_whole(tmp_path: Path) -> None:
    function, inputs = WRONG["a pooling with a divisor"]
    with pytest.raises(CaptureError, match=OFF):
        export(Applied(function), inputs, out=tmp_path / "a", engines=["onnx"])
    assert list(tmp_path.iterdir()) == []


def test_a_translation_that_ends_the_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_rewrites, "_is_mean_bag", lambda _: False)
    bag = nn.EmbeddingBag(8, 4, mode="mean")
    artifact = export(bag, (torch.tensor([[1, 2], [3, 4]]),), out=tmp_path / "a")
    with pytest.raises(CaptureError, match=r"crashes the process that runs it|differs from the graph"):
        compile_engines(artifact, ["onnx"])


FINE: dict[str, tuple[Function, tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "random numbers": (lambda w, x: (x + torch.rand_like(x)) @ w, (X,), {}),
    "inputs that the model cannot take": (lambda w, i: w[i + 100], (PLACES,), {}),
    "sizes rounded up": (
        lambda w, x: (x @ w, -(-x.shape[0] // 2), -x.shape[0] % 4),
        (X,),
        {"dynamic_shapes": {"inputs": (ROWS,)}},
    ),
    "half precision": (lambda w, x: (x.half().sum(), x.half().cumsum(0), x @ w), (X,), {}),
    "integers and truth": (lambda w, x, i: ((x @ w) > 0, i.sum(), x.argmax()), (X, PLACES), {}),
    "nothing": (lambda w, x: x[:0] @ w, (X,), {}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FINE)
def test_right_translations_are_accepted(name: str, tmp_path: Path) -> None:
    function, inputs, options = FINE[name]
    artifact = compiled(function, tmp_path, *inputs, **options)
    assert load(artifact, engine="onnx").engine == "onnx"


@pytest.mark.slow
def test_state_is_compared_from_the_beginning(tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("forward", (torch.ones(2, 3),)), "peek": MethodSpec("peek")}
    artifact = export(Counter(), methods=methods, out=tmp_path / "a", engines=["onnx"])
    assert list(engine_check.differences(artifact, "onnx")) == []


class Remembers(nn.Module):
    """A module that answers first, and then writes to its state, or to its input, what only later calls read."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.seen @ self.weight + x
        self.write(self.seen, x)
        return y


def _pooled(seen: torch.Tensor, x: torch.Tensor) -> None:
    seen.copy_(nn.functional.avg_pool2d((x + seen)[None], 3, 1, 1, divisor_override=2)[0])


def test_what_a_call_leaves_in_the_state_is_compared(tmp_path: Path) -> None:
    artifact = export(Remembers(_pooled), (X,), out=tmp_path / "a")
    with pytest.raises(CaptureError, match=r"forward: seen after the call: off by"):
        compile_engines(artifact, ["onnx"])


@pytest.mark.slow
def test_what_a_call_leaves_in_its_inputs_is_compared(tmp_path: Path) -> None:
    """AOTInductor adds rows to others that it has already written (pytorch#198033)."""
    artifact = export(Remembers(lambda seen, x: torch._foreach_add_([x], [x.flip(0)])), (X,), out=tmp_path / "a")
    with pytest.raises(CaptureError, match=r"forward: x after the call: off by"):
        compile_engines(artifact, ["aoti"])


def test_a_planted_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    from weightswap_exporter.engines import onnx as onnx_graphs

    original = onnx_graphs.onnx_graph

    def with_fault(artifact: Artifact, name: str) -> bytes:
        model = onnx.load_from_string(original(artifact, name))
        for node in model.graph.node:
            if node.op_type == "Add":
                node.op_type = "Sub"
        return model.SerializeToString()

    monkeypatch.setattr(onnx_graphs, "onnx_graph", with_fault)
    with pytest.raises(CaptureError, match=r"forward with \{'.*': 2\}: output: off by"):
        compiled(lambda w, x: x @ w + w[0], tmp_path, X, dynamic_shapes={"inputs": (ROWS,)})


def test_an_artifact_too_large_to_try_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "MOST_BYTES", 0)
    with pytest.warns(UserWarning, match=r"engine 'onnx' could not be tried: its weights take more than") as caught:
        compiled(lambda w, x: x @ w, tmp_path, X)
    assert {warning.filename for warning in caught} == {__file__}


def test_operators_of_packages_are_missing_in_another_process(tmp_path: Path) -> None:
    library = torch.library.Library("weightswap_trial", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    with pytest.warns(UserWarning, match=r"could not be tried: .*torch\.ops\.weightswap_trial\.twice"):
        compiled(lambda w, x: torch.ops.weightswap_trial.twice(x) @ w, tmp_path, X)
