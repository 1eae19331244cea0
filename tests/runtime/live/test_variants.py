"""Variants: sets of tensors that calls choose, over one set of weights that is swapped independently."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from safetensors.torch import save_file
from torch import nn

from tests.support.context_machine import ContextMachine, which
from tests.support.graph_calls import hold_calls
from tests.support.machines import run_in_any_order
from weightswap_exporter import export, pack
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    CaptureError,
    Event,
    ExportError,
    Model,
    NonFiniteWeights,
    StagingBusy,
    StaleState,
    UnexpectedWeights,
    UnknownName,
    Unsupported,
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
    with pytest.raises(UnknownName):
        model(X, variants={"low": "mine"})
    assert model.variant_history[-1].kind == "dropped"
    with pytest.raises(StaleState):
        model.add_variant("low", "mine", files.path("low", 1), base="0" * 64)


def test_a_pin_does_not_take_what_goes_with_other_weights(files: Files) -> None:
    model = load(files.artifact, files.weights[0])
    with model.pin() as pinned:
        model.swap(files.weights[1])
        model.add_variant("low", "new", files.path("low", 0), base=model.weights_id)
        with pytest.raises(StaleState):
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
    with pytest.raises(UnknownName):
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
        assert held.inside.wait(120)
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
    assert held.inside.wait(120)
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
    with pytest.raises(StaleState):
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


class VariantMachine(ContextMachine):
    """Machine with variants, which come and go, and which calls choose."""

    files: Files

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, int] = {}

    @rule(name=NAMES, seed=st.integers(0, 3))
    def add(self, name: str, seed: int) -> None:
        self.model.add_variant("low", name, self.files.path("low", seed))
        self.named[name] = seed

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.named:
            self.model.remove_variant("low", name)
            del self.named[name]

    @rule(which=which, factor=st.integers(-2, 2), name=st.none() | NAMES)
    def call(self, which: int, factor: int, name: str | None) -> None:  # type: ignore[override]
        if name is None or name in self.named:
            self._call(which, factor, self.named.get(name or ""), variants={"low": name})
        else:
            with pytest.raises(UnknownName):
                self.model(self.given(factor), variants={"low": name})

    @invariant()
    def names_are_those_that_were_given(self) -> None:
        if hasattr(self, "model"):
            assert self.model.variants["low"].keys() == self.named.keys()


def interleave(files: Files, engine: str, examples: int = 25) -> None:
    given = {"artifact": files.artifact.path, "weights": files.weights, "folder": files.folder, "x": X}
    eager = staticmethod(lambda base, variant: files.eager(base, {} if variant is None else {"low": variant}))
    run_in_any_order(VariantMachine, examples, 20, files=files, engine=engine, eager=eager, **given)


def test_interleaved_with_contexts(files: Files) -> None:
    interleave(files, "torch", 100)
