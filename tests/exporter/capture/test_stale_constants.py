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
    """Multiplies by what `get` makes of the module, which may keep it in `cache` or another of its attributes."""

    def __init__(self, get: Callable[[Any], Any], cache: Any = None, **held: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.get, self.cache = get, cache
        for name, value in held.items():
            setattr(self, name, value)

    def computed(self) -> torch.Tensor:
        return (self.weight * 2 + 1).detach()

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.computed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get(self)


def keeping(make: Callable[[Any], Any] = Scaled.computed) -> nn.Module:
    """Return a module that keeps what a function makes of it."""

    def get(module: Any) -> Any:
        if module.cache is None:
            module.cache = make(module)
        return module.cache

    return Scaled(get)


def entry(module: Any) -> Any:
    if module.weight.device not in module.cache:
        module.cache[module.weight.device] = module.computed()
    return module.cache[module.weight.device]


def listed(module: Any) -> Any:
    if not module.cache:
        module.cache.append(module.computed())
    return module.cache[0]


def pair(module: Any) -> Any:
    if module.cache is None:
        module.cache = ("computed", module.computed())
    return module.cache[1]


def versioned(module: Any) -> Any:
    if module.cache[0] != module.weight._version:
        module.cache = (module.weight._version, module.computed())
    return module.cache[1]


class Holder:
    value: Any = None


def held(module: Any) -> Any:
    if module.cache.value is None:
        module.cache.value = module.computed()
    return module.cache.value


def late(module: Any) -> Any:
    if module.late is None:
        module.late = module.computed()
    return module.late


def late_buffer() -> nn.Module:
    model = Scaled(late)
    model.register_buffer("late", None, persistent=False)
    return model.eval()


def flagged(module: Any) -> Any:
    if not module.is_filled:
        module.cache, module.is_filled = module.computed(), True
    return module.cache


def flagged_buffer(module: Any) -> Any:
    if module.is_stale:
        module.late.copy_(module.computed())
        module.is_stale = False
    return module.late


def version_beside(module: Any) -> Any:
    if module.version != module.weight._version:
        module.cache, module.version = module.computed(), module.weight._version
    return module.cache


def sentinel(module: Any) -> Any:
    if module.cache.numel() == 0:
        module.cache = module.computed()
    return module.cache


def coded(code: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a module that keeps what it reads from a weight that has no fractions."""
    model = keeping(lambda module: read(module.code))
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
    "attribute": (keeping, r"self\.cache"),
    "with gradients": (lambda: keeping(lambda module: module.weight * 2), r"self\.cache"),
    "entry of a dict": (lambda: Scaled(entry, {}), r"self\.cache\[device\(type='cpu'\)\]"),
    "item of a list": (lambda: Scaled(listed, []), r"self\.cache\[0\]"),
    "tuple": (lambda: Scaled(pair), r"self\.cache\[1\]"),
    "with a version": (lambda: Scaled(versioned, (None, None)), r"self\.cache\[1\]"),
    "attribute of an object": (lambda: Scaled(held, Holder()), r"self\.cache\.value"),
    "cached_property": (lambda: Scaled(lambda module: module.doubled), r"self\.doubled"),
    "buffer": (late_buffer, r"self\.late"),
    "integers": (lambda: keeping(lambda module: module.computed().argsort()), r"self\.cache"),
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
    "number": (lambda: keeping(lambda module: 1 / module.weight.abs().max().item()), r"self\.cache"),
    "with a flag": (lambda: Scaled(flagged, torch.zeros(16), is_filled=False), r"self\.cache"),
    "buffer with a flag": (
        lambda: Scaled(flagged_buffer, late=nn.Buffer(torch.zeros(16), persistent=False), is_stale=True),
        r"self\.late",
    ),
    "with a version beside it": (lambda: Scaled(version_beside, torch.zeros(16), version=-1), r"self\.cache"),
    "empty tensor": (lambda: Scaled(sentinel, torch.empty(0)), r"self\.cache"),
    "nested": (lambda: nn.Sequential(nn.Identity(), keeping()), r"self\.1\.cache"),
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
    model = late_buffer()
    with pytest.raises(CaptureError, match=r"a call creates late.*if it does, do not register it, but compute it"):
        export(model, (X,), out=tmp_path / "a")
    model(X)
    with pytest.raises(CaptureError, match=r"self\.late: computed from weights"):
        export(model, (X,), out=tmp_path / "a")


def test_each_method_is_looked_through(tmp_path: Path) -> None:
    class Two(Scaled):
        def plain(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Two(pair).eval()
    model(X)
    methods = {"plain": MethodSpec("plain", (X,)), "scaled": MethodSpec("forward", (X,))}
    with pytest.raises(CaptureError, match=r"method 'scaled': self\.cache"):
        export(model, methods=methods, out=tmp_path / "a")
    export(model, methods={"plain": methods["plain"]}, out=tmp_path / "a")


def legitimate(module: Any) -> torch.Tensor:
    if "mask" not in module.cache:
        module.cache["mask"] = torch.rand(16) * module.table
    literal = torch.tensor([0.1234567, 0.5] * 8)
    return module.weight * module.cache["mask"] * module.plain * literal * module.size


def test_other_constants_are_none_of_its_business(tmp_path: Path) -> None:
    """Constants, caches and numbers that follow from no weight, and a number that calls only note."""
    constants = {"table": nn.Buffer(torch.rand(16), persistent=False), "plain": torch.arange(16.0).sin()}
    model: Any = Scaled(legitimate, {}, **constants, size=16**-0.5, momentum=0.1234567891234, seen=0.0).eval()
    expected = model(X)
    with torch.no_grad():
        model.seen = (model.weight.sum() * 0.37).item()
    assert equal(served(tmp_path, model, X)(X), expected.detach())


TABLE: dict[str, torch.Tensor] = {}


def in_a_table() -> nn.Module:
    return Scaled(lambda module: TABLE.setdefault(str(id(module)), module.computed()))


def memoised() -> nn.Module:
    return Scaled(functools.lru_cache(Scaled.computed))


def in_a_closure() -> nn.Module:
    kept: list[torch.Tensor] = []

    def get(module: Any) -> torch.Tensor:
        if not kept:
            kept.append(module.computed())
        return kept[0]

    return Scaled(get)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("build", [in_a_table, memoised, in_a_closure])
def test_what_no_attribute_holds_is_named_in_a_warning(
    build: Callable[[], nn.Module], inside: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(build()).eval() if inside else build().eval()
    model(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(model, (X,), out=tmp_path / "a")
    said = [str(item.message) for item in caught]
    reader = "0" if inside else "Scaled"
    assert any(text.startswith(f"{reader} reads a tensor of the shape [16]") for text in said)


def computed_before(compute: Callable[[torch.Tensor], torch.Tensor], *, buffer: bool = False) -> Any:
    """Return a module whose constant was computed from its weight when it was made."""
    model = Scaled(lambda module: module.kept).eval()
    value = compute(model.weight)
    model.kept = nn.Buffer(value, persistent=False) if buffer else value
    return model


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a copy": lambda weight: weight.clone(),
    "doubled": lambda weight: weight * 2,
    "an exponential": lambda weight: weight.exp(),
    "negated, in bfloat16": lambda weight: -weight.bfloat16(),
    "reversed": lambda weight: weight.flip(0).contiguous(),
}


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_constant_with_a_weight_s_values_is_named_in_a_warning(name: str, buffer: bool, tmp_path: Path) -> None:
    model = computed_before(lambda weight: COMPUTED[name](weight.detach()), buffer=buffer)
    with pytest.warns(UserWarning, match="kept has values that follow from the weight weight, it seems"):
        export(model, (X,), out=tmp_path / "a")


def test_a_part_of_a_weight_is_recognised(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.rand(40, 32))
    part = weight.detach()[::4, :16].contiguous()
    with pytest.warns(UserWarning, match="part has values that follow from the weight weight, it seems"):
        export(Does(lambda m, x: x * m.part + m.weight.sum(), weight=weight, part=part), (X,), out=tmp_path / "a")


def test_a_view_of_a_weight_is_refused_with_advice_that_holds(tmp_path: Path) -> None:
    model = Scaled(lambda module: torch.cat([module.cache, module.cache])).eval()
    model.cache = model.weight.detach()[::2]
    with pytest.raises(CaptureError, match="If it is a view of a weight, take the view in the call"):
        export(model, (X,), out=tmp_path / "a")


def test_computed_with_gradients_in_init_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"self\.kept: computed from weights before the export"):
        export(computed_before(lambda weight: weight.sum() * 2), (X,), out=tmp_path / "a")


def test_a_skeleton_has_no_values_to_follow_from(tmp_path: Path) -> None:
    with skeleton():
        model = computed_before(lambda weight: weight.detach() * 2, buffer=True)
    with pytest.raises(CaptureError, match=r"kept: constants and state go into the artifact.*compute it in the call"):
        export(model, (X,), out=tmp_path / "a")


def test_a_random_cache_is_no_function_of_weights(tmp_path: Path) -> None:
    def get(module: Any) -> torch.Tensor:
        if module.cache is None:
            module.cache = torch.rand(16)
        return module.weight * module.cache

    model = Scaled(get).eval()
    model(X)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(model, (X,), out=tmp_path / "a")
    assert equal(torch.get_rng_state(), state)


def test_each_flag_is_tried(tmp_path: Path) -> None:
    """The first that a call does not mind says nothing of the others."""

    flags = {"a_flag_of_something_else": True, "is_stale": True}
    model = Scaled(flagged_buffer, **flags, late=nn.Buffer(torch.zeros(16), persistent=False)).eval()
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
    def get(module: Any) -> torch.Tensor:
        weight = module.weight if module.mask is None else module.weight * module.mask
        return weight if module.nothing is None else weight + module.nothing

    model = Scaled(get, mask=torch.rand(16) * 2, nothing=torch.zeros(16)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(model, (X,), out=tmp_path / "a")


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
