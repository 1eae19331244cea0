"""Models on several ranks: all change their weights, or none; what they do at once is the same, or is refused.

Ranks are threads here, with groups of gloo between them; tests/promises/never_a_mixture has processes.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from blake3 import blake3

from tests.support.damage import damaged
from tests.support.ranks import X, on_ranks, split_artifact, values, whole, write_goldens, write_set
from tests.support.sessions import bound_of
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import Model, Ranks, load, write_delta
from weightswap_runtime.errors import (
    ModelFailed,
    RanksLost,
    RanksRefused,
    Unsupported,
    WeightswapError,
)
from weightswap_runtime.following.desired_store import known_weights
from weightswap_runtime.format.cuts import SharedChange
from weightswap_runtime.live.residency import Single, StagedWeights
from weightswap_runtime.model import loading
from weightswap_runtime.staging import delta

RESIDENCIES = ("double", "single")


class Files:
    """An artifact for two ranks, and sets of weights for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.artifact = split_artifact(path / "two")
        self.sets = [write_set(path / f"{seed}.safetensors", seed) for seed in range(3)]
        self.ids = [known_weights(path).weights_id for path in self.sets]
        self.damaged = damaged(self.sets[2], path / "damaged.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("ranks"))


def serves(model: Model, seed: int) -> bool:
    """Return whether a call answers as one process with these weights, and every rank has them."""
    output, marks = model(X)
    assert torch.allclose(output, whole(values(seed), X), atol=1e-4)
    return marks.tolist() == [float(seed)] * len(marks)


def together(files: Files, work: Callable[[Model, Ranks], Any], size: int = 2, **options: Any) -> list[Any]:
    """Do something with a model that serves set 1, in each rank. Raises what a rank raises."""

    def run(ranks: Ranks) -> Any:
        with load(files.artifact, files.sets[1], ranks=ranks, **options) as model:
            return work(model, ranks)

    results = on_ranks(size, run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def caught(work: Callable[[], Any]) -> WeightswapError:
    with pytest.raises(WeightswapError) as info:
        work()
    return info.value


def test_swaps_and_rollbacks_reach_every_rank(residency: str, files: Files) -> None:
    def work(model: Model, _: Ranks) -> Any:
        assert serves(model, 1)
        before = model(X)[0]
        receipt = model.swap(files.sets[2], by="trainer")
        assert receipt.kind == "full"
        assert serves(model, 2)
        model.rollback()
        assert serves(model, 1)
        assert torch.equal(model(X)[0], before)
        return receipt.weights_id, model.weights_id

    one, other = together(files, work, residency=residency, keep_previous="host" if residency == "single" else None)
    assert one == other
    assert one[0] != one[1]


def test_one_file_serves_any_number_of_ranks(files: Files, tmp_path: Path) -> None:
    wide = split_artifact(tmp_path / "four", 4)
    path = write_set(tmp_path / "w.safetensors", 1, 4)

    def work(ranks: Ranks) -> bool:
        with load(wide, path, ranks=ranks) as model:
            return serves(model, 1)

    assert on_ranks(4, work) == [True] * 4


GIVEN: dict[str, Callable[[Path], Any]] = {
    "a file with digests": lambda path: write_set(path / "a.safetensors", 2),
    "without those of blocks": lambda path: write_set(path / "b.safetensors", 2, with_blocks=False),
    "a checkpoint": lambda path: checkpoint(path / "c.safetensors", 2),
    "parts of a trainer's ranks": lambda path: parts_of_ranks(path, 2),
    "a mapping": lambda _: content(2),
    "numpy": lambda _: {name: value.numpy() for name, value in content(2).items()},
    "an iterator": lambda _: iter(content(2).items()),
}


def content(seed: int) -> dict[str, torch.Tensor]:
    return values(seed) | {"mark": values(seed)["mark"][:2]}


def checkpoint(path: Path, seed: int) -> Path:
    safetensors.torch.save_file(content(seed), path)
    return path


def parts_of_ranks(folder: Path, seed: int) -> Path:
    """Write what torch's HuggingFaceStorageWriter writes of each of two ranks that have half of the rows."""
    for rank in range(2):
        parts = {name: value.chunk(2)[rank].contiguous() for name, value in content(seed).items()}
        offsets = {name: {"saved_offsets": [rank * len(part), *[0] * (part.ndim - 1)]} for name, part in parts.items()}
        name = f"shard-0000{rank}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(parts, folder / name, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    return folder


@pytest.mark.parametrize("kind", GIVEN)
def test_weights_may_come_from_anywhere(kind: str, residency: str, files: Files, tmp_path: Path) -> None:
    def work(model: Model, ranks: Ranks) -> str:
        (tmp_path / str(ranks.rank)).mkdir()
        receipt = model.swap(GIVEN[kind](tmp_path / str(ranks.rank)))
        assert serves(model, 2)
        return receipt.weights_id

    expected = together(files, lambda model, _: model.swap(files.sets[2]).weights_id)
    assert together(files, work, residency=residency) == expected


def test_parts_reach_every_rank(residency: str, files: Files) -> None:
    def work(model: Model, _: Ranks) -> None:
        model.swap(files.sets[2])
        receipt = model.swap(files.sets[0], only=["packed", "second"])
        mixed = values(2) | {name: values(0)[name] for name in ("packed", "second")}
        assert torch.allclose(model(X)[0], whole(mixed, X), atol=1e-4)
        assert receipt.weights_id == model.swap({**mixed, "mark": mixed["mark"][:2]}).weights_id

    together(files, work, residency=residency)


def test_calls_go_on_while_weights_are_staged_and_tried(residency: str, files: Files) -> None:
    def work(model: Model, _: Ranks) -> None:
        with model.stage(files.sets[2], background=True, rate_limit=2000) as staged:
            assert serves(model, 1)
            assert staged.wait()(X)[1].tolist() == [2.0, 2.0]
            assert serves(model, 1)
            assert staged.commit().kind == "full"
        assert serves(model, 2)

    together(files, work, residency=residency)


REFUSED: dict[str, Callable[[Files, int], tuple[Any, dict[str, Any]]]] = {
    "damaged": lambda files, rank: ((files.sets[2], files.damaged)[rank], {}),
    "missing": lambda files, rank: ((files.sets[2], files.path / "nowhere.safetensors")[rank], {}),
    "not finite": lambda files, rank: (
        content(2) | ({"bias": torch.full((4,), torch.nan)} if rank else {}),
        {"allow_nonfinite": False},
    ),
    "other weights": lambda files, rank: (files.sets[2 * rank], {}),
    "an option": lambda files, rank: (files.sets[2], {"timeout": -1.0} if rank else {}),
    "another id": lambda files, rank: (files.sets[2], {"expect": "0" * 64} if rank else {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_rank_refuses_no_rank_serves(what: str, residency: str, files: Files) -> None:
    def work(model: Model, ranks: Ranks) -> str:
        given, options = REFUSED[what](files, ranks.rank)
        before = model(X)[0], model.weights_id, model.generation
        error = caught(lambda: model.swap(given, **options))
        assert isinstance(error, RanksRefused)
        assert set(error.reasons) == ({0, 1} if what == "other weights" else {1})
        after = model(X)[0], model.weights_id, model.generation
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        model.swap(files.sets[0])  # the ranks are at one step
        assert serves(model, 0)
        return str(error)

    one, other = together(files, work, residency=residency)
    assert one == other


def test_a_refusal_of_the_staging_of_one_rank_ends_that_of_all(files: Files) -> None:
    """The other one would take twenty seconds."""

    def work(model: Model, ranks: Ranks) -> None:
        slow = {"rate_limit": 20.0} if ranks.rank == 0 else {}
        error = caught(lambda: model.swap(files.damaged if ranks.rank else files.sets[2], **slow))
        assert "DigestMismatch" in str(error)
        assert isinstance(error.__cause__, WeightswapError) == (ranks.rank == 1)
        assert serves(model, 1)

    began = time.monotonic()
    together(files, work)
    assert time.monotonic() - began < 15


def test_one_rank_may_take_longer_than_the_timeout_to_stage(files: Files) -> None:
    def run(ranks: Ranks) -> bool:
        with load(files.artifact, files.sets[1], ranks=ranks) as model:
            model.swap(files.sets[2], rate_limit=200.0 if ranks.rank else None)  # 600 bytes
            return serves(model, 2)

    assert on_ranks(2, run, timeout=2.0) == [True, True]


def test_one_rank_may_take_longer_than_the_timeout_to_open(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = loading.open_engine

    def open_late(*arguments: Any) -> Any:
        if getattr(arguments[-1], "group", "") in slow:
            time.sleep(2.6)
        return opened(*arguments)

    slow: set[str] = set()
    monkeypatch.setattr(loading, "open_engine", open_late)

    def run(ranks: Ranks) -> bool:
        if ranks.rank:
            slow.add(ranks.group_name)
        with load(files.artifact, files.sets[1], ranks=ranks) as model:
            return serves(model, 1)

    assert on_ranks(2, run, timeout=2.0) == [True, True]


def test_one_rank_may_take_longer_than_the_timeout_to_copy(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, late = Single.commit, write_set(files.path / "late.safetensors", 2)

    def copy_late(residency: Single, staged: StagedWeights, *arguments: Any) -> Any:
        if staged.report.source == str(late):
            time.sleep(2.6)
        return copied(residency, staged, *arguments)

    monkeypatch.setattr(Single, "commit", copy_late)

    def run(ranks: Ranks) -> bool:
        with load(files.artifact, files.sets[1], ranks=ranks, residency="single") as model:
            model.swap(late if ranks.rank else files.sets[2])
            return serves(model, 2)

    assert on_ranks(2, run, timeout=2.0) == [True, True]


APART: dict[str, tuple[Callable[[Model, Files, int], Any], str]] = {
    "a rollback to nothing": (lambda model, files, rank: model.rollback(), "nothing was committed before"),
    "a call and a swap": (
        lambda model, files, rank: model(X) if rank else model.swap(files.sets[2]),
        "is at another step: call of forward",
    ),
    "inputs that no rank takes": (lambda model, files, rank: model(X.double()), "InputMismatch"),
    "other shapes": (lambda model, files, rank: model((X, X[:1])[rank]), "float32[2, 4]"),
    "other values": (lambda model, files, rank: model((X, X + 1)[rank]), "float32[2, 4]"),
    "inputs that one rank does not take": (lambda model, files, rank: model((X, X.double())[rank]), "InputMismatch"),
}


@pytest.mark.parametrize(("use", "says"), APART.values(), ids=APART)
def test_what_ranks_cannot_do_together_is_refused(
    use: Callable[[Model, Files, int], Any], says: str, files: Files
) -> None:
    def work(model: Model, ranks: Ranks) -> None:
        error = caught(lambda: use(model, files, ranks.rank))
        assert isinstance(error, RanksRefused)
        assert says in str(error)
        assert serves(model, 1)

    together(files, work)


def test_two_threads_of_a_rank_cannot_use_the_model_at_once(files: Files) -> None:
    def work(model: Model, ranks: Ranks) -> None:
        with ranks.turn("call"):
            errors: list[WeightswapError] = []
            thread = threading.Thread(target=lambda: errors.append(caught(lambda: model(X))))
            thread.start()
            thread.join()
        assert isinstance(errors[0], Unsupported)
        assert "another thread" in str(errors[0])
        assert serves(model, 1)

    together(files, work)


ALONE: dict[str, Callable[[Model, Files], Any]] = {
    "watch": lambda model, files: model.watch(files.path),
    "follow": lambda model, files: model.follow(files.path),
    "receive": lambda model, files: model.receive(f"unix:{files.path}/x"),
    "keep": lambda model, files: model.keep(files.path / "kept"),
    "contexts": lambda model, _: model.new_context(),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_would_do_alone_is_refused(what: str, files: Files) -> None:
    def work(model: Model, _: Ranks) -> None:
        with pytest.raises(Unsupported, match=rf"{what}.*: not for a model on several ranks"):
            ALONE[what](model, files)
        assert serves(model, 1)

    together(files, work)


@pytest.fixture
def deltas(files: Files, tmp_path: Path) -> Callable[[int, int], Path]:
    """The file of the delta between two of the sets."""

    def delta(old: int, new: int) -> Path:
        path = tmp_path / f"{old}-{new}.safetensors"
        if not path.exists():
            assert {"packed", "first", "second"} < set(write_delta(files.sets[old], files.sets[new], out=path).changed)
        return path

    for old, new in ((1, 2), (2, 0)):
        delta(old, new)
    return delta


Deltas = Callable[[int, int], Path]


def test_deltas_are_laid_over_what_each_rank_has(residency: str, files: Files, deltas: Deltas, tmp_path: Path) -> None:
    other = write_set(tmp_path / "other.safetensors", 1, bias=7.0)
    write_delta(files.sets[1], other, out=tmp_path / "whole.safetensors")
    expected = whole(values(1) | {"bias": torch.full((4,), 7.0)}, X)

    def work(model: Model, _: Ranks) -> None:
        for _ in range(2):
            receipt = model.swap(deltas(1, 2))
            assert (receipt.kind, receipt.weights_id, model.weights_id) == ("delta", files.ids[2], files.ids[2])
            assert serves(model, 2)
            model.rollback()
            assert (serves(model, 1), model.weights_id) == (True, files.ids[1])
        model.swap(deltas(1, 2))
        assert model.swap(deltas(2, 0)).weights_id == files.ids[0]  # from what the delta before led to
        assert serves(model, 0)
        with model.stage(deltas(1, 2), onto=[(files.sets[1], files.ids[1])], background=True) as staged:
            staged.wait()
            assert staged.weights_id == files.ids[2]
            assert staged.commit().weights_id == files.ids[2]
        assert serves(model, 2)
        model.swap(files.sets[1])
        receipt = model.swap(tmp_path / "whole.safetensors")  # of what every rank has
        assert receipt.kind == "delta"
        assert torch.allclose(model(X)[0], expected, atol=1e-4)
        assert model.swap(other).weights_id == receipt.weights_id

    together(files, work, residency=residency, keep_previous="host" if residency == "single" else None)


def test_a_delta_that_leads_elsewhere_is_refused_by_all(
    residency: str, files: Files, deltas: Deltas, tmp_path: Path
) -> None:
    """No rank alone can tell."""
    forged = tmp_path / "forged.safetensors"
    forged.write_bytes(deltas(1, 2).read_bytes().replace(files.ids[2].encode(), files.ids[0].encode()))

    def work(model: Model, ranks: Ranks) -> None:
        for path in (forged, deltas(1, 2) if ranks.rank else forged):
            error = caught(lambda path=path: model.swap(path))
            assert isinstance(error, RanksRefused)
            assert serves(model, 1)
        error = caught(lambda: model.swap(forged))
        assert f"leads to the weights {files.ids[2][:12]}, not to {files.ids[0][:12]} as it claims" in str(error)
        assert model.weights_id == files.ids[1]
        staged = model.stage(forged)
        with pytest.raises(RanksRefused):
            staged.try_on_ranks()
        staged.discard()
        assert serves(model, 1)
        assert model.swap(deltas(1, 2)).weights_id == files.ids[2]
        assert serves(model, 2)

    together(files, work, residency=residency)


def test_different_deltas_that_claim_the_same_serve_no_mixture(
    residency: str, files: Files, deltas: Deltas, tmp_path: Path
) -> None:
    """Neither if they are tried before all have proven what they lead to."""
    write_delta(files.sets[1], files.sets[0], out=tmp_path / "other.safetensors")
    forged = tmp_path / "forged.safetensors"
    forged.write_bytes(
        (tmp_path / "other.safetensors").read_bytes().replace(files.ids[0].encode(), files.ids[2].encode())
    )

    def work(model: Model, ranks: Ranks) -> None:
        with model.stage(forged if ranks.rank else deltas(1, 2)) as staged:
            for work in (lambda: staged(X), staged.try_on_ranks, staged.commit):
                assert isinstance(caught(work), RanksRefused)
                assert serves(model, 1)
        with model.stage(deltas(1, 2)) as staged:
            assert "try_on_ranks() first" in str(caught(lambda: staged(X)))
            staged.try_on_ranks()
            assert staged(X)[1].tolist() == [2.0, 2.0]
            assert serves(model, 1)

    together(files, work, residency=residency)


def test_a_claim_is_not_taken_for_the_digest_of_a_block(files: Files, deltas: Deltas, tmp_path: Path) -> None:
    """What was staged, and refused, would pass for what is served, so that the next delta would not copy that."""
    claim = blake3(values(1)["first"].numpy().tobytes()).hexdigest()
    forged = tmp_path / "forged.safetensors"
    forged.write_bytes(deltas(2, 0).read_bytes().replace(files.ids[0].encode(), claim.encode()))
    other = write_set(tmp_path / "other.safetensors", 1, bias=7.0)
    write_delta(files.sets[1], other, out=tmp_path / "bias.safetensors")

    def work(model: Model, _: Ranks) -> None:
        with model.stage(forged, onto=[(files.sets[2], files.ids[2])]) as staged:
            assert "as it claims" in str(caught(staged.commit))
        model.swap(tmp_path / "bias.safetensors")
        assert torch.allclose(model(X)[0], whole(values(1) | {"bias": torch.full((4,), 7.0)}, X), atol=1e-4)

    together(files, work)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_rank_that_cannot_tell_its_changes_is_lost(
    error: type[BaseException], files: Files, deltas: Deltas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for that, and must not take its next vote for it."""
    told, failing = SharedChange.told, set[int]()

    def fail(change: SharedChange, block: int) -> bytes:
        if threading.get_ident() in failing:
            raise error
        return told(change, block)

    monkeypatch.setattr(SharedChange, "told", fail)

    def run(ranks: Ranks) -> None:
        model = load(files.artifact, files.sets[1], ranks=ranks)
        if ranks.rank:
            failing.add(threading.get_ident())
        with pytest.raises(KeyboardInterrupt if ranks.rank and error is KeyboardInterrupt else RanksLost):
            model.swap(deltas(1, 2))
        assert isinstance(caught(lambda: model(X)), RanksLost)
        assert model.weights_id == files.ids[1]

    assert on_ranks(2, run, timeout=1.0) == [None, None]


def test_ranks_that_tell_more_and_less_are_lost() -> None:
    """As after an interrupt, after which one votes and the other tells its changes; gloo would end the process."""

    def run(ranks: Ranks) -> type[WeightswapError]:
        return type(caught(lambda: ranks.exchange(lambda tell: tell(bytes(4096 if ranks.rank else 40)))))

    assert on_ranks(2, run, timeout=0.5) == [RanksLost, RanksLost]


def test_a_delta_on_one_rank_and_a_full_set_on_another_are_refused(files: Files, deltas: Deltas) -> None:
    def work(model: Model, ranks: Ranks) -> None:
        error = caught(lambda: model.swap(deltas(1, 2) if ranks.rank else files.sets[2]))
        assert isinstance(error, RanksRefused)
        assert "kind delta" in error.reasons[1]
        assert serves(model, 1)

    together(files, work)


def test_deltas_onto_each_other_are_refused_if_the_first_is_not_proven_yet(
    files: Files, deltas: Deltas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are laid over the weights one after the other."""
    monkeypatch.setattr(delta, "_TOGETHER", 0)
    onto = [(files.sets[1], files.ids[1]), (deltas(1, 2), files.ids[2])]

    def work(model: Model, _: Ranks) -> None:
        model.swap(files.sets[0])
        with model.stage(deltas(2, 0), onto=onto, expect=files.ids[0], background=True) as staged:
            error = caught(staged.commit)
        assert isinstance(error, RanksRefused)
        assert "of which each rank has a part; swap a full set" in str(error)
        assert serves(model, 0)

    together(files, work)


def test_rows_from_memory_of_what_is_cut_are_refused(files: Files) -> None:
    """What they lead to is not known before the vote."""
    changed = values(1) | {"mark": values(1)["mark"][:2]}
    changed["first"][2] += 1

    def work(model: Model, _: Ranks) -> None:
        error = caught(lambda: model.swap(changed, rows={"first": torch.tensor([2])}))
        assert "changes first, of which each rank has a part; swap a full set of weights, or the file" in str(error)
        assert serves(model, 1)
        changed_whole = model.swap(changed)
        assert changed_whole.kind == "full"
        assert torch.allclose(model(X)[0], whole(changed, X), atol=1e-4)

    together(files, work)


def test_a_pin_on_one_rank_keeps_all_from_a_commit_in_place(files: Files) -> None:
    def work(model: Model, ranks: Ranks) -> None:
        before = model(X)[0]
        with ExitStack() as pins:
            if ranks.rank:
                pins.enter_context(model.pin())
            error = caught(lambda: model.swap(files.sets[2], timeout=0.1))
            assert isinstance(error, RanksRefused)
            assert "WaitTimeout" in error.reasons[1]
            assert not model.failed
        assert torch.equal(model(X)[0], before)
        model.swap(files.sets[2])
        assert serves(model, 2)

    together(files, work, residency="single")


def test_an_in_place_commit_that_fails_on_one_rank_stops_all(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(model: Model, ranks: Ranks) -> None:
        if ranks.rank:
            with monkeypatch.context() as patch:
                patch.setattr(model._store._residency, "commit", _no_memory)
                error = caught(lambda: model.swap(files.sets[2]))
        else:
            error = caught(lambda: model.swap(files.sets[2]))
        assert isinstance(error, ModelFailed)
        assert "rank 1: RuntimeError: no memory for this call" in str(error)
        assert "nothing was done" not in str(error)
        assert model.failed
        with pytest.raises(ModelFailed):
            model(X)
        model.swap(files.sets[0])
        assert serves(model, 0)

    together(files, work, residency="single")


def test_a_rollback_does_not_wait_for_a_staging(files: Files) -> None:
    """It would wait for what nobody else can end meanwhile."""

    def work(model: Model, ranks: Ranks) -> None:
        model.swap(files.sets[2])
        with ExitStack() as stagings:
            if ranks.rank:
                stagings.enter_context(model.stage(files.sets[0], background=True).wait())
            error = caught(lambda: model.rollback(busy="wait"))
            assert isinstance(error, RanksRefused)
            assert "StagingBusy" in error.reasons[1]
        assert serves(model, 2)

    together(files, work)


def test_ranks_can_be_used_again_after_a_refused_load_and_a_close(files: Files) -> None:
    """Also by a rank that still has the error, or the model."""

    def run(ranks: Ranks) -> bool:
        error = caught(lambda: load(files.artifact, files.damaged if ranks.rank else files.sets[2], ranks=ranks))
        assert "DigestMismatch" in str(error)
        with load(files.artifact, files.sets[1], ranks=ranks) as first:
            assert serves(first, 1)
        with load(files.artifact, files.sets[2], ranks=ranks) as second:
            first.close()
            assert "another model has them" in str(caught(lambda: load(files.artifact, ranks=ranks)))
            return serves(second, 2)

    assert on_ranks(2, run) == [True, True]


def test_ranks_are_of_one_model(files: Files) -> None:
    def work(model: Model, ranks: Ranks) -> None:
        error = caught(lambda: load(files.artifact, ranks=ranks))
        assert "another model has them; make a group of its own for each model" in str(error)
        assert serves(model, 1)

    together(files, work)

    def again(ranks: Ranks) -> bool:
        for seed in (1, 2):
            with load(files.artifact, files.sets[seed], ranks=ranks) as model:
                assert serves(model, seed)  # type: ignore[arg-type]
            del model
            gc.collect()
        return True

    assert on_ranks(2, again) == [True, True]


LOADED: dict[str, Callable[[Files, Path, Ranks], Any]] = {
    "another artifact": lambda files, path, ranks: load(
        split_artifact(path / "other", 2, scale=3.0) if ranks.rank else files.artifact, ranks=ranks
    ),
    "another residency": lambda files, _, ranks: load(files.artifact, residency=RESIDENCIES[ranks.rank], ranks=ranks),
    "no artifact": lambda files, path, ranks: load(path / "no" if ranks.rank else files.artifact, ranks=ranks),
    "other weights": lambda files, _, ranks: load(files.artifact, files.sets[ranks.rank], ranks=ranks),
}


@pytest.mark.parametrize("what", LOADED)
def test_ranks_load_the_same_or_nothing(what: str, files: Files, tmp_path: Path) -> None:
    one, other = on_ranks(2, lambda ranks: LOADED[what](files, tmp_path, ranks))
    assert isinstance(one, RanksRefused)
    assert str(one) == str(other)
    assert 1 in one.reasons


def test_an_artifact_for_ranks_needs_them_and_as_many(files: Files, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"is for 2 ranks.*ranks=Ranks\(group\)"):
        load(files.artifact)
    wide = split_artifact(tmp_path / "four", 4)
    one, other = on_ranks(2, lambda ranks: load(wide, ranks=ranks))
    assert isinstance(one, RanksRefused)
    assert str(one) == str(other)
    assert "is for 4 ranks, the group has 2" in str(one)


def test_a_rank_that_does_not_come_is_lost(files: Files) -> None:
    def run(ranks: Ranks) -> list[Any]:
        model = load(files.artifact, files.sets[1], ranks=ranks)
        if ranks.rank == 1:
            return []
        lost = [caught(lambda: model(X)), caught(lambda: model(X)), caught(lambda: model.swap(files.sets[2]))]
        return [*lost, caught(model.rollback), ranks.lost, model.weights_id]

    found, _ = on_ranks(2, run, timeout=1.5)
    assert isinstance(found, list), found
    assert all(isinstance(error, RanksLost) for error in found[:5])
    assert "took more than 1.5 s" in str(found[0])


def test_a_call_that_fails_on_one_rank_alone_loses_the_ranks(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits for what this one did not do; a later call must not answer it."""

    def run(ranks: Ranks) -> Any:
        model = load(files.artifact, files.sets[1], ranks=ranks)
        if ranks.rank == 0:
            return caught(lambda: model(X))
        monkeypatch.setattr(bound_of(model), "run", _no_memory)
        return caught(lambda: model(X))

    one, other = on_ranks(2, run, timeout=1.5)
    assert {type(one), type(other)} <= {RanksLost, RanksRefused}, (one, other)


def _no_memory(*_: object) -> None:
    raise RuntimeError("no memory for this call")


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """Set 2 with its recorded calls, and set 0 with those of other weights."""
    paths = write_set(tmp_path / "good.safetensors", 2), write_set(tmp_path / "bad.safetensors", 0)
    write_goldens(paths[0], 2, 2)
    write_goldens(paths[1], 0, 1)
    return paths


def test_goldens_are_tried_by_all_ranks_after_they_have_agreed(files: Files, recorded: tuple[Path, Path]) -> None:
    good, bad = recorded

    def work(model: Model, _: Ranks) -> None:
        assert model.swap(good).verified == "goldens"
        error = caught(lambda: model.swap(bad))
        assert "GoldenMismatch" in str(error)
        assert serves(model, 2)
        assert model.swap(bad, verify="off").verified == "none"
        assert serves(model, 0)

    together(files, work)


def test_staged_weights_are_tried_before_their_commit(files: Files, recorded: tuple[Path, Path]) -> None:
    """So that whoever decides knows that the commit will not be refused; calls go on in between."""
    good, bad = recorded

    def work(model: Model, ranks: Ranks) -> None:
        with model.stage(good, background=True) as staged:
            staged.try_on_ranks()
            assert staged.verified == "goldens"
            assert serves(model, 1)
            assert staged.commit().verified == "goldens"
        with model.stage(bad, background=True) as staged:
            assert "GoldenMismatch" in str(caught(staged.try_on_ranks))
        mine = files.damaged if ranks.rank else files.sets[1]
        with model.stage(mine, background=True) as staged:
            assert list(caught(staged.try_on_ranks).reasons) == [1]  # type: ignore[attr-defined]
        assert serves(model, 2)

    together(files, work)


@pytest.mark.parametrize("other", [X + 1, X[:1].clone()], ids=["values", "shape"])
def test_goldens_of_other_inputs_on_one_rank_are_refused_before_they_run(
    other: torch.Tensor, residency: str, files: Files, tmp_path: Path
) -> None:
    """Ranks would compute together on inputs that do not belong together, of which gloo ends the process."""
    paths = [write_set(tmp_path / f"{number}.safetensors", 2) for number in range(2)]
    for path, x in zip(paths, (X, other), strict=True):
        write_goldens(path, 2, 2, x)

    def work(model: Model, ranks: Ranks) -> None:
        with model.stage(paths[ranks.rank]) as staged:
            for use in (staged.try_on_ranks, staged.commit):
                error = caught(use)
                assert isinstance(error, RanksRefused)
                assert all(reason.startswith("trials 1 (") for reason in error.reasons.values())
        assert serves(model, 1)
        assert model.swap(paths[1]).verified == "goldens"

    together(files, work, residency=residency)


def test_weights_of_one_process_are_not_tried_on_ranks(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    staged = load(tiny.path).stage(weight_file(1))
    with pytest.raises(Unsupported, match="for a model on several ranks"):
        staged.try_on_ranks()


def test_what_is_no_group_or_timeout_is_refused() -> None:
    with pytest.raises(Unsupported, match="process group"):
        Ranks("unix:x")  # type: ignore[arg-type]
    for timeout in (0.0, -1.0, float("inf"), float("nan"), None):
        with pytest.raises(Unsupported, match="timeout="):
            Ranks(object(), timeout=timeout)  # type: ignore[arg-type]


def test_the_values_of_large_inputs_are_not_compared() -> None:
    from weightswap_runtime.live import ranks as module

    small, large = torch.zeros(4), torch.zeros(1 << 19)
    assert module._described([small]) != module._described([small + 1])
    assert module._described([large]) == module._described([large + 1])
    assert module._described([large]) != module._described([large[1:]])
    assert module._described([np.int64(3), 4, None]) != module._described([np.int64(3), 5, None])
