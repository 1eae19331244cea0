"""Variants: sets of tensors that calls choose, over one set of weights that is swapped independently."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import save_file
from torch import nn

from tests.support.graph_calls import hold_calls
from tests.support.remembering import POLICIES, Policy
from weightswap_exporter import export, pack
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    CaptureError,
    Context,
    Event,
    ExportError,
    Model,
    NonFiniteWeights,
    StagingBusy,
    StaleState,
    UnexpectedWeights,
    UnknownName,
    Unsupported,
    WaitTimeout,
    WeightFileError,
    WeightsMismatch,
    load,
)

WIDTH = 4
X = torch.arange(WIDTH, dtype=torch.float32).reshape(1, WIDTH)


class Tuned(nn.Module):
    """A layer with two groups of tensors that may be variants, and a running sum of its inputs."""

    def __init__(self, base: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.low_a = nn.Parameter(torch.zeros(WIDTH, 2))
        self.low_b = nn.Parameter(torch.zeros(2, WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("total", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.mix(self.total) + x @ self.low_a @ self.low_b + self.shift


class Files:
    """An artifact, weights 0 and 1, and variants 0 to 3 of each group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifact = export(Tuned(0), (X,), out=folder / "a", variants={"low": "low_*", "shift": ["shift"]})
        self.weights = [pack(Tuned(base), self.artifact, out=folder / f"{base}.safetensors").path for base in range(2)]
        self.tensors = {}
        for seed in range(4):
            generator = torch.Generator().manual_seed(100 + seed)
            low = {
                "low_a": torch.randn(WIDTH, 2, generator=generator),
                "low_b": torch.randn(2, WIDTH, generator=generator),
            }
            for group, found in (("low", low), ("shift", {"shift": torch.randn(WIDTH, generator=generator)})):
                self.tensors[group, seed] = found
                save_file(found, self.path(group, seed))

    def path(self, group: str, seed: int) -> Path:
        return self.folder / f"{group}{seed}.safetensors"

    def eager(self, base: int, chosen: dict[str, int]) -> Tuned:
        model = Tuned(base)
        found = {name: tensor for item in chosen.items() for name, tensor in self.tensors[item].items()}
        model.load_state_dict(found, strict=False)
        return model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("variants"))


@pytest.fixture(params=["double", "single"])
def model(request: pytest.FixtureRequest, files: Files) -> Model:
    return load(files.artifact, files.weights[0], residency=request.param, max_variants=2)


@torch.no_grad()
def answer(files: Files, base: int, **chosen: int) -> torch.Tensor:
    return files.eager(base, chosen)(X)


def test_a_call_chooses_by_name(model: Model, files: Files) -> None:
    receipt = model.add_variant("low", "a", files.path("low", 0), by="me")
    model.add_variant("low", "b", files.path("low", 1))
    model.add_variant("shift", "s", files.path("shift", 2))
    assert torch.equal(model(X), answer(files, 0))
    assert torch.equal(model(X, variants={"low": "a"}), answer(files, 0, low=0))
    assert torch.equal(model(X, variants={"low": "b", "shift": "s"}), answer(files, 0, low=1, shift=2))
    assert torch.equal(model(X, variants={"low": None}), answer(files, 0))
    with model.pin() as pinned:
        assert torch.equal(pinned(X, variants={"low": "b"}), answer(files, 0, low=1))
    assert (receipt.kind, receipt.by, receipt.graph_id) == ("added", "me", model.graph_id)
    assert model.variants["low"]["a"] == receipt
    assert [each.name for each in model.variant_history] == ["a", "b", "s"]


def test_a_swap_of_the_base_keeps_variants_and_drops_those_of_another_base(model: Model, files: Files) -> None:
    model.add_variant("low", "any", files.path("low", 0))
    model.add_variant("low", "mine", files.path("low", 1), base=model.weights_id)
    receipt = model.swap(files.weights[1])
    assert receipt.variants == {"kept": ("low/any",), "dropped": ("low/mine",)}
    assert torch.equal(model(X, variants={"low": "any"}), answer(files, 1, low=0))
    with pytest.raises(UnknownName, match="'mine'"):
        model(X, variants={"low": "mine"})
    assert model.variant_history[-1].kind == "dropped"
    with pytest.raises(StaleState):
        model.add_variant("low", "mine", files.path("low", 1), base="0" * 64)


def test_a_pin_does_not_take_what_goes_with_other_weights(files: Files) -> None:
    model = load(files.artifact, files.weights[0])
    with model.pin() as pinned:
        model.swap(files.weights[1])
        model.add_variant("low", "new", files.path("low", 0), base=model.weights_id)
        with pytest.raises(StaleState, match="low/new"):
            pinned(X, variants={"low": "new"})


@pytest.mark.parametrize(
    ("wanted", "text"),
    [({"low": "a"}, "'a'"), ({"high": "a"}, "'high'"), ("low", "expected a dict"), ({"low": 3}, "has no 3")],
)
def test_variants_that_are_not_resident_are_refused_by_name(model: Model, files: Files, wanted: Any, text: str) -> None:
    with pytest.raises(UnknownName, match=text):
        model(X, variants=wanted)
    assert torch.equal(model(X), answer(files, 0))


def broken(files: Files, tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    found = {**files.tensors["low", 0], **changes}
    path = tmp_path / "broken.safetensors"
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)
    return path


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"low_a": None}, WeightsMismatch, "low_a: missing"),
        ({"low_c": torch.zeros(2)}, WeightsMismatch, "low_c: not in the graph"),
        ({"low_a": torch.zeros(WIDTH, 3)}, WeightsMismatch, r"expects F32 ?\[4, 2\], the file has F32 ?\[4, 3\]"),
        ({"low_a": torch.zeros(WIDTH, 2, dtype=torch.int64)}, WeightsMismatch, "I64"),
        ({"low_a": torch.full((WIDTH, 2), torch.nan)}, NonFiniteWeights, "low_a: 8 NaN"),
    ],
)
def test_files_that_do_not_fit_change_nothing(
    files: Files, tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    model, told = load(files.artifact, files.weights[0]), list[Event]()
    model.listen(told.append)
    before = model.add_variant("low", "a", files.path("low", 1))
    with pytest.raises(error, match=text):
        model.add_variant("low", "a", broken(files, tmp_path, **changes))
    assert model.variants["low"] == {"a": before}
    assert torch.equal(model(X, variants={"low": "a"}), answer(files, 0, low=1))
    assert [event.kind for event in told] == ["variant added", "variant refused"]


def test_other_refusals(files: Files, tmp_path: Path) -> None:
    model = load(files.artifact, files.weights[0])
    with pytest.raises(WeightFileError):
        model.add_variant("low", "a", tmp_path / "absent.safetensors")
    with pytest.raises(UnknownName, match="'high'"):
        model.add_variant("high", "a", files.path("low", 0))
    with pytest.raises(UnexpectedWeights):
        model.add_variant("low", "a", files.path("low", 0), expect="0" * 64)
    with pytest.raises(UnknownName):
        model.remove_variant("low", "a")
    with pytest.raises(Unsupported, match="max_variants"):
        load(files.artifact, max_variants=0)
    assert model.variants == {"low": {}, "shift": {}}


def test_the_least_recently_used_goes_and_those_in_use_stay(
    model: Model, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        model.add_variant("low", name, files.path("low", 0))
    model(X, variants={"low": "a"})
    model.add_variant("low", "c", files.path("low", 1))
    assert list(model.variants["low"]) == ["a", "c"]
    held = hold_calls(monkeypatch)
    threads = [threading.Thread(target=model, args=(X,), kwargs={"variants": {"low": name}}) for name in "ac"]
    for thread in threads:
        held.inside.clear()
        thread.start()
        assert held.inside.wait(30)
    with pytest.raises(StagingBusy):
        model.add_variant("low", "d", files.path("low", 1))
    held.go_on.set()
    for thread in threads:
        thread.join()
    assert list(model.variants["low"]) in (["a", "c"], ["c", "a"])
    model.add_variant("low", "d", files.path("low", 1))
    assert len(model.variants["low"]) == 2


def test_a_running_call_keeps_what_it_has_chosen(model: Model, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    model.add_variant("low", "a", files.path("low", 0))
    found: list[torch.Tensor] = []
    held = hold_calls(monkeypatch)
    thread = threading.Thread(target=lambda: found.append(model(X, variants={"low": "a"})))
    thread.start()
    assert held.inside.wait(30)
    replaced = model.add_variant("low", "a", files.path("low", 1))
    held.go_on.set()
    thread.join()
    assert torch.equal(found[0], answer(files, 0, low=0))
    assert replaced.kind == "replaced"
    assert torch.equal(model(X, variants={"low": "a"}), answer(files, 0, low=1))
    assert model.remove_variant("low", "a").kind == "removed"


def test_a_context_stays_with_its_variant(model: Model, files: Files, tmp_path: Path) -> None:
    model.add_variant("low", "a", files.path("low", 0))
    context = model.new_context()
    model(X, context=context, variants={"low": "a"})
    with pytest.raises(StaleState, match="with low"):
        model(X, context=context)
    context.save(tmp_path / "saved")
    loaded = model.load_context(tmp_path / "saved")
    with pytest.raises(StaleState):
        model(X, context=loaded)
    eager = files.eager(0, {"low": 0})
    with torch.no_grad():
        eager(X)
        assert torch.equal(model(X, context=loaded, variants={"low": "a"}), eager(X))
    freed = model.load_context(tmp_path / "saved", allow_other_weights=True)
    model(X, context=freed)


def test_exports_refuse_what_cannot_be_variable(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"low": "high_*"}, ExportError, "matches no parameter"),
        ({"low": "low_*", "other": "low_a"}, ExportError, "in the groups"),
        ({"no name": "low_*"}, ExportError, "identifier"),
    ]
    for variants, error, text in refused:
        with pytest.raises(error, match=text):
            export(Tuned(0), (X,), out=tmp_path / "a", variants=variants)
    unread = Tuned(0)
    unread.unused = nn.Parameter(torch.zeros(2))
    with pytest.raises(CaptureError, match="no method reads unused"):
        export(unread, (X,), out=tmp_path / "a", variants={"low": ["unused", "low_*"]})
    assert not list(tmp_path.iterdir())


def test_the_format_version_tells_old_readers(files: Files, tmp_path: Path) -> None:
    assert files.artifact.manifest.format_version == 2
    plain = export(Tuned(0), (X,), out=tmp_path / "plain")
    assert plain.manifest.format_version == 1
    assert b'"variants"' not in (tmp_path / "plain" / "manifest.json").read_bytes()
    manifest = tmp_path / "plain" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format_version": 1', b'"format_version": 4'))
    with pytest.raises(ArtifactError, match="version 4; this runtime reads 1 to 3"):
        Artifact.open(tmp_path / "plain")


NAMES = st.sampled_from(["a", "b", "c"])
SEEDS = st.integers(0, 3)


MOST = 4
ANY = -1  # variants of a context that was loaded onto other weights


@dataclass
class Held:
    """A context, its expected state, and what that was made with (None and ... before the first call)."""

    context: Context
    total: torch.Tensor
    base: int | None = None
    variant: Any = ...

    def is_stale(self, base: int, variant: int | None) -> bool:
        return self.variant is not ... and (self.base != base or self.variant not in (ANY, variant))


class Interleaved(RuleBasedStateMachine):
    """A random sequence of calls, saves, loads, swaps, rollbacks and variants, checked against eager models."""

    files: Files
    engine = "torch"

    @initialize(residency=st.sampled_from(["double", "single"]))
    def start(self, residency: Any) -> None:
        self.model = load(
            self.files.artifact.path,
            self.files.weights[0],
            engine=self.engine,
            residency=residency,
            keep_previous="host",
        )
        self.single = residency == "single"
        self.x: Any = X.numpy() if self.engine == "onnx" else X
        self.base, self.previous = 0, None
        self.named: dict[str, int] = {}
        self.contexts: list[Held] = []

    def teardown(self) -> None:
        for held in getattr(self, "contexts", ()):
            held.context.close()

    @rule(name=NAMES, seed=SEEDS)
    def add(self, name: str, seed: int) -> None:
        self.model.add_variant("low", name, self.files.path("low", seed))
        self.named[name] = seed

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.named:
            self.model.remove_variant("low", name)
            del self.named[name]

    @rule(base=st.integers(0, 1))
    def swap(self, base: int) -> None:
        if self.pinned if self.single else self.idle_is_pinned:
            with pytest.raises(WaitTimeout):
                self.model.swap(self.files.weights[base])
        else:
            self.model.swap(self.files.weights[base])
            self.base, self.previous = base, self.base

    @rule()
    def rollback(self) -> None:
        if self.previous is None:
            return
        if self.single and self.pinned:
            with pytest.raises(WaitTimeout):
                self.model.rollback()
        else:
            self.model.rollback()
            self.base, self.previous = self.previous, self.base

    @property
    def pinned(self) -> bool:
        return any(held.context.on_swap == "pin" for held in self.contexts)

    @property
    def idle_is_pinned(self) -> bool:
        current = self.model._gate.current
        pins = [held.context._pinned for held in self.contexts]
        return any(pin is not None and current is not None and pin.session is not current.session for pin in pins)

    @precondition(lambda self: len(self.contexts) < MOST)
    @rule(policy=st.sampled_from(POLICIES))
    def begin(self, policy: Policy) -> None:
        context = self.model.new_context(on_swap=policy)
        self.contexts.append(Held(context, torch.zeros(1, WIDTH), self.base if policy == "pin" else None))

    @precondition(lambda self: self.contexts)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        self.contexts.pop(which % len(self.contexts)).context.close()

    @precondition(lambda self: 0 < len(self.contexts) < MOST)
    @rule(which=st.integers(0, 9), policy=st.sampled_from(["invalidate", "reset", "keep"]))
    def save_and_load(self, which: int, policy: Policy) -> None:
        held = self.contexts[which % len(self.contexts)]
        path = self.files.folder / "context"
        held.context.save(path)
        loaded = self.model.load_context(path, on_swap=policy, allow_other_weights=True)
        begun = held.variant is not ...
        self.contexts.append(Held(loaded, held.total.clone(), self.base if begun else None, ANY if begun else ...))

    @rule(which=st.integers(0, 9), name=st.none() | NAMES)
    def call(self, which: int, name: str | None) -> None:
        if name is not None and name not in self.named:
            with pytest.raises(UnknownName):
                self.model(self.x, variants={"low": name})
            return
        seed = None if name is None else self.named[name]
        if not self.contexts:
            found = self.model(self.x, variants={"low": name})
            assert self.same(found, self.eager(self.base, seed)(X))
            return
        held = self.contexts[which % len(self.contexts)]
        pinned = held.context.on_swap == "pin"
        base = held.base if pinned and held.base is not None else self.base
        total = held.total
        if held.is_stale(base, seed):
            if held.context.on_swap in ("invalidate", "pin"):
                with pytest.raises(StaleState):
                    self.model(self.x, context=held.context, variants={"low": name})
                return
            if held.context.on_swap == "reset":
                total = torch.zeros_like(total)
        eager = self.eager(base, seed)
        eager.total.copy_(total)
        assert self.same(self.model(self.x, context=held.context, variants={"low": name}), eager(X))
        held.total.copy_(eager.total)
        held.base, held.variant = base, seed

    def eager(self, base: int, seed: int | None) -> Tuned:
        return self.files.eager(base, {} if seed is None else {"low": seed})

    def same(self, found: Any, expected: torch.Tensor) -> bool:
        if self.engine == "torch":
            return torch.equal(found, expected.detach())
        return torch.allclose(torch.as_tensor(found), expected.detach(), rtol=1e-4, atol=1e-4)

    @invariant()
    def names_are_those_that_were_given(self) -> None:
        if hasattr(self, "model"):
            assert self.model.variants["low"].keys() == self.named.keys()


def interleave(files: Files, engine: str) -> None:
    case = type("Case", (Interleaved,), {"files": files, "engine": engine}).TestCase
    case.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
    case("runTest").runTest()


def test_interleaved_with_contexts(files: Files) -> None:
    interleave(files, "torch")
