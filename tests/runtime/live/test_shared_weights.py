"""Several artifacts over one set of weights: one swap changes all of them in one commit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Counter, Does
from tests.support.refusals import because
from tests.support.sessions import sessions_of
from tests.support.setups import different
from tests.support.storm import Ledger, content, storm
from weightswap_exporter import export, pack
from weightswap_runtime import (
    Artifact,
    ContextError,
    GoldenMismatch,
    Model,
    StagingBusy,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.live.store import WeightStore


class Encoder(nn.Module):
    """A model that takes tokens, or embeddings that were looked up before: it gives two artifacts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class FromEmbeddings(Encoder):
    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        return self.head(embeddings)


TOKENS = torch.arange(5)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact, list[Path]]:
    folder = tmp_path_factory.mktemp("shared")
    one = export(Encoder().eval(), (TOKENS,), out=folder / "tokens.artifact")
    other = export(FromEmbeddings().eval(), (torch.zeros(5, 8),), out=folder / "embeddings.artifact")
    files = [folder / f"v{seed}.safetensors" for seed in range(3)]
    for seed, file in enumerate(files):
        pack(different(Encoder, seed), one, out=file)
    return one, other, files


def serve(one: Model, other: Model, seed: int) -> bool:
    eager = different(Encoder, seed)
    with torch.no_grad():
        embeddings = eager.embed(TOKENS)
        expected = eager(TOKENS)
        return torch.equal(one(TOKENS), expected) and torch.equal(other(embeddings), eager.head(embeddings))


def test_one_swap_changes_all(shelf: tuple[Artifact, Artifact, list[Path]], residency: str) -> None:
    first, second, files = shelf
    one = load(first, files[0], residency=residency, keep_previous="host")
    other = load(second, share=one)
    assert serve(one, other, 0)
    for model, seed in ((one, 1), (other, 2)):  # the files were packed for the first artifact
        model.swap(files[seed])
        assert serve(one, other, seed)
    assert one.generation == other.generation == 2
    assert one.weights_id == other.weights_id
    assert one.history == other.history
    assert [receipt.graph_id for receipt in one.history] == [first.graph_id, first.graph_id, second.graph_id]
    other.rollback()
    assert serve(one, other, 1)
    with one.stage(files[0]) as staged:
        with pytest.raises(StagingBusy):
            other.swap(files[2])
        staged.commit()
    assert serve(one, other, 0)


def test_goldens_of_a_model_that_is_dropped_meanwhile_do_no_harm(
    tmp_path: Path, residency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(4, 4).eval(), torch.ones(1, 4)
    first = export(model, (x,), out=tmp_path / "first.artifact")
    second = export(model, (x,), out=tmp_path / "second.artifact", goldens=[((x,), {})])
    files = [pack(nn.Linear(4, 4), first, out=tmp_path / f"v{seed}.safetensors").path for seed in range(2)]
    others: list[Model] = []

    verify = WeightStore._verify

    def dropping(*args: Any) -> None:
        others.clear()
        gc.collect()
        verify(*args)

    monkeypatch.setattr(WeightStore, "_verify", dropping)
    for only in (None, "bias", "weight"):
        one = load(first, files[0], residency=residency, keep_previous="host")  # type: ignore[arg-type]
        others.append(load(second, share=one))
        assert one.swap(files[1], only=only).verified in ("none", "finite")  # some sessions still have its graph
        assert not others


def test_a_pin_of_one_holds_both(shelf: tuple[Artifact, Artifact, list[Path]]) -> None:
    first, second, files = shelf
    one = load(first, files[0])
    other = load(second, share=one)
    with other.pin() as pinned:
        one.swap(files[1])
        eager = different(Encoder, 0)
        with torch.no_grad():
            assert torch.equal(pinned(torch.ones(5, 8)), eager.head(torch.ones(5, 8)))
        assert pinned.weights_id != one.weights_id


def test_an_ensemble_never_answers_from_two_generations(
    shelf: tuple[Artifact, Artifact, list[Path]], residency: str
) -> None:
    """Each call of one model sees the weights that either has committed last."""
    first, second, files = shelf
    one = load(first, files[0], residency=residency)
    other = load(second, share=one)
    answers = {content(different(Encoder, seed)(TOKENS)): seed for seed in range(3)}
    ledger = Ledger(one, 0)
    with storm(lambda _: ledger.watch(lambda: one(TOKENS), answers), 2) as seen:
        for swap in range(60):
            ledger.committed((one, other)[swap % 2].swap(files[swap % 3]), swap % 3)
    ledger.check(seen)


def test_other_weights_cannot_be_shared(shelf: tuple[Artifact, Artifact, list[Path]], tmp_path: Path) -> None:
    first, _, files = shelf
    strange = export(nn.Linear(8, 3).eval(), (torch.zeros(1, 8),), out=tmp_path / "strange.artifact")
    model = load(first, files[0])
    with pytest.raises(
        Unsupported, match=r"weights differs: bias, embed\.weight, head\.bias, head\.weight, weight"
    ) as told:
        load(strange, share=model)
    said = str(told.value).splitlines()
    assert said[1] == "expected bias: none, found F32[3]"
    assert said[2] == "expected embed.weight: F32[50, 8], found none"
    assert said[-1].startswith("share= needs weights with the same names, types, shapes, ties and order in memory")
    with model.stage(files[1]), pytest.raises(StagingBusy):
        load(first, share=model)
    assert torch.equal(load(first, share=model)(TOKENS), model(TOKENS))


def test_goldens_of_every_artifact_are_tried(shelf: tuple[Artifact, Artifact, list[Path]], tmp_path: Path) -> None:
    first, _, files = shelf
    embeddings = torch.full((5, 8), 1e30)
    own = export(
        different(FromEmbeddings, 0), (embeddings,), out=tmp_path / "own.artifact", goldens=[((embeddings,), {})]
    )
    one = load(first, files[0])
    other = load(own, share=one)
    large = different(Encoder, 1)
    with torch.no_grad():
        large.head.weight.mul_(1e20)
    assert large(TOKENS).isfinite().all()
    path = pack(large, first, out=tmp_path / "large.safetensors").path
    with pytest.raises(GoldenMismatch):
        one.swap(path)
    assert one.generation == other.generation == 0
    with other.pin() as pinned:  # a pin keeps what it calls
        del other
        gc.collect()
        assert pinned(torch.zeros(5, 8)).isfinite().all()
        with pytest.raises(GoldenMismatch):
            one.swap(path)
    del pinned
    gc.collect()
    one.swap(path)  # what cannot be called any more has no say


def test_models_that_are_dropped_or_fail_to_load_leave_nothing(
    shelf: tuple[Artifact, Artifact, list[Path]], tmp_path: Path
) -> None:
    first, second, files = shelf
    one = load(first, files[0])
    for _ in range(3):
        load(second, share=one)
        with pytest.raises(WeightFileError):
            load(second, tmp_path / "none.safetensors", share=one)
    gc.collect()
    assert len(one._store._members) == 1
    assert [len(session.bound) for session in sessions_of(one)] == [1, 1]
    one.swap(files[1])
    other = load(second, share=one)
    assert serve(one, other, 1)
    with pytest.raises(Unsupported, match="expected a model"):
        load(second, share="model")  # type: ignore[arg-type]


def test_each_keeps_its_own_state(tmp_path: Path, residency: str) -> None:
    artifacts = [export(Counter().eval(), (torch.zeros(2, 3),), out=tmp_path / f"{name}.artifact") for name in "ab"]
    path = pack(different(Counter, 1), artifacts[0], out=tmp_path / "v.safetensors").path
    one = load(artifacts[0], path, residency=residency)
    other = load(artifacts[1], share=one)
    x = torch.ones(2, 3)
    contexts = one.new_context(on_swap="reset"), other.new_context(on_swap="reset")
    fresh = one(x, context=contexts[0])
    assert not torch.equal(one(x, context=contexts[0]), fresh)
    assert torch.equal(other(x, context=contexts[1]), fresh)
    with pytest.raises(ContextError, check=because("mismatch")):
        other(x, context=contexts[0])
    receipt = other.swap(pack(different(Counter, 2), artifacts[0], out=tmp_path / "w.safetensors").path)
    assert receipt.contexts == {"reset": 2}
    assert torch.equal(one(x, context=contexts[0]), one(x))
    assert torch.equal(other(x, context=contexts[1]), other(x))


def test_refusals_to_share_say_orders_and_ties(tmp_path: Path) -> None:
    plain, turned, tied = (nn.Sequential(nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 2)).eval() for _ in range(3))
    turned.to(memory_format=torch.channels_last)
    tied[1].weight = tied[0].weight
    x = torch.ones(1, 4, 3, 3)
    model = load(export(plain, (x,), out=tmp_path / "plain.artifact"))
    with pytest.raises(Unsupported, match=r"found F32\[4, 4, 2, 2\], in strides of"):
        load(export(turned, (x,), out=tmp_path / "turned.artifact"), share=model)
    with pytest.raises(Unsupported, match=r"0\.weight: F32\[4, 4, 2, 2\], found F32\[4, 4, 2, 2\], tied to 1\.weight"):
        load(export(tied, (x,), out=tmp_path / "tied.artifact"), share=model)


def test_a_module_has_the_constants_of_every_artifact_that_shares_its_weights(tmp_path: Path) -> None:
    def times(number: float) -> nn.Module:
        scale = nn.Buffer(torch.tensor(number), persistent=False)
        return Does(lambda m, x: m.linear(x) * m.scale, linear=nn.Linear(3, 3), scale=scale).eval()

    x, one, three = torch.ones(2, 3), times(1.0), times(3.0)
    first, second = (export(model, (x,), out=tmp_path / name) for model, name in ((one, "a"), (three, "b")))
    model = load(first, one)
    assert torch.equal(model(x), one(x))
    other = load(second, share=model)
    with pytest.raises(WeightsMismatch, match="scale, which is a constant of the graph"):
        model.swap(one)
    model.swap(dict(one.named_parameters()))
    assert torch.equal(other(x), model(x) * 3)
