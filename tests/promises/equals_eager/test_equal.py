"""Exported equals eager, bit for bit, before and after swaps, in both residencies, for models of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Counter, Everything, Nested, Renamed, Views
from tests.support.setups import Setup, equal
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import Model, load


def everything(folder: Path, count: int = 10) -> Setup:
    shapes = {"x": {0: Dim("batch", max=16)}, "scale": None}
    methods = {
        "forward": MethodSpec("forward", (torch.zeros(2, 1, 5, 5), 2.0), dynamic_shapes=shapes),
        "encode": MethodSpec("encode", (torch.arange(4),), dynamic_shapes={"ids": {0: Dim("length", max=64)}}),
        "both": MethodSpec("both", (torch.zeros(2, 1, 5, 5),), dynamic_shapes={"x": {0: Dim("batch", max=16)}}),
    }
    return Setup(folder, Everything, methods, count)


@torch.no_grad()
def test_ten_swaps(tmp_path: Path, residency: str) -> None:
    setup = everything(tmp_path)
    model = load(setup.artifact, setup.files[0], residency=residency)
    for eager, file in zip(setup.models, setup.files, strict=True):
        model.swap(file)
        for batch in (0, 1, 2, 16):
            x = torch.randn(batch, 1, 5, 5)
            assert equal(model(x), eager(x))
            assert equal(model.both(x), eager.both(x))
        ids = torch.randint(0, 6, (7,))
        assert equal(model.encode(ids), eager.encode(ids))


def test_nested_inputs_and_outputs(tmp_path: Path) -> None:
    part, batch = torch.randn(4), Dim("batch", max=9)
    args = (torch.zeros(2, 4), [part, {"deep": torch.zeros(2, 4)}], part)
    kwargs = {"options": {"gain": part}, "flag": True}
    shapes = {
        "x": {0: batch},
        "parts": [None, {"deep": {0: batch}}],
        "rest": (None,),
        "options": {"gain": None},
        "flag": None,
    }
    setup = Setup(tmp_path, Nested, {"forward": MethodSpec("forward", args, kwargs, shapes)}, 2)
    model = load(setup.artifact, setup.files[1])
    for rows in (1, 5):
        args = (torch.randn(rows, 4), [torch.randn(4), {"deep": torch.randn(rows, 4)}], torch.randn(4))
        with torch.no_grad():
            expected = setup.models[1](*args, options={"gain": part})
        found = model(*args, options={"gain": part})
        assert type(found[0]) is tuple  # the class Pair is not needed by the server
        assert equal(found, expected)


def test_state_is_kept_between_calls_and_starts_again_with_each_commit(tmp_path: Path, residency: str) -> None:
    methods = {"forward": MethodSpec("forward", (torch.zeros(2, 3),)), "peek": MethodSpec("peek")}
    setup = Setup(tmp_path, Counter, methods, 2)
    model = load(setup.artifact, setup.files[0], residency=residency, keep_previous="host")
    xs = [torch.randn(2, 3) for _ in range(3)]

    def fresh(seed: int) -> nn.Module:
        eager = Counter().eval()
        eager.linear.load_state_dict(setup.models[seed].linear.state_dict())
        return eager

    context = model.new_context(on_swap="reset")

    def follows(seed: int) -> None:
        eager = fresh(seed)
        for x in xs:
            with torch.no_grad():
                assert equal(model(x, context=context), eager(x))
                assert equal(model.peek(context=context), eager.peek())

    follows(0)
    with model.stage(setup.files[1]) as staged:
        staged(xs[0])
        staged.commit()
    follows(1)
    model.rollback()
    follows(0)


def test_outputs_share_no_memory_with_weights_state_or_constants(tmp_path: Path, residency: str) -> None:
    setup = Setup(tmp_path, Views, {"forward": MethodSpec("forward", (torch.zeros(4),))}, 3)
    model = load(setup.artifact, setup.files[0], residency=residency)
    x = torch.randn(4)
    outputs = model(x)
    before = [output.clone() for output in outputs]
    for file in setup.files[1:]:
        model.swap(file)
        model(x)
    assert equal(list(outputs), before)
    assert outputs[4] is x
    for output in model(x):
        output.fill_(7)
    with torch.no_grad():
        assert equal(model(x)[:2], setup.models[2](x)[:2])
    assert equal(model(x)[2], constant(model, "table"))


class Layouts(nn.Module):
    """Model with weights in an order other than row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.register_buffer("table", torch.randn(6, 5).t(), persistent=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turned @ self.conv(x).mean((2, 3)).t() + self.table[:, :1]


def test_memory_formats_are_kept(tmp_path: Path, residency: str) -> None:
    setup = Setup(tmp_path, Layouts, {"forward": MethodSpec("forward", (torch.zeros(2, 3, 9, 9),))}, 3)
    strides = {weight.name: weight.stride for weight in setup.artifact.manifest.weights}
    assert strides == {"conv.weight": (27, 1, 9, 3), "conv.bias": None, "turned": (1, 5)}
    model = load(setup.artifact, setup.files[0], residency=residency)
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    for eager, file in zip(setup.models, setup.files, strict=True):
        model.swap(file)
        eager.table.copy_(torch.as_tensor(constant(model, "table")))
        with torch.no_grad():
            assert equal(model(x), eager(x))


def constant(model: Model, name: str) -> torch.Tensor:
    """Return the value of a constant in the artifact, by the reference reader."""
    import safetensors.torch

    return safetensors.torch.load(model.artifact.read("constants.safetensors"))[name]


def test_results_want_no_gradient_and_may_be_changed(tmp_path: Path) -> None:
    class Enabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                y = self.linear(x)
            return y, y * 2

    setup = Setup(tmp_path, Enabled, {"forward": MethodSpec("forward", (torch.zeros(2, 3),))}, 1)
    model = load(setup.artifact, setup.files[0])
    for x in (torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)):
        y, twice = model(x)
        assert not y.requires_grad
        y += twice


def test_a_cast_that_autocast_would_cache_is_made_anew(tmp_path: Path, residency: str) -> None:
    methods = {"forward": MethodSpec("forward", (torch.zeros(2, 3),))}
    setup = Setup(tmp_path, lambda: nn.Linear(3, 3), methods, 2)
    model = load(setup.artifact, setup.files[0], residency=residency)
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        model.swap(setup.files[1])
        found = model(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert equal(found, setup.models[1](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    setup = Setup(
        tmp_path, lambda: Renamed().to(dtype), {"forward": MethodSpec("forward", (torch.zeros(2, 3, dtype=dtype),))}, 2
    )
    model = load(setup.artifact, setup.files[0])
    x = torch.randn(2, 3, dtype=dtype)
    for eager, file in zip(setup.models, setup.files, strict=True):
        model.swap(file)
        with torch.no_grad():
            assert equal(model(x), eager(x))


def test_inputs_that_the_graph_changes_are_changed_as_in_eager(tmp_path: Path) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * self.weight

    setup = Setup(tmp_path, Changes, {"forward": MethodSpec("forward", (torch.zeros(3),))}, 1)
    x = torch.zeros(3)
    load(setup.artifact, setup.files[0])(x)
    assert torch.equal(x, torch.ones(3))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_forward_hook(lambda module, args, output: output * 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) - self.forward(x)


def test_hooks_of_forward_run_where_forward_is_called(tmp_path: Path) -> None:
    methods = {name: MethodSpec(name, (torch.zeros(2, 3),)) for name in ("forward", "encode")}
    setup = Setup(tmp_path, Hooked, methods, 1)
    model, x = load(setup.artifact, setup.files[0]), torch.randn(2, 3)
    with torch.no_grad():
        assert equal(model(x), setup.models[0](x))
        assert equal(model.encode(x), setup.models[0].encode(x))


class Aliased(nn.Module):
    """Model with a plain attribute that is a weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.alias = self.linear.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.alias


def test_an_attribute_that_is_a_weight_is_swapped_with_it(tmp_path: Path) -> None:
    artifact = export(Aliased().eval(), (torch.zeros(4),), out=tmp_path / "a.artifact")
    assert not artifact.manifest.constants
    models = [Aliased().eval() for _ in range(2)]
    files = [pack(model, artifact, out=tmp_path / f"v{index}.safetensors").path for index, model in enumerate(models)]
    model, x = load(artifact, files[0]), torch.randn(4)
    for eager, file in zip(models, files, strict=True):
        model.swap(file)
        with torch.no_grad():
            assert equal(model(x), eager(x))


def test_a_model_loaded_in_inference_mode_can_be_called_outside(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Counter, {"forward": MethodSpec("forward", (torch.zeros(2, 3),))}, 2)
    with torch.inference_mode():
        model = load(setup.artifact, setup.files[0])
    model(torch.zeros(2, 3))
    model.swap(setup.files[1])


def test_a_rollback_to_weights_that_a_pin_holds_need_not_wait(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Counter, {"forward": MethodSpec("forward", (torch.zeros(2, 3),))}, 2)
    model = load(setup.artifact, setup.files[0])
    x = torch.randn(2, 3)
    with model.pin() as session:
        before = session(x)
        model.swap(setup.files[1])
        model.rollback(timeout=0)
        assert equal(session(x), before)
    assert equal(model(x), before)
