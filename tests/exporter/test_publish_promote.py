"""A trainer that promotes what it publishes, by policy."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.support.models import Renamed, fill
from weightswap_exporter import Packed, publish, publishing
from weightswap_runtime import (
    Artifact,
    CheckpointError,
    DesiredError,
    DesiredStore,
    NotPromoted,
    Unsupported,
    load,
    write_delta,
)
from weightswap_runtime.following import directory, document_storage

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
GOLDENS = [((X,), {})]


@pytest.fixture
def desired_store(tmp_path: Path) -> DesiredStore:
    (tmp_path / "run").mkdir()
    return DesiredStore(tmp_path / "run")


def trained(value: float) -> nn.Module:
    return fill(Renamed().eval(), value)


def test_what_is_published_is_desired_as_soon_as_it_is_there(renamed: Artifact, desired_store: DesiredStore) -> None:
    packed = publish(trained(1.0), desired_store.where, renamed, step=1, promote=desired_store.where, by="run 7").wait(
        60
    )
    state = desired_store.read()
    assert state.weights is not None
    assert (packed.promoted, packed.refusal) == (1, "")
    assert (state.weights.weights_id, state.weights.source) == (packed.weights_id, packed.path.name)
    assert (state.weights.labels, state.weights.by) == ({"step": "1"}, "run 7")
    model = load(renamed)
    with model.follow(desired_store.where, 0.01) as follower:
        assert follower.wait(120)
    assert torch.equal(model(X), trained(1.0)(X))


def test_a_training_that_is_repeated_is_served_again_but_not_what_was_withdrawn(
    renamed: Artifact, desired_store: DesiredStore
) -> None:
    def published(value: float, step: int, run: str) -> Packed:
        folder = Path(desired_store.where) / run
        folder.mkdir(exist_ok=True)
        return publish(trained(value), folder, renamed, step=step, promote=desired_store.where, by=run).wait(120)

    for step in (1, 2):
        published(float(step), step, "run 1")
    again = published(2.0, 2, "run 2")
    assert (again.promoted, again.refusal) == (3, "")
    weights = desired_store.read().weights
    assert weights is not None
    assert (weights.weights_id, weights.by, weights.source) == (again.weights_id, "run 2", f"run 2/{again.path.name}")
    assert published(2.0, 2, "run 2").promoted == 3
    first = published(1.0, 1, "run 2")
    assert (first.promoted, first.refusal, desired_store.read().weights_id) == (4, "", first.weights_id)
    desired_store.rollback(revision=4, by="ana", hold=False)
    withdrawn = published(1.0, 1, "run 3")
    assert withdrawn.promoted is None
    assert withdrawn.refusal.startswith("NotPromoted: ")
    assert "were desired by run 2, then withdrawn" in withdrawn.refusal
    assert desired_store.read().weights_id == again.weights_id


def test_a_hold_lets_the_training_go_on(
    renamed: Artifact, desired_store: DesiredStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "weightswap")
    desired_store.hold(revision=0, by="ana")
    packed = publish(trained(1.0), desired_store.where, renamed, step=1, promote=desired_store.where).wait(120)
    assert packed.path.exists()
    assert packed.promoted is None
    assert packed.refusal.startswith("NotPromoted: ")
    assert "was not promoted: NotPromoted" in caplog.text


def test_only_what_is_proven_is_promoted_where_that_is_the_policy(
    renamed: Artifact, desired_store: DesiredStore
) -> None:
    def published(value: float, step: int, **options: object) -> str:
        options |= {"promote": desired_store.where, "policy": "proven"}
        return (
            publish(trained(value), desired_store.where, renamed, step=step, **options)
            .wait(120)
            .refusal.partition(":")[0]
        )

    assert published(1.0, 1) == "NotPromoted"
    assert published(2.0, 2, goldens=GOLDENS) == ""
    assert published(torch.nan, 3) == "NonFiniteWeights"
    assert desired_store.read().revision == 1


def test_a_desired_store_that_is_away_is_no_error_of_the_training(renamed: Artifact, tmp_path: Path) -> None:
    packed = publish(trained(1.0), tmp_path / "run", renamed, step=1, promote=tmp_path / "none").wait(120)
    assert packed.refusal.startswith("DesiredError: ")
    with pytest.raises(Unsupported):
        publish(trained(1.0), tmp_path / "run", renamed, step=2, policy="best")  # type: ignore[arg-type]


class Service:
    """Service that takes new weights, as a fleet does."""

    def __init__(self) -> None:
        self.revision, self.taken, self.refuses = 6, list[tuple[Path, str, str]](), False

    def publish(self, weights: Path, *, by: str, why: str) -> Service:
        if self.refuses:
            raise NotPromoted("on hold by ana", reason="held")
        self.taken.append((weights, by, why))
        self.revision += 1
        return self


def test_a_service_takes_what_is_published(renamed: Artifact, tmp_path: Path) -> None:
    service = Service()
    packed = publish(trained(1.0), tmp_path / "run", renamed, step=1, promote=service, by="run 7").wait(120)
    assert service.taken == [(packed.path, "run 7", "newest")]
    assert (packed.promoted, packed.receipt, packed.refusal) == (7, service, "")
    packed = publish(trained(2.0), tmp_path / "run", renamed, step=2, promote=service, policy="proven").wait(120)
    assert packed.refusal.startswith("NotPromoted: ")
    service.refuses = True
    packed = publish(trained(3.0), tmp_path / "run", renamed, step=3, promote=service).wait(120)
    assert (packed.promoted, packed.receipt, packed.refusal) == (None, None, "NotPromoted: on hold by ana")
    assert (packed.path.exists(), len(service.taken)) == (True, 1)


def weight_files(desired_store: DesiredStore) -> list[str]:
    """Return the steps of published files, and the names of others, without goldens and the like."""
    names = sorted(path.name for path in Path(desired_store.where).glob("*.safetensors") if "goldens" not in path.name)
    return [name.split("-")[1].lstrip("0") if name.startswith("step-0") else name for name in names]


def publish_steps(renamed: Artifact, desired_store: DesiredStore, steps: range, keep: int | None = 2) -> list[Packed]:
    options: dict[str, Any] = {"promote": desired_store.where, "keep": keep, "goldens": GOLDENS}
    return [
        publish(trained(float(step)), desired_store.where, renamed, step=step, **options).wait(120) for step in steps
    ]


def test_older_files_go_once_the_desired_store_can_no_longer_need_them(
    renamed: Artifact, desired_store: DesiredStore
) -> None:
    publish_steps(renamed, desired_store, range(1, 5), keep=None)
    assert weight_files(desired_store) == ["1", "2", "3", "4"]
    run = Path(desired_store.where)
    (run / "step-000000001-0123456789ab.safetensors").write_bytes(next(run.glob("step-*4-*s")).read_bytes())
    state = publish_steps(renamed, desired_store, range(5, 6))
    assert weight_files(desired_store) == [
        "1",
        "3",
        "4",
        "5",
    ]  # the first is not what its name says: nobody published it so
    assert len(list(run.glob("*.goldens.safetensors"))) == 3
    assert desired_store.rollback(revision=state[0].promoted or 0, hold=False).weights_id
    model = load(renamed)
    with model.follow(desired_store.where, 0.01) as follower:
        assert follower.wait(120)
    assert model.labels == {"step": "4"}


def test_what_was_rolled_back_and_what_a_delta_needs_stay(renamed: Artifact, desired_store: DesiredStore) -> None:
    first, second, third = publish_steps(renamed, desired_store, range(1, 4), keep=None)
    run = Path(desired_store.where)
    write_delta(first.path, second.path, run / "patch.safetensors")  # which the desired store does not know
    desired_store.rollback(revision=3, hold=False)
    publish_steps(renamed, desired_store, range(4, 8), keep=1)
    assert third.path.exists()
    assert weight_files(desired_store) == ["patch.safetensors", "1", "2", "3", "6", "7"]


def test_what_another_trainer_promotes_meanwhile_stays(
    renamed: Artifact, desired_store: DesiredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file appears when this trainer reads the folder, with a time from before: its clock is behind."""
    publish_steps(renamed, desired_store, range(1, 5), keep=None)
    late = publish(trained(6.0), tmp_path / "elsewhere", renamed, step=6, goldens=GOLDENS).wait(120).path
    read, others = directory.stamp_of, DesiredStore(desired_store.where)

    def overtaken(path: Path) -> Any:
        if late.exists():
            os.utime(late, (1, 1))
            others.promote(late.replace(Path(desired_store.where) / late.name))
        return read(path)

    monkeypatch.setattr(directory, "stamp_of", overtaken)
    publish_steps(renamed, desired_store, range(5, 6), keep=1)
    desired = desired_store.read().weights
    assert desired is not None
    assert Path(desired_store.locate(desired)).name == late.name
    assert weight_files(desired_store)[-1] == "6"


@pytest.mark.parametrize("moment", ["stamps_in", "in_use"])
def test_what_an_operator_goes_back_to_meanwhile_stays(
    moment: str, renamed: Artifact, desired_store: DesiredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While files are read, the rollback wins; while it is decided which of them go, it waits, and finds none."""
    first = publish_steps(renamed, desired_store, range(1, 5), keep=None)[0]
    monkeypatch.setattr(document_storage, "PATIENCE", 0.05)
    others, step, tries = DesiredStore(desired_store.where), getattr(publishing, moment), []

    def overtaken(*arguments: Any) -> Any:
        if not tries:
            tries.append(moment)
            with pytest.raises(DesiredError) if moment == "in_use" else nullcontext():
                others.rollback(revision=5, to=first.weights_id)
        return step(*arguments)

    monkeypatch.setattr(publishing, moment, overtaken)
    publish_steps(renamed, desired_store, range(5, 6), keep=1)
    desired = desired_store.read().weights
    assert (tries, desired is not None) == ([moment], True)
    assert Path(desired_store.locate(desired)).exists()  # type: ignore[arg-type]
    assert first.path.exists() == (moment == "stamps_in")


def test_a_clock_that_was_set_back_makes_no_file_old(renamed: Artifact, desired_store: DesiredStore) -> None:
    publish_steps(renamed, desired_store, range(1, 5), keep=None)
    waiting = publish(trained(9.0), desired_store.where, renamed, step=9).wait(120).path
    os.utime(waiting, (1, 1))
    publish_steps(renamed, desired_store, range(5, 6), keep=1)
    assert waiting.exists()


def test_a_delta_of_the_desired_store_keeps_its_base(
    renamed: Artifact, desired_store: DesiredStore, tmp_path: Path
) -> None:
    first, second = publish_steps(renamed, desired_store, range(1, 3), keep=None)
    desired_store.rollback(revision=2, to=first.weights_id, hold=False)
    write_delta(first.path, second.path, tmp_path / "patch.safetensors")
    desired_store.set(tmp_path / "patch.safetensors", revision=3)
    publish_steps(renamed, desired_store, range(3, 6), keep=3)
    assert weight_files(desired_store) == ["1", "2", "3", "4", "5"]
    publish_steps(renamed, desired_store, range(6, 8), keep=2)
    assert weight_files(desired_store) == ["5", "6", "7"]


@pytest.mark.parametrize("spoil", ["the desired store", "a file", "a hold"])
def test_nothing_is_removed_where_it_cannot_be_decided(
    spoil: str, renamed: Artifact, desired_store: DesiredStore, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    publish_steps(renamed, desired_store, range(1, 5), keep=None)
    caplog.set_level(logging.WARNING, "weightswap")
    if spoil == "a file":
        (Path(desired_store.where) / "torn.safetensors").write_bytes(b"torn")
    elif spoil == "a hold":
        desired_store.hold(revision=4)
    else:
        monkeypatch.setattr(DesiredStore, "read", Mock(side_effect=DesiredError("away")))
    packed = publish_steps(renamed, desired_store, range(5, 6), keep=1)[0]
    assert (packed.promoted, packed.path.exists()) == (None if spoil == "a hold" else 5, True)
    assert [name for name in weight_files(desired_store) if name.isdigit()] == ["1", "2", "3", "4", "5"]
    assert "were not removed" in caplog.text or spoil == "a hold"


def test_files_are_kept_by_number_only_where_a_desired_store_says_which(
    renamed: Artifact, desired_store: DesiredStore
) -> None:
    for promote in (None, Service()):
        with pytest.raises(CheckpointError, match="only a desired store says"):
            publish(trained(1.0), desired_store.where, renamed, step=1, promote=promote, keep=3)
    with pytest.raises(CheckpointError, match="1 or more"):
        publish(trained(1.0), desired_store.where, renamed, step=1, promote=desired_store.where, keep=0)
