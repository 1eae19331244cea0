"""Exported equals eager, bit for bit, before and after swaps, in both residencies, for models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.models import Counter, Everything, Nested, Renamed, Views
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_runtime import Artifact, InputMismatch, LeaseTimeout, Model, load


def different(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with weights, statistics included, that no other seed gives."""
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1)
    return model


class Setup:
    """An artifact exported from a skeleton, ten sets of weights, and the eager models that they came from."""

    def __init__(
        self, folder: Path, build: Callable[[], nn.Module], methods: dict[str, MethodSpec], count: int = 10
    ) -> None:
        with skeleton():
            hollow = build().eval()
        self.artifact: Artifact = export(hollow, methods=methods, out=folder / "model.artifact")
        self.models = [different(build, seed) for seed in range(count)]
        self.files = [folder / f"v{seed}.safetensors" for seed in range(count)]
        for model, file in zip(self.models, self.files, strict=True):
            pack(model.state_dict(), self.artifact, out=file)


def everything(folder: Path, count: int = 10) -> Setup:
    shapes = {"x": {0: Dim("batch", max=16)}, "scale": None}
    methods = {
        "forward": MethodSpec("forward", (torch.zeros(2, 1, 5, 5), 2.0), dynamic_shapes=shapes),
        "encode": MethodSpec("encode", (torch.arange(4),), dynamic_shapes={"ids": {0: Dim("length", max=64)}}),
        "both": MethodSpec("both", (torch.zeros(2, 1, 5, 5),), dynamic_shapes={"x": {0: Dim("batch", max=16)}}),
    }
    return Setup(folder, Everything, methods, count)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) and type(one) is type(other)


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


@torch.no_grad()
def test_cold_b_equals_warm_a_to_b(tmp_path: Path, residency: str) -> None:
    setup = everything(tmp_path, count=3)
    x = torch.randn(3, 1, 5, 5)
    for b, file in enumerate(setup.files):
        cold = load(setup.artifact, file, residency=residency)
        for a in range(3):
            warm = load(setup.artifact, setup.files[a], residency=residency, keep_previous="host")
            warm.swap(file)
            assert equal(warm(x), cold(x))
            assert warm.weights_id == cold.weights_id
            warm.rollback()
            assert equal(warm(x), setup.models[a](x))
            warm.rollback()
            assert equal(warm(x), setup.models[b](x))


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
        assert type(found[0]) is tuple  # the server has no Pair
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

    def follows(seed: int) -> None:
        eager = fresh(seed)
        for x in xs:
            with torch.no_grad():
                assert equal(model(x), eager(x))
                assert equal(model.peek(), eager.peek())

    follows(0)
    with model.stage(setup.files[1]) as staged:
        staged(xs[0])  # a trial must not leave its traces in what is committed
        staged.commit()
    follows(1)
    model.rollback()
    follows(0)


def test_outputs_share_no_memory_with_weights_state_or_constants(tmp_path: Path, residency: str) -> None:
    setup = Setup(tmp_path, Views, {"forward": MethodSpec("forward", (torch.zeros(4),))}, 3)
    model = load(setup.artifact, setup.files[0], residency=residency)
    x = torch.randn(4)
    kept = model(x)
    before = [output.clone() for output in kept]
    for file in setup.files[1:]:
        model.swap(file)
        model(x)
    assert equal(list(kept), before)
    assert kept[4] is x
    for output in model(x):
        output.fill_(7)
    with torch.no_grad():
        assert equal(model(x)[:2], setup.models[2](x)[:2])
    assert equal(model(x)[2], constant(model, "table"))


class Layouts(nn.Module):
    """Weights that are kept in another order than row-major."""

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
    """The value of a constant in the artifact, by the reference reader."""
    import safetensors.torch

    return safetensors.torch.load(model.artifact.read("constants.safetensors"))[name]


class Turned(nn.Module):
    """Linear on a transposed input: matmul chooses its algorithm by whether the weight requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(0, 1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear on a transposed input": Turned,
    "frozen linear": lambda: Turned().requires_grad_(False),
    "GRU": lambda: nn.GRU(16, 24, batch_first=True),
    "RNN": lambda: nn.RNN(16, 24, batch_first=True),
    "LSTM": lambda: nn.LSTM(16, 24, batch_first=True, num_layers=2, bidirectional=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "attention": Attention,
    "group norm": lambda: nn.Sequential(nn.Conv1d(7, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.ConvTranspose1d(8, 4, 3)),
    "bilinear": lambda: nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.SiLU(), nn.Softmax(-1)),
}


@pytest.fixture
def _ordinary_attention() -> Any:
    """Eager's fused path for inference is not what torch.export captures."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.usefixtures("_ordinary_attention")
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_layers(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    shapes = ({0: Dim("batch", max=8)},)
    setup = Setup(tmp_path, build, {"forward": MethodSpec("forward", (torch.zeros(3, 7, 16),), {}, shapes)}, 2)
    model = load(setup.artifact, setup.files[0])
    for eager, file in zip(setup.models, setup.files, strict=True):
        model.swap(file)
        for batch in (2, 3, 4):
            x = torch.randn(batch, 7, 16)
            with torch.no_grad():
                assert equal(model(x), eager(x))


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


class Compared(nn.Module):
    """Branches on a relation between two dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = self.linear(x).sum()
        return total + y.sum() if x.shape[0] > y.shape[0] else total * y.sum()


def test_relations_that_the_capture_relied_on_are_checked(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("rows", max=100)}, "y": {0: Dim("others", max=100)}}
    spec = MethodSpec("forward", (torch.zeros(4, 3), torch.zeros(5, 3)), {}, shapes)
    setup = Setup(tmp_path, Compared, {"forward": spec}, 1)
    assert setup.artifact.manifest.methods["forward"].signature.conditions == ("rows <= others",)
    model = load(setup.artifact, setup.files[0])
    for rows in (3, 5):
        x, y = torch.randn(rows, 3), torch.randn(5, 3)
        with torch.no_grad():
            assert equal(model(x, y), setup.models[0](x, y))
    with pytest.raises(InputMismatch, match="captured for rows <= others, got others=4, rows=6"):
        model(torch.zeros(6, 3), torch.zeros(4, 3))


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 2, 2, 3)


def test_relations_of_one_size(tmp_path: Path) -> None:
    setup = Setup(
        tmp_path, Halved, {"forward": MethodSpec("forward", (torch.zeros(8, 3),), {}, {"x": {0: Dim.AUTO}})}, 1
    )
    model = load(setup.artifact, setup.files[0])
    assert equal(model(torch.ones(12, 3)), torch.ones(6, 2, 3))
    with pytest.raises(InputMismatch, match=r"the graph was captured for .*d0.*, got d0=9"):
        model(torch.ones(9, 3))


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
    """A plain attribute that is a weight under another name."""

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


def test_a_rollback_waits_for_a_pin_whose_state_it_would_reset(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Counter, {"forward": MethodSpec("forward", (torch.zeros(2, 3),))}, 2)
    model = load(setup.artifact, setup.files[0])
    with model.pin() as session:
        session(torch.zeros(2, 3))
        model.swap(setup.files[1])
        with pytest.raises(LeaseTimeout):
            model.rollback(timeout=0.1)
    model.rollback()


class Computed(nn.Module):
    """A linear layer, then something that computes with the dynamic size."""

    def __init__(self, after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(x), x)


def in_bfloat16(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ y.t()


AFTER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "as many rows as are positive": lambda y, x: y[x[:, 0] > 0],
    "a float scale": lambda y, x: nn.functional.interpolate(y.t()[None], scale_factor=1.5, mode="linear"),
    "half the size": lambda y, x: nn.functional.pad(y, (0, 0, x.shape[0] // 2, 1)),
    "a root of the size": lambda y, x: y * x.shape[0] ** 0.5,
    "a range": lambda y, x: y + torch.arange(x.shape[0])[:, None],
    "attention": lambda y, x: nn.functional.scaled_dot_product_attention(y[None], x[None], x[None], is_causal=True),
    "autocast": in_bfloat16,
    "cond": lambda y, x: torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z - 1, (y,)),
}


# torch looks at gradients while it captures torch.cond
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
def test_dynamic_sizes(after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    spec = MethodSpec("forward", (torch.randn(6, 4),), {}, {"x": {0: Dim("rows", max=64)}})
    setup = Setup(tmp_path, lambda: Computed(after), {"forward": spec}, 1)
    model = load(setup.artifact, setup.files[0])
    for rows in (1, 2, 7, 64):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            assert equal(model(x), setup.models[0](x))
