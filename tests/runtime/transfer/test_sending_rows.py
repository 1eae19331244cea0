"""Row updates that one process sends and another serves: as deltas where the receiver has what they start from."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.runtime.transfer.test_groups import group_of
from tests.support.administered import TOKEN, administered
from tests.support.descriptors import descriptors
from tests.support.recommender import ITEMS, USERS, Recommender, sparse_optimizers, train
from tests.support.refusals import because
from weightswap_exporter import RowTracker, export, pack
from weightswap_runtime import (
    Artifact,
    Model,
    NonFiniteWeights,
    NotPromoted,
    Sender,
    SwapReceipt,
    TransferFailed,
    Unsupported,
    WeightsMismatch,
    load,
)
from weightswap_runtime.transfer import group as groups

X = torch.randint(0, USERS, (8, 4), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(Recommender().eval(), (X,), out=tmp_path_factory.mktemp("rows") / "recommender.artifact")


@pytest.fixture
def at(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'x.sock'}"


@pytest.fixture(
    params=[
        ("double", "ids"),
        ("single", "tracker"),
        pytest.param(("double", "tracker"), marks=pytest.mark.slow),
        pytest.param(("single", "ids"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The residency of what receives, and what says which rows are sent: neither side sees the other's."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def residency(setting: tuple[str, str]) -> str:
    return setting[0]


@pytest.fixture
def served(artifact: Artifact, at: str, residency: Any) -> Iterator[Model]:
    with load(artifact, Recommender(), residency=residency, keep_previous="host") as model, model.receive(at):
        yield model


@pytest.fixture
def sender(artifact: Artifact, at: str) -> Iterator[Sender]:
    with Sender(at, artifact, timeout=20.0) as sender:
        yield sender


class Trainer:
    """A training that sends rows, by their ids or by a tracker."""

    def __init__(self, sender: Sender, artifact: Artifact, folder: Path, tracked: bool) -> None:
        self.sender, self.artifact, self.path = sender, artifact, folder / "full.safetensors"
        self.model = Recommender()
        self.optimizers = sparse_optimizers(self.model)
        self.tracker, self.is_tracked = RowTracker(self.model, *self.optimizers), tracked
        self.sent = {name: value.clone() for name, value in self.model.state_dict().items()}

    @property
    def rows(self) -> Any:
        if self.is_tracked:
            return self.tracker
        now = self.model.state_dict()
        return {name: (now[name] != self.sent[name]).any(1).nonzero().flatten() for name in self.tracker.tables}

    @property
    def weights_id(self) -> str:
        return pack(self.model, self.artifact, out=self.path).weights_id

    def send(self, *served: Model) -> str:
        """Send a step, and return the kind of the commit."""
        train(self.model, self.optimizers)
        receipt = self.sender.send(self.model, rows=self.rows)
        self.sent = {name: value.clone() for name, value in self.model.state_dict().items()}
        assert isinstance(receipt, SwapReceipt)
        assert receipt.weights_id == self.weights_id
        for model in served:
            assert model.weights_id == receipt.weights_id
            assert torch.equal(model(X), self.model(X).detach())
        return receipt.kind


@pytest.fixture
def trainer(setting: tuple[str, str], sender: Sender, artifact: Artifact, tmp_path: Path) -> Trainer:
    return Trainer(sender, artifact, tmp_path, setting[1] == "tracker")


def test_rows_travel_as_deltas(trainer: Trainer, served: Model) -> None:
    assert [trainer.send(served) for _ in range(4)] == ["full", "delta", "delta", "delta"]
    full, *deltas = [receipt.bytes_read for receipt in list(served.history)[-4:]]
    assert max(deltas) < full / 100
    receipt = trainer.sender.send(trainer.model, rows=trainer.rows, labels={"step": "7"})
    assert isinstance(receipt, SwapReceipt)
    assert (receipt.labels, receipt.base) == ({"step": "7"}, receipt.weights_id)


def test_other_weights_than_those_of_the_tracker_are_refused(
    served: Model, sender: Sender, artifact: Artifact, tmp_path: Path
) -> None:
    trainer = Trainer(sender, artifact, tmp_path, tracked=True)
    before = served.weights_id
    average = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(WeightsMismatch, match="give the model that it was made of"):
        sender.send(average, rows=trainer.tracker)
    assert served.weights_id == before
    assert [trainer.send(served) for _ in range(2)] == ["full", "delta"]
    with pytest.raises(WeightsMismatch):
        sender.send(average, rows=trainer.tracker)
    assert trainer.send(served) == "delta"


def test_a_log_says_why_all_weights_are_sent(
    served: Model, sender: Sender, artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(sender, artifact, tmp_path, tracked=True)

    def why(kind: str) -> str:
        caplog.clear()
        assert trainer.send(served) == kind
        return "".join(record.getMessage() for record in caplog.records if record.name == "weightswap.transfer")

    with caplog.at_level(logging.INFO, "weightswap.transfer"):
        assert why("full").endswith("not only rows: none were sent before, or their sending has failed or not ended")
        assert why("delta") == ""
        served.swap(Recommender())
        assert why("full").endswith("not only rows: the receiver does not serve the weights that were sent last")
        with load(artifact, trainer.model) as another:
            train(trainer.model, trainer.optimizers)
            another.swap(trainer.model, rows=trainer.tracker)
        assert "the tracker's rows do not start from the weights that were sent last" in why("full")


def test_who_serves_others_gets_all_weights(trainer: Trainer, served: Model) -> None:
    trainer.send(served)
    trainer.send(served)
    served.rollback()
    assert [trainer.send(served) for _ in range(2)] == ["full", "delta"]
    served.swap(Recommender())
    assert [trainer.send(served) for _ in range(2)] == ["full", "delta"]


def test_a_receiver_that_starts_again_gets_all_weights(
    trainer: Trainer, served: Model, at: str, artifact: Artifact
) -> None:
    trainer.send(served)
    served.close()
    with pytest.raises(TransferFailed):
        trainer.send()
    for start in (Recommender(), None):
        with load(artifact, start) as again, again.receive(at):
            assert [trainer.send(again) for _ in range(2)] == ["full", "delta"]


def test_other_ways_to_send_come_between(trainer: Trainer, served: Model) -> None:
    trainer.send(served)
    train(trainer.model, trainer.optimizers)
    with ThreadPoolExecutor(1) as pool:
        with served.turn(lambda: None):  # no swap begins, so that it stays under way
            first = trainer.sender.send(trainer.model, wait=False)
            later = pool.submit(trainer.send)
            while trainer.sender._latest is first:
                time.sleep(0.01)
        assert later.result() == "full"
    assert trainer.send(served) == "delta"
    train(trainer.model, trainer.optimizers)
    trainer.sender.send(trainer.model)
    assert trainer.send(served) == ("full" if trainer.is_tracked else "delta")  # a tracker does not know of it
    assert trainer.send(served) == "delta"


def test_what_is_refused_is_sent_again(trainer: Trainer, served: Model) -> None:
    trainer.send(served)
    before = served.weights_id
    with torch.no_grad():
        trainer.model.top.bias[0] = torch.nan
    with pytest.raises(NonFiniteWeights):
        trainer.sender.send(trainer.model, rows=trainer.rows)
    assert served.weights_id == before
    with torch.no_grad():
        trainer.model.top.bias.zero_()
    assert [trainer.send(served) for _ in range(2)] == ["full", "delta"]


def test_rows_that_were_rolled_back_are_refused(trainer: Trainer, served: Model) -> None:
    trainer.send(served)
    trainer.send(served)
    served.rollback(by="operator")
    with pytest.raises(NotPromoted, check=because("superseded")):
        trainer.sender.send(trainer.model, rows=trainer.rows)
    assert trainer.send(served) == "full"


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not ascending": ({"rows": {"items.weight": [5, 4]}}, WeightsMismatch, r"items\.weight: row 4 comes after row 5"),
    "beyond": ({"rows": {"items.weight": [ITEMS]}}, WeightsMismatch, r"row 40000: the table has 40000 rows"),
    "no such table": ({"rows": {"item": [1]}}, WeightsMismatch, "item: no such table"),
    "without a wait": ({"rows": {}, "wait": False}, Unsupported, "rows: cannot be sent with wait=False"),
    "no rows": ({"rows": 3}, Unsupported, "rows: expected ids by name, or a RowTracker; got a int"),
}


@pytest.mark.parametrize(("options", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_rows_are_refused_here(
    options: dict[str, Any],
    error: type[Exception],
    says: str,
    sender: Sender,
    served: Model,
    artifact: Artifact,
    tmp_path: Path,
) -> None:
    trainer = Trainer(sender, artifact, tmp_path, tracked=False)
    trainer.send(served)
    before = served.weights_id
    with pytest.raises(error, match=says):
        sender.send(trainer.model, **options)
    with pytest.raises(Unsupported):
        sender.send(iter(trainer.model.state_dict().items()), rows={})  # type: ignore[arg-type]
    assert served.weights_id == before
    assert trainer.send(served) == "delta"


def test_several_ranks_have_no_rows(artifact: Artifact, at: str) -> None:
    ranks = group_of(2)
    with Sender(at, artifact, trainers=ranks[0]) as sender, pytest.raises(Unsupported, match="sent with trainers="):
        sender.send(Recommender(), rows={})
    del ranks


def test_no_descriptor_is_left(trainer: Trainer, served: Model) -> None:
    trainer.send(served)
    trainer.send(served)
    before = descriptors()
    for _ in range(5):
        trainer.send(served)
    gc.collect()
    assert descriptors() <= before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(2)
def test_whatever_comes_between_rows_lead_to_the_model(trainer: Trainer, served: Model, seed: int) -> None:
    random, kinds = Random(seed), []

    def roll_back() -> None:
        if served.previous_weights_id:
            served.rollback()

    def refuse() -> None:
        with pytest.raises(WeightsMismatch):
            trainer.sender.send(trainer.model, rows={"items.weight": [1, 1]})

    others = [roll_back, refuse, lambda: served.swap(Recommender()), lambda: trainer.sender.send(Recommender())]
    for _ in range(12):
        if random.random() < 0.4:
            random.choice(others)()
            # ids by name are of what was sent last, whichever model it was of
            trainer.sent = {name: torch.full_like(value, torch.nan) for name, value in trainer.sent.items()}
        kinds.append(trainer.send(served))
    assert "delta" in kinds


# the other ways


def test_rows_travel_by_http(
    setting: tuple[str, str], artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    residency: Any = setting[0]
    with (
        load(artifact, Recommender(), residency=residency, keep_previous="host") as model,
        administered({"recommender": model}) as server,
    ):
        assert server.admin is not None
        with Sender(server.admin.where, artifact, timeout=20.0) as sender:
            trainer = Trainer(sender, artifact, tmp_path, setting[1] == "tracker")
            assert [trainer.send(model) for _ in range(3)] == ["full", "delta", "delta"]
            model.rollback()
            assert [trainer.send(model) for _ in range(2)] == ["full", "delta"]


@pytest.mark.parametrize("tracked", [False, True])
def test_rows_travel_over_a_group(
    tracked: bool, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "BUCKET", 5_000)
    first, *others = group_of(3)
    models = [load(artifact, Recommender(), keep_previous=None) for _ in range(2)]
    receivers = [model.receive(group) for model, group in zip(models, others, strict=True)]
    with closing(Sender(first, artifact)) as sender:
        trainer = Trainer(sender, artifact, tmp_path, tracked)
        assert [trainer.send(*models) for _ in range(3)] == ["full", "delta", "delta"]
        models[1].rollback()  # one of them alone
        assert [trainer.send(*models) for _ in range(2)] == ["full", "delta"]
    for model in models:
        model.close()
    assert not any(receiver.alive for receiver in receivers)
