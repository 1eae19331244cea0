"""What follows from weights is no constant: caches that earlier calls have filled are found, and refused by name."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize

from tests.support.models import Does
from tests.support.setups import equal, loaded, served
from weightswap_exporter import MethodSpec, export, skeleton
from weightswap_runtime import Artifact, CaptureError

# of torch, which looks for a gradient in each attribute
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
X = torch.linspace(-1, 1, 16)


class Scaled(nn.Module):
    """Multiplies by what `get` computes from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.prepare()

    def prepare(self) -> None:
        self.cache: Any = None

    def computed(self) -> torch.Tensor:
        return (self.weight * 2 + 1).detach()

    def get(self) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get()


class Attribute(Scaled):
    """Keeps what a function makes of the module."""

    def __init__(self, make: Callable[[Any], Any] = lambda module: module.computed()) -> None:
        super().__init__()
        self.make = make

    def get(self) -> Any:
        if self.cache is None:
            self.cache = self.make(self)
        return self.cache


class Entry(Scaled):
    def prepare(self) -> None:
        self.cache = {}

    def get(self) -> Any:
        if self.weight.device not in self.cache:
            self.cache[self.weight.device] = self.computed()
        return self.cache[self.weight.device]


class Listed(Scaled):
    def prepare(self) -> None:
        self.cache = []

    def get(self) -> Any:
        if not self.cache:
            self.cache.append(self.computed())
        return self.cache[0]


class Pair(Scaled):
    def get(self) -> Any:
        if self.cache is None:
            self.cache = ("computed", self.computed())
        return self.cache[1]


class Versioned(Scaled):
    def prepare(self) -> None:
        self.cache = (None, None)

    def get(self) -> Any:
        if self.cache[0] != self.weight._version:
            self.cache = (self.weight._version, self.computed())
        return self.cache[1]


class Holder:
    value: Any = None


class Held(Scaled):
    def prepare(self) -> None:
        self.cache = Holder()

    def get(self) -> Any:
        if self.cache.value is None:
            self.cache.value = self.computed()
        return self.cache.value


class Property(Scaled):
    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.computed()

    def get(self) -> Any:
        return self.doubled


class LateBuffer(Scaled):
    def prepare(self) -> None:
        self.register_buffer("late", None, persistent=False)

    def get(self) -> Any:
        if self.late is None:
            self.late = self.computed()
        return self.late


class Flagged(Scaled):
    def prepare(self) -> None:
        self.cache = torch.zeros(16)
        self.is_filled = False

    def get(self) -> Any:
        if not self.is_filled:
            self.cache, self.is_filled = self.computed(), True
        return self.cache


class FlaggedBuffer(Scaled):
    def prepare(self) -> None:
        self.register_buffer("late", torch.zeros(16), persistent=False)
        self.is_stale = True

    def get(self) -> Any:
        if self.is_stale:
            self.late.copy_(self.computed())
            self.is_stale = False
        return self.late


class VersionBeside(Scaled):
    def prepare(self) -> None:
        self.cache, self.version = torch.zeros(16), -1

    def get(self) -> Any:
        if self.version != self.weight._version:
            self.cache, self.version = self.computed(), self.weight._version
        return self.cache


class Sentinel(Scaled):
    def prepare(self) -> None:
        self.cache = torch.empty(0)

    def get(self) -> Any:
        if self.cache.numel() == 0:
            self.cache = self.computed()
        return self.cache


def coded(code: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a module that keeps what it reads from a weight that has no fractions."""
    model = Attribute(lambda module: read(module.code))
    model.register_buffer("code", code)
    return model


def two_layers() -> nn.Module:
    """Return two modules, of which one fills the cache that the other reads."""

    def get(module: Any, x: torch.Tensor) -> torch.Tensor:
        if "first" not in module.shared:
            module.shared["first"] = module.weight.detach().exp()
        return x * module.shared["first"]

    shared: dict[str, torch.Tensor] = {}
    layers = [Does(get, weight=nn.Parameter(torch.rand(16)), shared=shared) for _ in range(2)]
    return Does(lambda m, x: m.second(m.first(x)), first=layers[0], second=layers[1])


CACHES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attribute": (Attribute, r"self\.cache"),
    "with gradients": (lambda: Attribute(lambda module: module.weight * 2), r"self\.cache"),
    "entry of a dict": (Entry, r"self\.cache\[device\(type='cpu'\)\]"),
    "item of a list": (Listed, r"self\.cache\[0\]"),
    "tuple": (Pair, r"self\.cache\[1\]"),
    "with a version": (Versioned, r"self\.cache\[1\]"),
    "attribute of an object": (Held, r"self\.cache\.value"),
    "cached_property": (Property, r"self\.doubled"),
    "buffer": (LateBuffer, r"self\.late"),
    "integers": (lambda: Attribute(lambda module: module.computed().argsort()), r"self\.cache"),
    "of packed numbers": (
        lambda: coded(torch.arange(16).to(torch.uint8), lambda code: (code & 7) - 3.5),
        r"self\.cache",
    ),
    "of integers that are alike": (
        lambda: coded(torch.zeros(16).to(torch.int8), lambda code: code + 0.5),
        r"self\.cache",
    ),
    "of unsigned integers": (
        lambda: coded(torch.zeros(16).to(torch.uint16), lambda code: code.to(torch.float32) + 0.5),
        r"self\.cache",
    ),
    "of bools": (lambda: coded(torch.zeros(16, dtype=torch.bool), lambda code: ~code * 1.0), r"self\.cache"),
    "of an order": (lambda: coded(torch.arange(16).flip(0), lambda code: code.argsort() + 0.5), r"self\.cache"),
    "of small numbers": (
        lambda: coded(torch.ones(16).to(torch.float8_e5m2), lambda code: code.float()),
        r"self\.cache",
    ),
    "number": (lambda: Attribute(lambda module: 1 / module.weight.abs().max().item()), r"self\.cache"),
    "with a flag": (Flagged, r"self\.cache"),
    "buffer with a flag": (FlaggedBuffer, r"self\.late"),
    "with a version beside it": (VersionBeside, r"self\.cache"),
    "empty tensor": (Sentinel, r"self\.cache"),
    "nested": (lambda: nn.Sequential(nn.Identity(), Attribute()), r"self\.1\.cache"),
    "shared": (two_layers, r"self\.first\.shared\['first'\], self\.second\.shared\['first'\]"),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_filled_cache_is_refused_by_name(name: str, tmp_path: Path) -> None:
    build, path = CACHES[name]
    model = build().eval()
    expected = model(X)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match=f"method 'forward': {path}: computed from weights before the export"):
        export(model, (X,), out=tmp_path / "a")
    assert equal(model(X), expected)
    assert equal(dict(model.state_dict()), before)
    assert not (tmp_path / "a").exists()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(CACHES.keys() - {"buffer"}))
@pytest.mark.filterwarnings("ignore:a call leaves tensors:UserWarning", "ignore:a call changes:UserWarning")
def test_the_advice_leads_to_right_numbers(name: str, tmp_path: Path) -> None:
    """Export a model that has not been called."""
    build, _ = CACHES[name]
    other = build().eval()
    try:
        export(build().eval(), (X,), out=tmp_path / "a")
    except CaptureError:  # torch cannot capture a number that depends on values
        assert name in ("number", "buffer with a flag")
        return
    model = loaded(Artifact.open(tmp_path / "a"), tmp_path, other.state_dict())
    assert equal(model(X), other(X).detach())


def test_a_buffer_that_a_call_makes_of_weights(tmp_path: Path) -> None:
    """The first advice ends in a refusal, the second in a right graph."""
    model = LateBuffer().eval()
    with pytest.raises(CaptureError, match=r"a call creates late.*if it does, do not register it, but compute it"):
        export(model, (X,), out=tmp_path / "a")
    model(X)
    with pytest.raises(CaptureError, match=r"self\.late: computed from weights"):
        export(model, (X,), out=tmp_path / "a")


def test_each_method_is_looked_through(tmp_path: Path) -> None:
    class Two(Attribute):
        def plain(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Two().eval()
    model(X)
    methods = {"plain": MethodSpec("plain", (X,)), "scaled": MethodSpec("forward", (X,))}
    with pytest.raises(CaptureError, match=r"method 'scaled': self\.cache"):
        export(model, methods=methods, out=tmp_path / "a")
    export(model, methods={"plain": methods["plain"]}, out=tmp_path / "a")


class Legitimate(Scaled):
    """Constants, caches and numbers that follow from no weight, and a number that calls only note."""

    def prepare(self) -> None:
        self.register_buffer("table", torch.rand(16), persistent=False)
        self.plain = torch.arange(16.0).sin()
        self.cache = {}
        self.size = 16**-0.5
        self.momentum = 0.1234567891234
        self.seen = 0.0

    def get(self) -> Any:
        if "mask" not in self.cache:
            self.cache["mask"] = torch.rand(16) * self.table
        return self.weight * self.cache["mask"] * self.plain * torch.tensor([0.1234567, 0.5] * 8) * self.size


def test_other_constants_are_none_of_its_business(tmp_path: Path) -> None:
    model = Legitimate().eval()
    expected = model(X)
    with torch.no_grad():
        model.seen = (model.weight.sum() * 0.37).item()
    assert equal(served(tmp_path, model, X)(X), expected.detach())


TABLE: dict[str, torch.Tensor] = {}


class Global(Scaled):
    def get(self) -> Any:
        return TABLE.setdefault(str(id(self)), self.computed())


class Memoised(Scaled):
    @functools.lru_cache  # noqa: B019
    def doubled(self) -> torch.Tensor:
        return self.computed()

    def get(self) -> Any:
        return self.doubled()


class Closure(Scaled):
    def prepare(self) -> None:
        kept: list[torch.Tensor] = []

        def doubled() -> torch.Tensor:
            if not kept:
                kept.append(self.computed())
            return kept[0]

        self.get = doubled  # type: ignore[method-assign]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("build", [Global, Memoised, Closure])
def test_what_no_attribute_holds_is_named_in_a_warning(
    build: Callable[[], nn.Module], inside: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(build()).eval() if inside else build().eval()
    model(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(model, (X,), out=tmp_path / "a")
    said = [str(item.message) for item in caught]
    reader = "0" if inside else build.__name__
    assert any(text.startswith(f"{reader} reads a tensor of the shape [16]") for text in said)


class Computed(Scaled):
    def get(self) -> Any:
        return self.cache


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a copy": lambda weight: weight.clone(),
    "doubled": lambda weight: weight * 2,
    "an exponential": lambda weight: weight.exp(),
    "negated, in bfloat16": lambda weight: -weight.bfloat16(),
    "reversed": lambda weight: weight.flip(0).contiguous(),
}


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_constant_with_a_weight_s_values_is_named_in_a_warning(name: str, kind: str, tmp_path: Path) -> None:
    model = Computed().eval()
    value = COMPUTED[name](model.weight.detach())
    if kind == "buffer":
        del model.cache
        model.register_buffer("cache", value, persistent=False)
    else:
        model.cache = value
    with pytest.warns(UserWarning, match="cache has values that follow from the weight weight, it seems"):
        export(model, (X,), out=tmp_path / "a")


def test_a_part_of_a_weight_is_recognised(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.rand(40, 32))
    part = weight.detach()[::4, :16].contiguous()
    with pytest.warns(UserWarning, match="part has values that follow from the weight weight, it seems"):
        export(Does(lambda m, x: x * m.part + m.weight.sum(), weight=weight, part=part), (X,), out=tmp_path / "a")


def test_a_view_of_a_weight_is_refused_with_advice_that_holds(tmp_path: Path) -> None:
    class View(Computed):
        def prepare(self) -> None:
            self.cache = self.weight.detach()[::2]

        def get(self) -> Any:
            return torch.cat([self.cache, self.cache])

    with pytest.raises(CaptureError, match="If it is a view of a weight, take the view in the call"):
        export(View().eval(), (X,), out=tmp_path / "a")


def test_computed_with_gradients_in_init_is_refused(tmp_path: Path) -> None:
    class Early(Computed):
        def prepare(self) -> None:
            self.cache = self.weight.sum() * 2

    with pytest.raises(CaptureError, match=r"self\.cache: computed from weights before the export"):
        export(Early().eval(), (X,), out=tmp_path / "a")


def test_a_skeleton_has_no_values_to_follow_from(tmp_path: Path) -> None:
    with skeleton():
        model = Computed().eval()
        model.register_buffer("early", model.weight.detach() * 2, persistent=False)
    model.get = lambda: model.early  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"early: constants and state go into the artifact.*compute it in the call"):
        export(model, (X,), out=tmp_path / "a")


def test_a_random_cache_is_no_function_of_weights(tmp_path: Path) -> None:
    class Noise(Scaled):
        def get(self) -> Any:
            if self.cache is None:
                self.cache = torch.rand(16)
            return self.weight * self.cache

    model = Noise().eval()
    model(X)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(model, (X,), out=tmp_path / "a")
    assert equal(torch.get_rng_state(), state)


def test_each_flag_is_tried(tmp_path: Path) -> None:
    """The first that a call does not mind says nothing of the others."""

    class Flagged(Scaled):
        def prepare(self) -> None:
            self.a_flag_of_something_else = True
            self.is_ready = False
            self.register_buffer("late", torch.zeros(16), persistent=False)

        def get(self) -> Any:
            if not self.is_ready:
                self.late, self.is_ready = self.computed(), True
            return self.late

    model = Flagged().eval()
    model(X)
    with pytest.raises(CaptureError, match=r"self\.late: computed from weights"):
        export(model, (X,), out=tmp_path / "a")


def test_a_product_of_weights_that_a_method_has_prepared_is_refused(tmp_path: Path) -> None:
    """The call computes the same without it, as long as the weights stay."""
    layers = {"one": nn.Linear(16, 4, bias=False), "two": nn.Linear(4, 16, bias=False)}
    model = Does(lambda m, x: m.two(m.one(x)) if m.fused is None else x @ m.fused, **layers, fused=None)
    export(model, (X,), out=tmp_path / "a")
    model.fused = (model.one.weight.T @ model.two.weight.T).detach()
    with pytest.raises(CaptureError, match=r"self\.fused: computed from weights"):
        export(model, (X,), out=tmp_path / "a")


def test_an_optional_constant_is_none_of_its_business(tmp_path: Path) -> None:
    class Masked(Scaled):
        def prepare(self) -> None:
            self.mask: Any = torch.rand(16) * 2
            self.nothing: Any = torch.zeros(16)

        def get(self) -> Any:
            weight = self.weight if self.mask is None else self.weight * self.mask
            return weight if self.nothing is None else weight + self.nothing

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(Masked().eval(), (X,), out=tmp_path / "a")


def test_a_cache_of_a_skeleton_s_persistent_buffer_is_refused(tmp_path: Path) -> None:
    def normed(model: Any, x: torch.Tensor) -> torch.Tensor:
        if model.cache is None:
            model.cache = (model.norm.running_var + 1).rsqrt()
        if model.plain is None:
            model.plain = torch.arange(16.0).sin()
        return model.linear(x) * model.cache * model.plain

    with skeleton():
        model = Does(normed, linear=nn.Linear(16, 16), norm=nn.BatchNorm1d(16), cache=None, plain=None).eval()
    model(X)
    with pytest.raises(CaptureError, match=r"'forward': self\.cache: computed from weights"):
        export(model, (X,), out=tmp_path / "a")
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    model.cache = None
    with pytest.warns(UserWarning, match="a call leaves tensors in self.cache"):
        export(model, (X,), out=tmp_path / "a")


def test_a_parametrisation_that_torch_has_computed_before_is_none(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)).eval()

    first, second = build(), build()
    with parametrize.cached():
        first(X)
        kept = first.weight
        artifact = export(first, (X,), out=tmp_path / "a")
        assert first.weight is kept
    assert equal(loaded(artifact, tmp_path, second)(X), second(X))


class Optional(nn.Module):
    """Does `act` only where an attribute says so; beside a constant, for which the attribute is inverted in a trial."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.register_buffer("shift", torch.rand(16))
        self.register_buffer("order", torch.arange(16).flip(0).roll(3), persistent=False)
        self.scale = torch.rand(16)
        self.enabled, self.act = False, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enabled:
            self.act(self)
        return x * self.weight[self.order] * self.scale + self.shift


def _reassign(module: Any) -> None:
    module.weight.data = module.weight.data * 2


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda module: module.weight.data.clamp_(-0.1, 0.1), id="a weight is clipped"),
        pytest.param(lambda module: module.weight[2:5].data.view(3).zero_(), id="a part"),
        pytest.param(lambda module: module.weight.data.lerp_(module.other, 0.5), id="an average"),
        pytest.param(lambda module: module.shift.zero_(), id="a buffer"),
        pytest.param(lambda module: module.order.copy_(module.order.roll(1)), id="a constant"),
        pytest.param(lambda module: torch.add(module.scale, 1, out=module.scale), id="an attribute"),
        pytest.param(_reassign, id="its data"),
        pytest.param(lambda module: module.weight.data.share_memory_(), id="its memory"),
    ],
)
def test_what_a_trial_writes_is_undone(act: Callable[[Any], object], tmp_path: Path) -> None:
    eager = Optional(act)
    weight = eager.weight
    before = copy.deepcopy(eager)
    artifact = export(eager, (X,), out=tmp_path / "a")
    assert eager.weight is weight
    for name, value in [*before.named_parameters(), *before.named_buffers(), ("scale", before.scale)]:
        assert equal(getattr(eager, name), value)
    assert equal(loaded(artifact, tmp_path, eager)(X), before(X))
