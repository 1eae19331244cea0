"""Cold B versus warm A -> B: a swapped model equals a freshly loaded one, whatever the way of the weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import nn

from tests.support.sessions import live_bytes
from tests.support.setups import equal
from tests.support.varied import Origin, RichFiles, X, small_blocks
from weightswap_exporter import export, pack
from weightswap_runtime import Model, UnexpectedWeights, load

SETS = 3
PATTERN = "[cfm]*"  # the convolution, the fused weights, and the linear layer


@pytest.fixture(scope="module", params=[64, 1 << 20], ids=["many blocks", "one block"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RichFiles]:
    with small_blocks(request.param):
        yield RichFiles(tmp_path_factory.mktemp("cold"), SETS)


def through(a: int, b: int) -> int:
    """Return a third set."""
    return next(seed for seed in range(SETS) if seed not in (a, b))


def delta_back_and_forth(model: Model, files: RichFiles, a: int, b: int) -> None:
    """Go A -> B -> A -> B; in double residency each delta finds the arena that the one before has left."""
    for base, new in ((a, b), (b, a), (a, b)):
        model.swap(files.deltas[base, new])


def two_rollbacks(model: Model, files: RichFiles, a: int, b: int) -> None:
    model.swap(files.full[b])
    model.rollback()
    model.rollback()


def rollback_of_a_delta(model: Model, files: RichFiles, a: int, b: int) -> None:
    model.swap(files.full[b])
    model.swap(files.deltas[b, a])
    model.rollback()


def rollback_of_a_part(model: Model, files: RichFiles, a: int, b: int) -> None:
    model.swap(files.full[b])
    model.swap(files.full[a], only=PATTERN)
    model.rollback()


def rollback_after_a_discard(model: Model, files: RichFiles, a: int, b: int) -> None:
    model.swap(files.full[b])
    model.swap(files.full[a])
    model.stage(files.deltas[a, through(a, b)]).discard()
    model.rollback()


def delta_after_a_discard(model: Model, files: RichFiles, a: int, b: int) -> None:
    model.stage(files.full[through(a, b)]).discard()
    model.swap(files.deltas[a, b])


def delta_after_a_restore(model: Model, files: RichFiles, a: int, b: int) -> None:
    rollback_after_a_discard(model, files, b, a)
    model.swap(files.deltas[a, b])


def both_parts(model: Model, files: RichFiles, a: int, b: int) -> None:
    """Swap part by part, from the weight file and from the checkpoint."""
    model.swap(files.full[b], only=PATTERN)
    model.swap(files.checkpoints[b], only=["e*", "scale"])


def tried(model: Model, files: RichFiles, a: int, b: int) -> None:
    """Try staged weights first: a trial call leaves no traces, not even in state."""
    with model.stage(files.deltas[a, b]) as staged:
        staged.count(X)
        staged.commit()


Way = Callable[[Model, RichFiles, int, int], object]
WAYS: dict[str, Way] = {
    "full": lambda model, files, a, b: model.swap(files.full[b]),
    "checkpoint": lambda model, files, a, b: model.swap(files.checkpoints[b]),
    "delta": lambda model, files, a, b: model.swap(files.deltas[a, b]),
    "everything as a part": lambda model, files, a, b: model.swap(files.full[b], only="*"),
    "background": lambda model, files, a, b: model.stage(files.full[b], background=True).commit(),
    "background delta": lambda model, files, a, b: model.stage(files.deltas[a, b], background=True).commit(),
    **{
        way.__name__.replace("_", " "): way
        for way in (
            delta_back_and_forth,
            two_rollbacks,
            rollback_of_a_delta,
            rollback_of_a_part,
            rollback_after_a_discard,
            delta_after_a_discard,
            delta_after_a_restore,
            both_parts,
            tried,
        )
    },
}


class Seen(NamedTuple):
    """Bit-exact observations: outputs, a fresh state, the served memory, and the id."""

    outputs: list[bytes]
    memory: dict[str, bytes]
    weights_id: str | None

    @classmethod
    def of(cls, model: Model) -> Seen:
        outputs = [call(X).numpy().tobytes() for call in (model, model.count, model, model.count)]
        return cls(outputs, live_bytes(model), model.weights_id)


@functools.cache
def cold(files: RichFiles, residency: Literal["double", "single"]) -> list[Seen]:
    """Observations of models loaded with each set."""
    return [Seen.of(load(files.artifact, full, residency=residency)) for full in files.full]


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_cold_b_equals_warm_a_to_b(way: Way, residency: Literal["double", "single"], files: RichFiles) -> None:
    for a, b in itertools.permutations(range(SETS), 2):
        warm = warmed(files, residency, a, fresh=(a, b) == (0, 1))
        warm.count(X)
        way(warm, files, a, b)
        assert Seen.of(warm) == cold(files, residency)[b]
        assert torch.equal(warm(X), files.eager(files.whole(b)))
        assert live_bytes(warm) == files.arena_bytes(files.whole(b))


def warmed(files: RichFiles, residency: Literal["double", "single"], a: int, *, fresh: bool) -> Model:
    """Model that serves A, freshly loaded or after it has served other sets."""
    if fresh:
        return load(files.artifact, files.full[a], residency=residency, keep_previous="host")
    model = used(files, residency)
    model.swap(files.full[a])
    return model


@functools.cache
def used(files: RichFiles, residency: Literal["double", "single"]) -> Model:
    return load(files.artifact, residency=residency, keep_previous="host")


@pytest.mark.pairwise
@pytest.mark.parametrize("pattern", ["conv.weight", "embed.*", "head.weight", "fused.*", "empty", "scale", PATTERN])
@pytest.mark.parametrize("source", ["full", "checkpoint"])
def test_a_part_of_b_in_a_is_what_eager_makes_of_both(
    source: str, pattern: str, residency: Literal["double", "single"], files: RichFiles
) -> None:
    for a, b in ((0, 1), (1, 2), (2, 0)):
        warm = used(files, residency)
        warm.swap(files.full[a])
        warm.swap((files.full if source == "full" else files.checkpoints)[b], only=pattern)
        expect(warm, files, files.mixed(files.whole(a), pattern, b))
        warm.rollback()
        expect(warm, files, files.whole(a))
        warm.rollback()
        expect(warm, files, files.mixed(files.whole(a), pattern, b))


@pytest.mark.pairwise
@pytest.mark.parametrize("end", ["refused", "discarded", "cancelled"])
def test_leftovers_of_a_staging_are_not_mistaken_for_earlier_weights(
    end: str, residency: Literal["double", "single"], files: RichFiles
) -> None:
    """Live weights and those in the other arena share most blocks, which the next part does not copy."""
    for a, b in itertools.permutations(range(SETS), 2):
        model, c = used(files, residency), through(a, b)
        model.swap(files.full[a])
        model.swap(files.full[b], only="conv.*")
        give_up(model, files.checkpoints[c], end)
        model.swap(files.full[b], only="mix.*")
        expect(model, files, files.mixed(files.mixed(files.whole(a), "conv.*", b), "mix.*", b))


def give_up(model: Model, path: Path, end: str) -> None:
    if end == "refused":
        with pytest.raises(UnexpectedWeights):
            model.swap(path, expect="0" * 64)
    elif end == "discarded":
        model.stage(path).discard()
    else:
        model.stage(path, background=True).wait().cancel()


@pytest.mark.pairwise
@pytest.mark.parametrize("part", ["conv.*", "scale"])
def test_the_arena_content_after_a_restoring_rollback_is_known(
    part: str, residency: Literal["double", "single"], files: RichFiles
) -> None:
    """C was staged over A, and A restored: a part of C must not find C's blocks in the arena."""
    for a, b in itertools.permutations(range(SETS), 2):
        model, c = used(files, residency), through(a, b)
        model.swap(files.full[a])
        model.swap(files.full[b])
        model.stage(files.full[c]).discard()
        model.rollback()
        expect(model, files, files.whole(a))
        model.swap(files.full[c])
        model.swap(files.full[b], only=part)
        expect(model, files, files.mixed(files.whole(c), part, b))


def expect(model: Model, files: RichFiles, origin: Origin) -> None:
    assert torch.equal(model(X), files.eager(origin))
    assert live_bytes(model) == files.arena_bytes(origin)
    assert model.weights_id == files.weights_id(origin)


class Observed(nn.Module):
    """Observer of quantisation-aware training: its minimum and maximum are empty until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("least", torch.tensor([]))
        self.register_buffer("most", torch.tensor([]))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("zero", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        observed = self.least, self.most, self.scale, self.zero
        y = torch.fused_moving_avg_obs_fake_quant(x.t(), self.on, self.on, *observed, 0.01, 0, 255, 0, True)
        return self.linear(y.t()), self.least


@pytest.mark.filterwarnings("ignore:calls observe values")
@torch.no_grad()
def test_state_that_a_call_resizes_starts_again(residency: Any, tmp_path: Path) -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(Observed().eval())
    artifact = export(models[0], (torch.ones(2, 3),), out=tmp_path / "a")
    files = [pack(model, artifact, out=tmp_path / f"v{seed}.safetensors").path for seed, model in enumerate(models)]
    served = load(artifact, files[0], residency=residency)
    x = torch.randn(2, 3)
    context = served.new_context(on_swap="reset")
    for turn in range(4):
        eager = deepcopy(models[turn % 2])
        first = served(x, context=context)
        seen = first[1].clone()
        assert equal(list(first), list(eager(x)))
        assert equal(list(served(x)), list(first))
        assert equal(list(served(x * 2, context=context)), list(eager(x * 2)))
        assert torch.equal(first[1], seen)  # a separate output, not the state
        served.swap(files[(turn + 1) % 2])


class Emptied(nn.Module):
    """Model whose state has no elements after a call, and whose output is in that memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.held.view(4).add_(x)
        self.held.resize_(0)
        return output


@torch.no_grad()
def test_an_output_that_lies_in_emptied_state_is_copied(residency: Any, tmp_path: Path) -> None:
    eager = Emptied().eval()
    artifact = export(eager, (torch.ones(4),), out=tmp_path / "a")
    served = load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path, residency=residency)
    context = served.new_context()
    output = served(torch.ones(4), context=context)
    (state,) = (tensor for _, tensor in context._state.values())  # type: ignore[union-attr]
    assert output.untyped_storage().data_ptr() != state.untyped_storage().data_ptr()
    assert torch.equal(output, torch.full((4,), 2.0))
