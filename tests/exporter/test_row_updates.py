"""Row updates from a trainer: a chain of deltas ends on the weights that a full file of the same step has."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import warm
from tests.support.checkpoints import weights_id
from tests.support.recommender import ITEMS, Recommender, sparse_optimizers, train
from tests.support.watched import eventually
from weightswap_exporter import Packed, RowTracker, export, publish, row_updates
from weightswap_runtime import (
    Artifact,
    CheckpointError,
    DesiredStore,
    DigestMismatch,
    Model,
    NonFiniteWeights,
    WeightsMismatch,
    load,
    native,
)

X = torch.randint(0, 5_000, (8, 4), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(Recommender().eval(), (X,), out=tmp_path_factory.mktemp("recommender") / "recommender.artifact")


class Training:
    """A training that publishes rows."""

    def __init__(self, artifact: Artifact, folder: Path, **options: Any) -> None:
        self.artifact, self.folder, self.options, self.step = artifact, folder, options, 0
        self.model = Recommender()
        self.optimizers = sparse_optimizers(self.model)
        self.tracker = RowTracker(self.model, *self.optimizers)

    def publish(self, *, steps: int = 2, **options: Any) -> Packed:
        train(self.model, self.optimizers, steps)
        self.step += 1
        options = {"rows": self.tracker, **self.options, **options}
        return publish(self.model, self.folder, self.artifact, step=self.step, **options).wait(120)

    @property
    def weights_id(self) -> str:
        """The id that a full file would have."""
        return weights_id(self.model, self.artifact, self.folder.parent)


@pytest.fixture
def training(artifact: Artifact, tmp_path: Path) -> Training:
    return Training(artifact, tmp_path / "out")


def is_equal(served: Model, model: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(served(X), model(X))


class Copied(row_updates._Memory):
    """A table whose bytes are copied to the host before they are used, as those of a device are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._host = None


@pytest.mark.parametrize("way", ["compiled", "not compiled", "on a device"])
@pytest.mark.parametrize("residency", ["double", "single"])
def test_a_chain_of_deltas_ends_on_the_weights_of_a_full_file(
    residency: Any, way: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "not compiled":
        monkeypatch.setattr(native, "library", None)
    if way == "on a device":
        monkeypatch.setattr(row_updates, "_Memory", Copied)
    first = training.publish()
    assert (first.base, first.path.name) == ("", f"step-000000001-{first.weights_id[:12]}.safetensors")
    served = load(training.artifact, first.path, residency=residency)
    before = first
    for _ in range(4):
        packed = training.publish(check=True)
        assert packed.path.name == f"step-{training.step:09}-{packed.weights_id[:12]}.delta.safetensors"
        assert packed.base == before.weights_id
        assert packed.weights_id == training.weights_id
        assert packed.labels == {"step": str(training.step)}
        assert packed.path.stat().st_size < first.path.stat().st_size / 50
        served.swap(packed.path, expect=packed.weights_id)
        assert is_equal(served, training.model)
        before = packed
    assert list(training.folder.glob(".*")) == []


def test_full_files_come_first_now_and_then_and_on_request(training: Training) -> None:
    files = [training.publish(full_every=2, full=step == 7) for step in range(10)]
    assert ["." if packed.base else "F" for packed in files] == list("F..F..FF..")
    assert files[-1].weights_id == training.weights_id


def test_a_full_file_is_written_where_the_files_before_are_not(training: Training, tmp_path: Path) -> None:
    first = training.publish()
    assert training.publish(steps=1).base
    first.path.unlink()
    assert not training.publish().base
    training.folder = tmp_path / "other"
    assert not training.publish().base
    assert training.publish().base


def test_training_goes_on_while_the_delta_is_written(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.publish()
    original = row_updates.RowUpdate.pack

    def late(*args: Any) -> Any:
        train(training.model, training.optimizers)
        return original(*args)

    monkeypatch.setattr(row_updates.RowUpdate, "pack", late)
    train(training.model, training.optimizers)
    expected = training.weights_id
    assert training.publish(steps=0).weights_id == expected
    monkeypatch.undo()
    assert training.publish(steps=0).weights_id == training.weights_id


def test_nothing_has_changed(training: Training) -> None:
    served = load(training.artifact, training.publish().path)
    packed = training.publish(steps=0)
    assert (packed.nbytes, packed.base) == (0, packed.weights_id)
    served.swap(packed.path)
    assert training.publish().weights_id == training.weights_id


def test_a_step_that_is_published_again_replaces_no_delta_on_the_way(training: Training) -> None:
    values = [training.model.items.weight.detach().clone() + number for number in range(3)]

    def publish_again(number: int) -> Packed:
        with torch.no_grad():
            training.model.items.weight[:1000] = values[number][:1000]
        training.tracker.mark("items.weight", torch.arange(1000))
        training.step = 6
        return training.publish(steps=0)

    files = [publish_again(number) for number in (0, 1, 1, 2, 1, 0)]
    served = load(training.artifact)
    for packed in files:
        assert packed.weights_id.startswith(packed.path.name[15:27])
    assert ["." if packed.base else "F" for packed in files] == list("F.F.F.")
    full, *deltas = list(training.tracker.updates.last.files)  # type: ignore[union-attr]
    served.swap(full[0])
    for path, expected in deltas:
        served.swap(path, expect=expected)
    assert is_equal(served, training.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_row_of_tables_of_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Recommender(dtype=dtype)
    artifact = export(model.eval(), (X,), out=tmp_path / "a.artifact")
    tracker = RowTracker(model)
    publish(model, tmp_path / "out", artifact, step=1, rows=tracker).wait(120)
    with torch.no_grad():
        model.items.weight += 1
        model.users.weight[4_990:] += 1
        model.top.bias += 1
    tracker.mark("items.weight", torch.arange(ITEMS))
    tracker.mark("users.weight", torch.arange(4_990, 5_000))
    packed = publish(model, tmp_path / "out", artifact, step=2, rows=tracker, check=True).wait(120)
    assert packed.base
    assert packed.weights_id == weights_id(model, artifact, tmp_path)


class Wrapper(nn.Module):
    """As DistributedDataParallel holds a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [Wrapper, lambda model: torch.compile(model, backend="eager")])
def test_the_published_model_may_be_a_wrapped_one(wrap: Callable[[nn.Module], nn.Module], training: Training) -> None:
    inner = training.model
    training.model = wrap(inner)  # type: ignore[assignment]
    for base in (False, True):
        train(inner, training.optimizers)
        packed = training.publish(steps=0)
        assert bool(packed.base) == base
    training.model = inner
    assert packed.weights_id == training.weights_id


WRITE = "weightswap_runtime.format.canonical.StampedFile._write_tensor"


def broken(*_: object) -> None:
    raise OSError("no space left")


def test_a_failed_publication_leaves_its_rows_to_the_next(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    served = load(training.artifact, training.publish().path)
    for _ in range(2):
        monkeypatch.setattr(WRITE, broken)
        with pytest.raises(CheckpointError):
            training.publish()
        monkeypatch.undo()
    assert len(list(training.folder.iterdir())) == 1
    packed = training.publish()
    assert packed.weights_id == training.weights_id
    served.swap(packed.path)
    assert is_equal(served, training.model)


def test_an_interrupt_while_rows_are_taken_loses_none(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    served = load(training.artifact, training.publish().path)
    with monkeypatch.context() as patch:
        patch.setattr(training.tracker._tables[1], "drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.publish()
        with pytest.raises(KeyboardInterrupt):
            served.swap(training.model, rows=training.tracker)
    assert served.swap(training.model, rows=training.tracker).weights_id == training.weights_id
    packed = training.publish()
    assert packed.weights_id == training.weights_id


@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_while_a_file_is_written_has_the_rows_of_both(
    fails: bool, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = load(training.artifact, training.publish().path)
    original = row_updates.RowUpdate.pack

    def late(*args: Any) -> Any:
        train(training.model, training.optimizers)
        assert served.swap(training.model, rows=training.tracker).kind == "delta"
        return original(*args) if not fails else broken()

    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(row_updates.RowUpdate, "pack", late)
        assert training.publish().base
    assert is_equal(served, training.model)
    train(training.model, training.optimizers)
    assert served.swap(training.model, rows=training.tracker).weights_id == training.weights_id
    for base in (False, True):
        packed = training.publish()
        assert (bool(packed.base), packed.weights_id) == (base, training.weights_id)


@pytest.mark.parametrize("how", ["load_state_dict", "rows"])
def test_changes_that_nobody_has_marked_make_a_full_file(
    how: str, training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.publish()
    if how == "rows":
        with torch.no_grad():
            training.model.items.weight[ITEMS - 1] += 1
    else:
        training.model.load_state_dict(Recommender().state_dict())
    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(WRITE, broken)
        with pytest.raises(CheckpointError):
            training.publish()
    packed = training.publish()
    assert not packed.base
    assert packed.weights_id == training.weights_id
    assert "items.weight changed otherwise than by an optimizer's step, or by one that has failed" in caplog.text
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]
    assert training.publish().base


def miss(training: Training, row: int) -> None:
    """Change a row in a way that nobody can notice."""
    training.model.items.weight.data[row] += 1


def test_a_row_that_was_missed_is_found_by_a_comparison(training: Training) -> None:
    training.publish()
    training.publish(check=True)
    miss(training, 39_999)
    unchecked = training.publish()
    assert unchecked.weights_id != training.weights_id
    says = r"missed changes of items\.weight, among rows 32768 to 39999\. Something"
    with pytest.raises(CheckpointError, match=says):
        training.publish(check=True)
    packed = training.publish(check=True)
    assert not packed.base
    assert packed.weights_id == training.weights_id
    assert training.publish(check=True).base


def test_a_row_that_was_missed_is_found_by_the_next_full_file(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.publish()
    assert not training.publish(full=True).base
    assert not caplog.records
    miss(training, 39_999)
    packed = training.publish(full=True)
    assert "rows of items.weight changed that the tracker has missed" in caplog.text
    assert packed.weights_id == training.weights_id
    assert training.publish(check=True).base


def test_a_server_refuses_a_delta_that_lacks_a_row_beside_its_own(training: Training) -> None:
    served = load(training.artifact, training.publish().path)
    miss(training, 7)
    training.tracker.mark("items.weight", [8])
    packed = training.publish(steps=0)
    with pytest.raises(DigestMismatch):
        served.swap(packed.path)


def test_rows_with_nan_are_named_and_refused(training: Training) -> None:
    served = load(training.artifact, training.publish().path)
    with torch.no_grad():
        training.model.items.weight[77] = torch.nan
    training.tracker.mark("items.weight", [77])
    packed = training.publish()
    assert list(packed.nonfinite) == ["items.weight"]
    assert packed.nonfinite["items.weight"].nan == 16
    with pytest.raises(NonFiniteWeights):
        served.swap(packed.path, allow_nonfinite=False)


def test_goldens_are_beside_the_delta(training: Training) -> None:
    served = load(training.artifact, training.publish().path)
    packed = training.publish(goldens=[((X,), {})])
    assert packed.goldens == 1
    assert served.swap(packed.path).verified
    assert is_equal(served, training.model)


# Promotion.


def serves(model: Model, training: Training, packed: Packed) -> bool:
    """Wait until a model serves what was published."""
    return eventually(lambda: model.weights_id == packed.weights_id) and is_equal(model, training.model)


def test_followers_take_what_is_promoted_and_a_hold_makes_the_next_file_full(
    training: Training, tmp_path: Path
) -> None:
    training.folder.mkdir()
    desired_store = DesiredStore(training.folder)
    training.options = {"promote": desired_store.where, "keep": 2, "full_every": 4}
    served = load(training.artifact)
    with served.follow(desired_store.where, 0.01):
        for _ in range(12):
            packed = training.publish(steps=1)
            assert packed.refusal == ""
            assert serves(served, training, packed)
        assert packed.base
        desired_store.hold(revision=desired_store.read().revision)
        assert training.publish().refusal.startswith("NotPromoted")
        assert not training.publish().base
        desired_store.release(revision=desired_store.read().revision)
        packed = training.publish()
        assert (packed.base, packed.refusal) == ("", "")
        packed = training.publish()
        assert (bool(packed.base), packed.refusal) == (True, "")
        assert serves(served, training, packed)
    assert packed.weights_id == training.weights_id
    fresh = load(training.artifact)
    with fresh.follow(desired_store.where, 0.01):
        assert serves(fresh, training, packed)
    assert len(list(training.folder.glob("step-*.safetensors"))) < 15


def test_a_watcher_takes_the_deltas_of_a_directory(training: Training) -> None:
    training.folder.mkdir()
    served = load(training.artifact)
    with served.watch(training.folder, 0.01):
        for _ in range(5):
            assert serves(served, training, training.publish(full_every=3))


def test_what_must_be_proven_is_tried_upon_its_bases(training: Training) -> None:
    training.folder.mkdir()
    training.options = {"promote": training.folder, "policy": "proven", "goldens": [((X,), {})]}
    for base in (False, True, True):
        packed = training.publish()
        assert (bool(packed.base), packed.refusal) == (base, "")
    with torch.no_grad():
        training.model.items.weight[77] = torch.nan
    training.tracker.mark("items.weight", [77])
    packed = training.publish()
    assert packed.base
    assert packed.refusal.startswith(("NonFiniteWeights", "GoldenMismatch"))


# Anything, in any order.


class Story:
    """A training to which something happens between publications."""

    def __init__(self, training: Training, patch: pytest.MonkeyPatch, random: Random) -> None:
        self.training, self.patch, self.random = training, patch, random
        kept = {"__init__", "go_on"}
        self.happenings = [getattr(self, name) for name in vars(Story) if name not in kept and name[0] != "_"]

    def go_on(self) -> None:
        for happens in self.random.sample(self.happenings, self.random.randrange(4)):
            happens()

    def step(self) -> None:
        train(self.training.model, self.training.optimizers, 1)

    def mark(self, count: int = 3) -> None:
        ids = torch.randint(0, ITEMS, (count,))
        with torch.no_grad():
            self.training.model.items.weight[ids] += 1
        self.training.tracker.mark("items.weight", ids)

    def mark_many(self) -> None:
        self.mark(30_000)

    def train_the_top(self) -> None:
        with torch.no_grad():
            self.training.model.top.weight += 1

    def load(self) -> None:
        self.training.model.load_state_dict(Recommender().state_dict())

    def fail(self) -> None:
        with self.patch.context() as disk, suppress(CheckpointError):  # nothing is written if nothing has changed
            disk.setattr(WRITE, broken)
            self.training.publish(steps=self.random.randrange(2))

    def fail_early(self) -> None:
        folder, artifact = self.training.folder, self.training.artifact
        with pytest.raises(WeightsMismatch):
            publish(nn.Linear(3, 3), folder, artifact, step=1, rows=self.training.tracker).wait(120)

    def remove(self) -> None:
        if files := sorted(self.training.folder.glob("*")):
            self.random.choice(files).unlink()

    def move(self) -> None:
        self.training.folder = self.training.folder.with_name(f"out{self.random.randrange(3)}")

    def toggle_native(self) -> None:
        if native.library is None:
            self.patch.undo()
        else:
            self.patch.setattr(native, "library", None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_id_is_that_of_a_full_file(
    seed: int, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    random = Random(seed)
    story, served = Story(training, monkeypatch, random), load(training.artifact)
    for _ in range(12):
        story.go_on()
        options = {"full": random.random() < 0.1, "check": random.random() < 0.3, "full_every": 5}
        packed = training.publish(steps=random.randrange(2), **options)
        assert packed.weights_id == training.weights_id
        served.swap(packed.path)
        assert served.weights_id == packed.weights_id
        assert is_equal(served, training.model)


# What cannot be published by rows.


def test_tables_that_are_not_as_in_the_file_are_refused_by_name(artifact: Artifact, tmp_path: Path) -> None:
    model = Recommender(dtype=torch.float64)
    cast = {"rows": RowTracker(model), "dtype": "float32"}
    with pytest.raises(CheckpointError, match=r"rows=: users\.weight: is F64, and would be cast to F32; items\.weight"):
        publish(model, tmp_path / "out", artifact, step=1, **cast).wait(120)
    turned = Recommender()
    turned.items.weight = nn.Parameter(torch.randn(16, ITEMS).t())
    tracker = RowTracker(turned)
    with pytest.raises(CheckpointError, match=r"items\.weight: is not a dense row-major table\. Leave what"):
        publish(turned, tmp_path / "out", artifact, step=1, rows=tracker).wait(120)
    fewer = RowTracker(turned, tables=["users.weight"])
    publish(turned, tmp_path / "out", artifact, step=1, rows=fewer).wait(120)
    with torch.no_grad():
        turned.items.weight[3] += 1
    packed = publish(turned, tmp_path / "out", artifact, step=2, rows=fewer).wait(120)
    assert (packed.base != "", packed.nbytes) == (True, ITEMS * 16 * 4)
    assert packed.weights_id == weights_id(turned, artifact, tmp_path)


def test_a_table_that_is_no_longer_the_models_is_refused(training: Training) -> None:
    training.publish()
    training.model.items.weight = nn.Parameter(torch.zeros(ITEMS, 16))
    with pytest.raises(CheckpointError, match=r"items\.weight is not among the tensors that this model saves"):
        training.publish(steps=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": Recommender()}, "rows: expected a RowTracker of the model, got a Recommender"),
        ({"rows": None, "check": True}, "pass rows=RowTracker"),
        ({"rows": None, "full": True}, "pass rows=RowTracker"),
        ({"full_every": 0}, "full_every: expected 1 or more deltas between full files, got 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_at_once(
    options: dict[str, Any], says: str, training: Training
) -> None:
    with pytest.raises(CheckpointError, match=says):
        training.publish(**options)
    assert not training.folder.exists()


KILLED = """
import os, sys, time
from pathlib import Path
from tests.support.recommender import Recommender, sparse_optimizers, train
from weightswap_exporter import RowTracker, publish
from weightswap_runtime.format.canonical import (StampedFile)

model = Recommender()
optimizers = sparse_optimizers(model)
tracker = RowTracker(model, *optimizers)
for step in range(2):
    train(model, optimizers)
    publish(model, sys.argv[2], sys.argv[1], step=step, rows=tracker).wait()

original = StampedFile._write_tensor
def stop(*args):
    original(*args)
    print("writing", flush=True)
    time.sleep(60)

StampedFile._write_tensor = stop
train(model, optimizers)
publish(model, sys.argv[2], sys.argv[1], step=2, rows=tracker)
"""


@pytest.mark.slow
def test_a_killed_trainer_leaves_whole_files(training: Training) -> None:
    command = [warm.python(), "-e", "-c", KILLED, str(training.artifact.path), str(training.folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    names = sorted(path.name[:14] for path in training.folder.glob("*.safetensors"))
    assert names == ["step-000000000", "step-000000001"]
    full, delta = sorted(training.folder.glob("*.safetensors"))
    load(training.artifact, full).swap(delta)
    training.step = 2
    assert not training.publish().base  # another trainer knows nothing of it
    assert list(training.folder.glob(".*")) == []
