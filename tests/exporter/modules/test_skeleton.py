"""Skeletons: parameters without memory, everything else as it is, and the same export as from a real model."""

from __future__ import annotations

import copy
import dataclasses
import resource
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations

from tests.support.checkpoints import saved_safetensors
from tests.support.composed import Rows, Sum, summed
from tests.support.models import Does
from tests.support.setups import loaded
from weightswap_exporter import export, skeleton
from weightswap_runtime import CaptureError, load


def is_hollow(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class Zoo(nn.Module):
    """Initialisers, conversions, parametrizations and copies that touch parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.register_buffer("rotary", 1 / torch.arange(1, 17.0))
        own = nn.Parameter(torch.zeros(16))
        self.one, self.two = own, own
        nn.init.trunc_normal_(self.normed.bias, std=0.02)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
        self.one.data.fill_(3.0)
        with torch.no_grad():
            self.normed.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.normed(self.encoder(x * self.rotary)))[0] + self.one + self.two


@pytest.mark.sampled(1)
@pytest.mark.parametrize("convert", [lambda m: m, lambda m: m.half().float(), lambda m: m.to(torch.bfloat16)])
def test_the_export_is_that_of_the_real_model(convert: Any, tmp_path: Path) -> None:
    with skeleton():
        hollow = convert(Zoo()).eval()
    real = convert(Zoo()).eval()
    assert all(is_hollow(parameter) for parameter in hollow.parameters())
    assert not any(is_hollow(buffer) for buffer in hollow.buffers())
    assert hollow.one is hollow.two
    x = torch.zeros(2, 5, 16, dtype=next(real.parameters()).dtype)
    one = export(hollow, (x,), out=tmp_path / "one.artifact")
    two = export(real, (x,), out=tmp_path / "two.artifact")
    assert one.manifest == two.manifest


def test_parameters_cost_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with skeleton():
        model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(16)])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 > 4e9
    assert grown < 200_000  # kilobytes


def test_a_constructor_that_reads_a_value_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.scale = self.weight.sum().item()

    says = r"__init__ \(test_skeleton.py, line \d+\): the model's constructor needs the values .* is .*Reads.weight"
    with pytest.raises(CaptureError, match=says), skeleton():
        Reads()


def filled() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight.data.normal_()
    model.weight.data[0] = 0
    with torch.no_grad():
        model.weight.copy_(torch.eye(8))
        model.bias.zero_()
    return model


def assigned() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.ones(8, 8))
    model.weight.data = torch.zeros(8, 8)
    model.register_parameter("gain", nn.Parameter(torch.ones(3), requires_grad=False))
    return model


def filled_by_a_checkpoint() -> nn.Module:
    model = nn.Linear(8, 8)
    model.load_state_dict({"weight": torch.ones(8, 8), "bias": torch.zeros(8)})
    return model


def initialised() -> nn.Module:
    """The references were taken before the skeleton began, as libraries do."""
    model = nn.Linear(8, 8)
    for initialise in INITIALISERS:
        initialise(model.weight)
    return model


INITIALISERS = (
    nn.init.trunc_normal_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda weight: nn.init.sparse_(weight, 0.1),
)
BUILDS = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)).double(),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "values that are set": filled,
    "parameters that are assigned": assigned,
    "a checkpoint that is loaded": filled_by_a_checkpoint,
    "initialisers": initialised,
    "a copy": lambda: nn.Sequential(layer := nn.Linear(8, 8), copy.deepcopy(layer)),
    "a parameter that is a view": lambda: nn.ParameterList([nn.Parameter(torch.zeros(64).view(8, 8))]),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_constructors_do_to_parameters_works(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    def act(model: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ model.inner[0] if isinstance(model.inner, nn.ParameterList) else model.inner(x)

    artifacts = []
    for name, context in (("hollow", skeleton), ("real", nullcontext)):
        with context():
            model = Does(act, inner=build()).eval()
        assert all(is_hollow(parameter) is (name == "hollow") for parameter in model.parameters())
        x = torch.zeros(2, 8, dtype=next(model.parameters()).dtype)
        artifacts.append(export(model, (x,), out=tmp_path / f"{name}.artifact"))
    assert artifacts[0].manifest == artifacts[1].manifest


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_old_norms_work(normed: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    with skeleton():
        hollow = nn.Sequential(normed(nn.Linear(8, 8))).double().eval()
    real = nn.Sequential(normed(nn.Linear(8, 8))).double().eval()
    x = torch.ones(2, 8, dtype=torch.float64)
    one = export(hollow, (x,), out=tmp_path / "one.artifact")
    assert one.manifest == export(real, (x,), out=tmp_path / "two.artifact").manifest
    with torch.no_grad():
        assert torch.equal(load(one, saved_safetensors(tmp_path / "c.safetensors", real.state_dict()))(x), real(x))


WANT_VALUES: dict[str, Callable[[], object]] = {
    "numpy": lambda: nn.Linear(8, 8).weight.detach().numpy(),
    "set_": lambda: nn.Linear(8, 8).weight.data.set_(torch.ones(8, 8)),
    "a condition": lambda: bool(nn.Linear(8, 8).weight.sum() > 0),
    "an orthogonal parametrization": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("build", WANT_VALUES.values(), ids=WANT_VALUES)
def test_constructors_that_need_values_are_named(build: Callable[[], object]) -> None:
    says = r"\(test_skeleton.py, line \d+\): .* the last one made is Linear.bias"
    with pytest.raises(CaptureError, match=says), skeleton():
        build()


def test_an_error_of_the_constructor_s_own_is_left_alone() -> None:
    with pytest.raises(ZeroDivisionError), skeleton():
        print(1 / 0)


def test_lazy_parameters_are_named() -> None:
    with pytest.raises(CaptureError, match=r"LazyLinear.weight: a lazy parameter has no shape"), skeleton():
        nn.LazyLinear(3)


def test_only_this_block_and_this_thread_are_touched() -> None:
    register, kaiming = nn.Module.register_parameter, nn.init.kaiming_uniform_
    built: list[nn.Module] = []
    with skeleton():
        other = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        with pytest.raises(CaptureError, match="one at a time"), skeleton():
            pass
    assert not is_hollow(built[0].weight)
    assert nn.Module.register_parameter is register
    assert nn.init.kaiming_uniform_ is kaiming
    assert not is_hollow(nn.Linear(2, 2).weight)


def held(model: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = model.held()
    return model.norm(x @ weight + bias)


def holding(hold: Callable[[Any], Callable[[], Any]]) -> nn.Module:
    """Return a module whose calls read its parameters from `self.held()`, not from its attributes."""
    model = Does(held, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    model.held = hold(model)
    return model.eval()


@dataclasses.dataclass
class Pair:
    weight: torch.Tensor
    bias: torch.Tensor


def in_a_list(model: Any) -> Callable[[], Any]:
    model.list = [model.layer.weight, model.layer.bias]
    return lambda: model.list


def in_a_dict(model: Any) -> Callable[[], Any]:
    model.dict = {"deep": [(model.layer.weight, model.layer.bias)]}
    return lambda: model.dict["deep"][0]


def in_a_dataclass(model: Any) -> Callable[[], Any]:
    model.pair = Pair(model.layer.weight, model.layer.bias)
    return lambda: (model.pair.weight, model.pair.bias)


def in_a_closure(model: Any) -> Callable[[], Any]:
    weight, bias = model.layer.weight, model.layer.bias
    return lambda: (weight, bias)


def registered_later(model: Any) -> Callable[[], Any]:
    model.list = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))]
    model.layer.weight, model.layer.bias = model.list
    return lambda: model.list


def registered_later_in_a_closure(model: Any) -> Callable[[], Any]:
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    model.layer.weight, model.layer.bias = weight, bias
    return lambda: (weight, bias)


HOLDS = (in_a_list, in_a_dict, in_a_dataclass, in_a_closure, registered_later, registered_later_in_a_closure)


@pytest.mark.parametrize("hold", HOLDS)
def test_parameters_that_containers_hold_are_weights(hold: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    with skeleton():
        hollow = holding(hold)
    real = holding(hold)
    one = export(hollow, (x,), out=tmp_path / "one.artifact")
    assert one.manifest == export(real, (x,), out=tmp_path / "two.artifact").manifest
    model, other = loaded(one, tmp_path, real), holding(hold)
    with torch.no_grad():
        assert torch.equal(model(x), real(x))
        model.swap(other)
        assert torch.equal(model(x), other(x))


class Listed(nn.Module):
    """Puts its parameters into a list first, and then registers them."""

    def __init__(self, take: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter) -> None:
        super().__init__()
        parameters = [nn.Parameter(torch.randn(4)) for _ in range(2)]
        self.list = [take(parameter) for parameter in parameters]
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.list[0] + self.list[1]


def with_other_data(model: nn.Module) -> None:
    parameters = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    model.list = parameters  # type: ignore[assignment]
    model.p0, model.p1 = parameters
    parameters[0].data = torch.ones(4)


def registered_again(model: nn.Module) -> None:
    model.list = [nn.Parameter(torch.randn(4)) for _ in range(2)]  # type: ignore[assignment]
    model.p0, model.p1 = model.list  # type: ignore[misc]
    model.p0 = nn.Parameter(model.p0.data)


def reading(fill: Callable[[Any], object]) -> nn.Module:
    """Return a module that reads parameters from a list that `fill` makes."""
    model = Does(lambda m, x: x * m.list[0] + m.list[1])
    fill(model)
    return model


def copied_with_its_owner() -> nn.Module:
    """Return a copy of a module that has the parameters in a list, and of another that registers them."""
    parameters = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    owner = Does(lambda m, x: x, p0=parameters[0], p1=parameters[1])
    return copy.deepcopy(nn.Sequential(reading(lambda model: setattr(model, "list", parameters)), owner))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "other data": lambda: reading(with_other_data),
    "registered again": lambda: reading(registered_again),
    "a copy": copied_with_its_owner,
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_no_parameter_of_a_list_becomes_a_constant(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    with skeleton():
        hollow = build().eval()
    artifact = export(hollow, (x,), out=tmp_path / "a.artifact")
    assert not artifact.manifest.constants
    real = build().eval()
    with torch.no_grad():
        assert torch.equal(loaded(artifact, tmp_path, real)(x), real(x))


def test_the_list_of_a_copy_holds_the_copy_s_parameters(tmp_path: Path) -> None:
    manifests = []
    for name, context in (("hollow", skeleton), ("real", nullcontext)):
        with context():
            model = nn.Sequential(listed := Listed(), copy.deepcopy(listed)).eval()
        manifests.append(export(model, (torch.ones(2, 4),), out=tmp_path / name).manifest)
    assert manifests[0] == manifests[1]
    assert [row.name for row in manifests[0].weights] == ["0.p0", "0.p1", "1.p0", "1.p1"]
    assert not manifests[0].constants


def test_what_is_no_longer_the_parameter_is_refused(tmp_path: Path) -> None:
    with skeleton():
        converted, views = Listed().half().eval(), Listed(lambda parameter: parameter.detach()[:1]).eval()
    for model in (converted, views):
        with pytest.raises(CaptureError, match="lifted_tensor_0: is a view of what became the weight p0"):
            export(model, (torch.ones(2, 4),), out=tmp_path / "a.artifact")


def test_what_a_container_has_computed_from_parameters_is_named(tmp_path: Path) -> None:
    with skeleton():
        model = holding(lambda model: lambda doubled=model.layer.weight * 2: (doubled, model.layer.bias))
    with pytest.raises(CaptureError, match="lifted_tensor_0: constants and state go into the artifact"):
        export(model, (torch.zeros(3, 4),), out=tmp_path / "a.artifact")


def test_a_skeleton_does_not_take_quantisation_away(tmp_path: Path) -> None:
    with skeleton():
        hollow = nn.Sequential(summed(nn.Linear(3, 3))).eval()
    assert isinstance(hollow[0].weight, Sum)
    assert is_hollow(hollow[0].weight.one)
    artifact = export(hollow, (torch.ones(1, 3),), out=tmp_path / "a")
    assert [row.name for row in artifact.manifest.weights] == ["0.weight.one", "0.weight.two", "0.bias"]


def test_a_skeleton_holds_no_shards() -> None:
    says = r"Linear.weight: is a Rows, which a skeleton cannot hold. Export the whole"
    with pytest.raises(CaptureError, match=says), skeleton():
        nn.Linear(3, 3).weight = nn.Parameter(torch.zeros(3, 3).as_subclass(Rows))
