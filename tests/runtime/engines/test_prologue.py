"""The prologue: what depends on weights and constants alone is computed once per staging, and never stale."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.sessions import bound_of
from tests.support.setups import different, equal
from tests.support.varied import RichFiles
from tests.support.varied import X as RICH_X
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import (
    Artifact,
    CaptureError,
    Model,
    ModelFailed,
    OutOfMemory,
    SwapReceipt,
    WeightsMismatch,
    load,
    write_delta,
)
from weightswap_runtime.engines.torch_calls import GraphCall
from weightswap_runtime.engines.torch_cpu import BoundTorch

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Folded(nn.Module):
    """A normalised weight, a folded scale, a cast, a table from constants, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("variance", torch.ones(4))
        self.coarse = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.register_buffer("positions", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * (self.scale * torch.rsqrt(self.variance + 1e-5))
        table = torch.outer(self.positions, 1 / (10000 ** (self.positions / 4))).sin()
        return (y + table[:3]) @ self.coarse.float().t()

    def scales(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = self.scale * 2
        return scale, scale[1:], self.scale[1:]


METHODS = {"forward": MethodSpec("forward", (X,)), "scales": MethodSpec("scales")}


class Files:
    """The artifact, and three sets of weights."""

    def __init__(self, folder: Path) -> None:
        self.models = [different(Folded, seed) for seed in range(3)]
        with torch.no_grad():
            for seed, model in enumerate(self.models):
                model.get_parameter("coarse").fill_(1 + seed)
        self.artifact: Artifact = export(self.models[0], methods=METHODS, out=folder / "a")
        self.full = [
            pack(model, self.artifact, out=folder / f"v{i}.safetensors").path for i, model in enumerate(self.models)
        ]
        self.delta = write_delta(self.full[1], self.full[2], folder / "d.safetensors").path

    def correct(self, model: Model, index: int) -> bool:
        """Check that both methods equal eager, twice."""
        eager: Any = self.models[index]
        with torch.no_grad():
            return all(equal((model(X), model.scales()), (eager(X), eager.scales())) for _ in range(2))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("prologue"))


def bound(model: Model) -> BoundTorch:
    found = bound_of(model)
    assert isinstance(found, BoundTorch)
    return found


def hoisted(model: Model, method: str = "forward") -> list[torch.Tensor]:
    return bound(model)._calls[method].hoisted


def test_the_graph_is_cut_where_inputs_come_in(files: Files) -> None:
    on, off = load(files.artifact, files.full[0]), load(files.artifact, files.full[0], prologue=False)
    assert [tuple(value.shape) for value in hoisted(on)] == [(4, 4), (4,), (3, 4), (4, 4)]
    assert hoisted(off) == []
    assert files.correct(on, 0)
    assert files.correct(off, 0)


SWAPS: dict[str, Callable[[Model, Files], SwapReceipt]] = {
    "full": lambda model, files: model.swap(files.full[2]),
    "delta": lambda model, files: model.swap(files.delta),
    "part": lambda model, files: model.swap(files.full[2], only="*"),
}


def test_a_delta_is_tried_with_its_own_prologue(files: Files, residency: Any) -> None:
    model = load(files.artifact, files.full[1], residency=residency)
    with model.stage(files.delta) as staged, torch.no_grad():
        assert equal(staged(X), files.models[2](X))
        assert files.correct(model, 1)
        staged.commit()
    assert files.correct(model, 2)


def test_addresses_stay_and_the_prologue_runs_once_for_each_staging(
    files: Files, residency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(files.artifact, files.full[0], residency=residency)
    model.swap(files.full[1])
    model.swap(files.full[0])
    addresses = [value.data_ptr() for value in hoisted(model)]
    runs: list[BoundTorch] = []
    original = BoundTorch._run_prologue
    monkeypatch.setattr(BoundTorch, "_run_prologue", lambda self: (runs.append(self), original(self)))
    for index in (1, 2, 1, 0):
        model.swap(files.full[index])
        for _ in range(5):
            model(X)
    assert [value.data_ptr() for value in hoisted(model)] == addresses
    assert len(runs) == 4  # in single residency, too: a commit copies what was computed to try them


def test_a_model_that_joins_has_the_prologue(files: Files, residency: Any) -> None:
    first = load(files.artifact, files.full[0], residency=residency)
    first.swap(files.full[1])
    second = load(files.artifact, share=first)
    assert files.correct(second, 1)
    second.swap(files.full[2])
    assert files.correct(first, 2)
    assert files.correct(second, 2)


def test_outputs_of_the_prologue_are_copies(files: Files) -> None:
    model = load(files.artifact, files.full[0])
    for output in model.scales():
        output.fill_(7)
    assert files.correct(model, 0)


def test_the_thread_s_modes_do_not_change_the_prologue(files: Files) -> None:
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        model = load(files.artifact, files.full[0])
        model.swap(files.full[1])
        assert not any(value.is_inference() for value in hoisted(model))
    assert files.correct(model, 1)


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.linalg.inv(self.weight)


class Singular:
    """An artifact, good weights, weights without an inverse, and a delta from good to bad."""

    def __init__(self, folder: Path) -> None:
        good, bad = Inverse(), Inverse()
        with torch.no_grad():
            bad.weight.zero_()
        self.artifact: Artifact = export(good, (X,), out=folder / "a")
        self.good = pack(good, self.artifact, out=folder / "g.safetensors").path
        self.bad = pack(bad, self.artifact, out=folder / "b.safetensors").path
        self.delta = write_delta(self.good, self.bad, folder / "d.safetensors").path


@pytest.fixture(scope="module")
def singular(tmp_path_factory: pytest.TempPathFactory) -> Singular:
    return Singular(tmp_path_factory.mktemp("singular"))


def test_weights_whose_prologue_fails_are_refused(singular: Singular, residency: Any) -> None:
    model = load(singular.artifact, singular.good, residency=residency)
    with pytest.raises(WeightsMismatch, match=r"from weights alone cannot be computed: .*singular"):
        model.swap(singular.bad)
    assert torch.equal(model(X), X)
    for path, options in ((singular.bad, {"only": "weight"}), (singular.delta, {})):
        with pytest.raises(WeightsMismatch):
            model.swap(path, **options)
        assert not model.failed
        assert model.generation == 0
        assert torch.equal(model(X), X)
    plain = load(singular.artifact, singular.bad, prologue=False)
    with pytest.raises(RuntimeError, match="singular"):
        plain(X)


def test_no_rollback_to_weights_whose_prologue_fails_in_a_model_that_joined(singular: Singular) -> None:
    first = load(singular.artifact, singular.bad, prologue=False)
    first.swap(singular.good)
    second = load(singular.artifact, share=first)
    for _ in range(2):
        with pytest.raises(WeightsMismatch):
            second.rollback()
        assert torch.equal(second(X), X)
        assert torch.equal(first(X), X)
    second.swap(singular.good)
    second.rollback()
    assert torch.equal(second(X), X)
    with pytest.raises(WeightsMismatch):
        load(singular.artifact, share=load(singular.artifact, singular.bad, prologue=False))


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("CUDA error: gone"), ModelFailed), (MemoryError("no bytes"), OutOfMemory)]
)
def test_a_prologue_that_fails_in_a_commit_is_a_refused_swap_unless_it_is_the_device_that_fails(
    error: Exception, raised: type[Exception], singular: Singular, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(singular.artifact, singular.good, residency="single")
    original, times = BoundTorch._run_prologue, []

    def prepare(bound: BoundTorch) -> None:
        times.append(1)
        if len(times) == 1:
            raise error
        original(bound)

    monkeypatch.setattr(BoundTorch, "_run_prologue", prepare)
    with pytest.raises(raised, match=str(error)):
        model.swap(singular.good, only="*")
    assert (model.generation, model.failed) == (0, raised is ModelFailed)
    if model.failed:
        with pytest.raises(ModelFailed):
            model(X)
        model.swap(singular.good)
    assert torch.equal(model(X), X)


def without_memory(monkeypatch: pytest.MonkeyPatch, places: set[int]) -> list[int]:
    """Let the later computations with these numbers lack memory. Return the numbers of those begun."""
    original: Any = GraphCall.run_prologue
    begun: list[int] = []

    def prepare(call: GraphCall) -> None:
        begun.append(len(begun))
        if begun[-1] in places:
            raise MemoryError("no bytes")
        original(call)

    monkeypatch.setattr(GraphCall, "run_prologue", prepare)
    return begun


@pytest.mark.parametrize("lacks", [{0}, {1}, {0, 1, 2, 3}, {1, 2, 3}])
@pytest.mark.parametrize("way", ["full", "delta"])
def test_a_rollback_without_memory_for_the_prologue_changes_nothing(
    lacks: set[int], way: str, files: Files, residency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if undoing would lack memory, too: it computes nothing."""
    model = load(files.artifact, files.full[1], residency=residency, keep_previous="host")
    SWAPS[way](model, files)
    addresses = [value.data_ptr() for value in hoisted(model)]
    with monkeypatch.context() as patch:
        begun = without_memory(patch, lacks)
        for generation in (1, 1):
            if residency == "double" and not begun:  # an exchange, which computes nothing
                model.rollback()
                assert files.correct(model, 1)
                return
            with pytest.raises(OutOfMemory):
                model.rollback()
            begun.clear()
            assert (model.generation, model.failed) == (generation, False)
            assert files.correct(model, 2)
    assert [value.data_ptr() for value in hoisted(model)] == addresses
    model.rollback()
    assert files.correct(model, 1)
    model.rollback()
    assert files.correct(model, 2)


@pytest.mark.parametrize("way", ["delta", "part"])
def test_undoing_a_patch_without_memory_for_the_prologue_needs_no_memory(
    way: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(files.artifact, files.full[1], residency="single")
    with monkeypatch.context() as patch:
        without_memory(patch, {1, 2, 3, 4, 5})
        with pytest.raises(OutOfMemory):
            SWAPS[way](model, files)
    assert (model.generation, model.failed) == (0, False)
    assert files.correct(model, 1)
    SWAPS[way](model, files)
    assert files.correct(model, 2)


def test_no_memory_to_keep_the_prologue_is_a_refused_rollback(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(files.artifact, files.full[1], residency="single", keep_previous="host")
    model.swap(files.full[2])

    def lacks(_: BoundTorch) -> None:
        raise RuntimeError("can't allocate memory: no bytes")

    with monkeypatch.context() as patch:
        patch.setattr(BoundTorch, "keep", lacks)
        with pytest.raises(OutOfMemory, match="to keep what was computed from the weights"):
            model.rollback()
    assert files.correct(model, 2)
    model.rollback()
    assert files.correct(model, 1)


class Unruly(nn.Module):
    """Writes to values computed from weights, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = self.weight * 2
        view = table.view(2, 2)
        view[0] += x.sum()
        noise = torch.rand(4) * self.weight
        return table, noise, torch.zeros(4).add_(x[0])


@torch.no_grad()
def test_random_or_overwritten_values_are_computed_in_each_call(tmp_path: Path) -> None:
    eager = Unruly()
    artifact = export(eager, (X,), out=tmp_path / "a")
    model = load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path)
    for _ in range(3):
        torch.manual_seed(1)
        found = model(X + 1)
        torch.manual_seed(1)
        assert equal(found, eager(X + 1))
    assert not equal(model(X)[1], model(X)[1])


class WithFunction(nn.Module):
    """A module with a weight and a function of the input and the weight."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any], seed: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def written(view: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a view after an addition to its base."""
    view += x[0, 0]
    return view * 1


HARD: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "expanded": lambda x, w: (w * 2)[:1].expand(3, 4) + x,
    "an expanded mask": lambda x, w: torch.full((4, 4), -1e9).triu(1).expand(2, 4, 4) + x[0] + w,
    "a shape that depends on values": lambda x, w: (torch.where(w.flatten() > 0)[0], x.sum()),
    "repeats that depend on values": lambda x, w: x.sum() + torch.repeat_interleave((w[0] > 0).long() + 1).sum(),
    "a permutation by einsum": lambda x, w: written(torch.einsum("ij->ji", w * 2), x),
    "a secret view": lambda x, w: written(torch.ops.aten._unsafe_view(w * 2, (2, 8)), x),
    "a secret split": lambda x, w: written(torch.unsafe_split(w * 2, 2)[0], x),
    "running statistics": lambda x, w: functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=True) + w[0],
    "not dense": lambda x, w: torch.sparse.mm((w * 2).to_sparse(), x.t()),
    "a part of another": lambda x, w: ((w * 2)[1:, 1:].t(), x),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the exported graph behaves as in training:UserWarning")
@pytest.mark.parametrize("name", HARD)
def test_graphs_that_are_hard_to_hoist(name: str, tmp_path: Path) -> None:
    models = [WithFunction(HARD[name], seed) for seed in range(2)]
    artifact = export(models[0], (X,), out=tmp_path / "a")
    files = [pack(model, artifact, out=tmp_path / f"{number}.safetensors").path for number, model in enumerate(models)]
    for prologue, residency in ((True, "double"), (True, "single"), (False, "double")):
        served = load(artifact, files[0], residency=residency, prologue=prologue)
        assert prologue or hoisted(served) == []
        for number in (0, 1, 0, 1, 1, 0):
            served.swap(files[number])
            for x in (X, X, X + 1):
                assert equal(served(x), models[number](x)), (number, prologue)


class Program(nn.Module):
    """A random sequence of operators over an input and two weights, with views, copies and writes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.one = nn.Parameter(torch.randn(4, 4))
        self.two = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        choose = random.Random(self.seed)
        values = [x.clone(), self.one * 1, self.two + 0.5, self.one.t(), self.two]
        owned = {0, 1, 2}  # values that may be written to
        for _ in range(12):
            index, other = choose.randrange(len(values)), choose.randrange(len(values))
            kind = choose.choice(["new", "view", "write"])
            if kind == "write" and index in owned:
                choose.choice(WRITES)(values[index], values[other])
            elif kind != "write":
                values.append(choose.choice(NEW if kind == "new" else VIEWS)(values[index], values[other]))
                owned |= {len(values) - 1} if kind == "new" or index in owned else set()
        return tuple(values)


Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NEW: tuple[Operation, ...] = (torch.mul, torch.matmul, lambda a, b: torch.tanh(a + b))
VIEWS: tuple[Operation, ...] = (
    lambda a, b: a.t(),
    lambda a, b: a.reshape(16).view(4, 4),
    lambda a, b: a.contiguous(),
    lambda a, b: a.type_as(b),
)
WRITES: tuple[Operation, ...] = (lambda a, b: a.add_(b.clone()), lambda a, b: a.mul_(b.clone()))


@torch.no_grad()
def programs(folder: Path) -> Iterator[tuple[int, nn.Module, Model]]:
    for seed in range(30):
        torch.manual_seed(seed)
        eager = Program(seed)
        try:
            artifact = export(eager, (torch.randn(4, 4),), out=folder / f"a{seed}")
        except CaptureError:  # it writes to a weight
            continue
        yield seed, eager, load(artifact, pack(eager, artifact, out=folder / f"v{seed}.safetensors").path)


@torch.no_grad()
@pytest.mark.slow
def test_random_programs_give_what_eager_gives(tmp_path: Path) -> None:
    counts = []
    for seed, eager, model in programs(tmp_path):
        for _ in range(3):
            x = torch.randn(4, 4)
            assert equal(model(x), eager(x)), seed
        counts.append(len(hoisted(model)))
    assert len(counts) > 20
    assert sum(count > 0 for count in counts) > 10


def test_the_artifacts_of_the_swap_tests_have_a_prologue(tmp_path: Path) -> None:
    files = RichFiles(tmp_path, 1)
    model = load(files.artifact, files.full[0])
    assert hoisted(model)
    assert torch.equal(model(RICH_X), files.eager(files.whole(0)))
