"""Places: the writes of operators and trainers, and those that are refused."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch

from tests.runtime.sources.killed import killed
from tests.support import warm
from tests.support.descriptors import descriptors
from tests.support.forks import in_a_child
from tests.support.refusals import because
from tests.support.services import Service, wanted, weights_id_of
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from tests.support.watched import environment
from weightswap_runtime import (
    BaseMismatch,
    DesiredError,
    DesiredStore,
    DigestMismatch,
    GraphMismatch,
    NothingToRollBack,
    NotPromoted,
    RevisionConflict,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    load,
    merge_deltas,
    write_delta,
)
from weightswap_runtime.following import desired_state as document
from weightswap_runtime.following import desired_store, document_storage
from weightswap_runtime.following.desired_state import MOST_BASES, MOST_KEPT, encode
from weightswap_runtime.following.desired_store import Known


def test_what_is_set_says_who_when_and_why(service: Service) -> None:
    path = service.write(1)
    written = service.desired_store.set(path, revision=0, by="ana", why="first")
    assert service.desired_store.read() == written
    assert (written.revision, written.history, written.hold) == (1, (), None)
    assert (wanted(written).source, wanted(written).by, wanted(written).why) == (path.name, "ana", "first")
    assert (wanted(written).weights_id, wanted(written).graph_id) == (
        weights_id_of(path),
        service.tiny.manifest.graph_id,
    )
    assert service.desired_store.locate(wanted(written)) == path


def test_a_desired_store_may_move_with_its_weights(service: Service, tmp_path: Path) -> None:
    service.set(1)
    moved = DesiredStore(service.folder.rename(tmp_path / "moved") / "desired.json")
    weights = moved.read().weights
    assert weights is not None
    assert moved.locate(weights) == tmp_path / "moved" / "v1.safetensors"


def test_a_writer_that_has_not_seen_the_last_revision_changes_nothing(service: Service) -> None:
    service.set(1, by="ana")
    before = (service.folder / "desired.json").read_bytes()
    path = service.write(2)
    for stale in (0, 2):
        with pytest.raises(RevisionConflict, match=f"is at revision 1, by ana, but this change is based on {stale}"):
            service.desired_store.set(path, revision=stale)
    assert (service.folder / "desired.json").read_bytes() == before
    with pytest.raises(Unsupported, match="revision='1'"):
        service.desired_store.set(path, revision="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["by", "why"])
@pytest.mark.parametrize("odd", [None, 5, ["ana"], "\ud800", "é" * 4097], ids=str)
def test_by_and_why_are_texts_of_a_maximum_length(odd: Any, said: str, service: Service) -> None:
    """Without a limit, a history could become too long to be read, or to be sent to another process."""
    desired_store, longest, odd = service.desired_store, {said: "é" * 4096}, {said: odd}
    desired_store.set(service.write(1), revision=0, **longest)
    written = desired_store.promote(service.write(2), **longest)
    for write in (
        lambda: desired_store.set(service.write(3), revision=2, **odd),
        lambda: desired_store.promote(service.write(3), **odd),
        lambda: desired_store.rollback(revision=2, **odd),
        lambda: desired_store.hold(revision=2, **odd),
    ):
        with pytest.raises(Unsupported, match=said):
            write()
    assert desired_store.read() == written


def test_a_rollback_withdraws_what_came_later_and_holds(service: Service) -> None:
    ids = [service.promote(seed) for seed in range(1, 6)]
    rolled = service.desired_store.rollback(to=ids[1][:12], revision=5, by="ana", why="slow")
    assert (wanted(rolled).weights_id, wanted(rolled).by, wanted(rolled).why) == (ids[1], "ana", "slow")
    assert [each.weights_id for each in rolled.history] == ids[:1]
    assert [each.weights_id for each in rolled.withdrawn] == ids[2:]
    assert rolled.hold is not None
    assert (rolled.hold.by, rolled.hold.why) == ("ana", "slow")
    with pytest.raises(NotPromoted, check=because("held"), match="on hold by ana: slow"):
        service.promote(6)
    service.desired_store.release(revision=6)
    with pytest.raises(NotPromoted, check=because("superseded"), match="then withdrawn"):
        service.promote(3)


def test_weights_that_are_desired_already_are_recorded_with_their_newest_file(service: Service) -> None:
    first = service.promote(1)
    desired_store = service.desired_store
    assert desired_store.promote(service.folder / "v1.safetensors", by="other").revision == 1  # says nothing new
    state = desired_store.promote(
        service.folder / "v1.safetensors", known=Known(first, labels={"step": "1"}), by="run 2"
    )
    assert (state.revision, wanted(state).labels, wanted(state).by) == (2, {"step": "1"}, "run 2")
    assert (state.weights_id, state.history) == (first, ())
    again = service.tiny.write(service.folder / "again.safetensors", service.tiny.values(1))
    state = desired_store.promote(again, by="run 3")
    assert (state.revision, wanted(state).source) == (3, "again.safetensors")
    held = desired_store.hold(revision=3, by="ana")
    assert desired_store.promote(service.folder / "v1.safetensors", by="run 4") == held


def test_a_rollback_needs_something_to_go_to(service: Service) -> None:
    with pytest.raises(NothingToRollBack):
        service.desired_store.rollback(revision=0)
    first, second = service.set(1), service.set(2)
    for unknown in ("0" * 64, second):
        with pytest.raises(NothingToRollBack, match=f"The history has {first[:12]}"):
            service.desired_store.rollback(to=unknown, revision=2)
    (service.folder / "v1.safetensors").write_bytes((service.folder / "v2.safetensors").read_bytes())
    with pytest.raises(UnexpectedWeights, match="now has the weights"):
        service.desired_store.rollback(revision=2)
    (service.folder / "v1.safetensors").unlink()
    with pytest.raises(WeightFileError):
        service.desired_store.rollback(revision=2)
    assert service.desired == second
    assert service.revision == 2


@pytest.mark.parametrize("change", ["rollback", "set", "promote"])
def test_a_file_that_is_removed_while_it_is_checked_is_not_desired(
    change: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may remove it (`publish(keep=)`) until the change is written."""
    service.set(1)
    service.set(2)
    path, read = service.folder / "v1.safetensors", desired_store.stamp_of

    def removed(source: Any) -> Any:
        stamp = read(source)
        path.unlink()
        return stamp

    monkeypatch.setattr(desired_store, "stamp_of", removed)
    write: dict[str, Callable[[], object]] = {
        "rollback": lambda: service.desired_store.rollback(revision=2),
        "set": lambda: service.desired_store.set(path, revision=2),
        "promote": lambda: service.desired_store.promote(path),
    }
    with pytest.raises(WeightFileError, match="was removed meanwhile"):
        write[change]()
    assert service.revision == 2


def test_weights_that_no_new_process_could_load_are_not_desired(
    service: Service, delta: WriteDelta, tmp_path: Path
) -> None:
    unpacked = tmp_path / "unpacked.safetensors"
    safetensors.torch.save_file({name: value.clone() for name, value in service.tiny.values(1).items()}, unpacked)
    with pytest.raises(Unsupported, match="does not say which weights it holds"):
        service.desired_store.set(unpacked, revision=0)
    with pytest.raises(BaseMismatch):
        service.desired_store.set(delta(1, 2), revision=0)
    with pytest.raises(WeightFileError):
        service.desired_store.set(tmp_path / "none.safetensors", revision=0)
    assert service.revision == 0


@pytest.mark.usefixtures("_places")
def test_a_delta_is_desired_with_what_it_starts_from(
    service: Service, delta: WriteDelta, monkeypatch: pytest.MonkeyPatch, residency: Any
) -> None:
    """The bases let a new process load the same weights, and let a rollback check all files."""
    service.set(0)
    with pytest.raises(BaseMismatch):
        service.desired_store.set(delta(1, 2), revision=1)
    service.desired_store.set(delta(0, 1), revision=1)
    state = service.desired_store.promote(delta(1, 2))
    model = load(service.tiny.path, residency=residency)
    with model.follow(service.folder, 0.01) as follower:
        assert follower.wait(30, revision=3)
        assert serves(model, 2)
        service.desired_store.rollback(revision=3)
        assert follower.wait(30, revision=4)
        assert serves(model, 1)
    assert [Path(base.source).name for base in wanted(state).bases or ()] == ["v0.safetensors", "d0-1.safetensors"]
    delta(0, 1).write_bytes(delta(1, 2).read_bytes())
    with pytest.raises(UnexpectedWeights):
        service.desired_store.rollback(revision=4, to=wanted(state).weights_id)
    monkeypatch.setattr(document, "MOST_BASES", 1)
    with pytest.raises(Unsupported, match=r"after 2 files.*but at most 1 can be.*--compact FILE"):
        service.desired_store.set(delta(1, 3), revision=4)


def test_a_delta_that_is_desired_already_may_be_asked_for_again(service: Service, delta: WriteDelta) -> None:
    """This happens when the response of the first write was lost."""
    service.set(0)
    once = service.desired_store.promote(delta(0, 1))
    assert service.desired_store.promote(delta(0, 1)) == once
    again = service.desired_store.set(delta(0, 1), revision=2)
    assert (again.revision, wanted(again).bases) == (3, wanted(once).bases)
    assert service.set(1) == service.desired  # the full set of the same weights
    assert service.desired_store.promote(delta(0, 1)).revision == 4
    with pytest.raises(BaseMismatch):  # the full set is no base of it
        service.desired_store.set(delta(0, 1), revision=4)


@pytest.fixture
def chained(service: Service, delta: WriteDelta) -> Service:
    """A desired store that wants the weights of seed 4, as a full set and four deltas, in revision 5."""
    service.set(0)
    for seed in range(4):
        service.desired_store.promote(delta(seed, seed + 1), by="trainer", why=f"step {seed}")
    return service


@pytest.mark.pairwise
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.usefixtures("_places")
def test_a_chain_is_made_shorter_and_nobody_who_serves_it_notices(
    full: bool, hold: bool, chained: Service, delta: WriteDelta, residency: Any
) -> None:
    """Processes that start later read the new files alone, and a delta from the same weights continues the chain."""
    desired_store, revision = chained.desired_store, 5
    if hold:
        revision = desired_store.hold(revision=revision).revision
    before = desired_store.read()
    model = load(chained.tiny.path, residency=residency)
    with model.follow(chained.folder, 0.01) as follower:
        assert follower.wait(120)
        after = desired_store.compact(chained.folder / "short.safetensors", revision=revision, full=full)
        assert follower.wait(60, revision=revision + 1)
        assert [receipt.generation for receipt in model.history] == [0]
    assert after == desired_store.read()
    bases = msgspec.UNSET if full else wanted(before).bases[:1]  # type: ignore[index]
    shorter = msgspec.structs.replace(wanted(before), source="short.safetensors", bases=bases)
    assert after == msgspec.structs.replace(before, revision=revision + 1, weights=shorter)
    for seed in range(1, 4):
        delta(seed, seed + 1).unlink()
    delta(0, 1).unlink()
    if full:
        (chained.folder / "v0.safetensors").unlink()
    other = load(chained.tiny.path, residency=residency)
    with other.follow(chained.folder, 0.01) as follower:
        assert follower.wait(120)
        assert serves(other, 4)
        if hold:
            desired_store.release(revision=revision + 1)
        state = desired_store.promote(delta(4, 5))
        assert follower.wait(60, revision=state.revision)
        assert serves(other, 5)
        assert other.history[-1].kind == "delta"


@pytest.mark.usefixtures("_places")
def test_who_is_behind_reads_the_rest_of_a_chain_alone(
    chained: Service, delta: WriteDelta, weight_file: WriteWeights, residency: Any
) -> None:
    model = load(chained.tiny.path, weight_file(2), residency=residency)
    for path in (chained.folder / "v0.safetensors", delta(0, 1), delta(1, 2)):
        path.unlink()
    with model.follow(chained.folder, 0.01) as follower:
        assert follower.wait(120)
    assert (serves(model, 4), model.generation, model.history[-1].kind) == (True, 1, "delta")


def test_what_is_signed_and_what_was_recorded_goes_with_a_shorter_chain(chained: Service, delta: WriteDelta) -> None:
    last = delta(3, 4)
    for name in ("d3-4.goldens.safetensors", "d3-4.safetensors.sig"):
        last.with_name(name).write_text(name)
    for revision, full in ((5, False), (6, True)):
        chained.desired_store.compact(chained.folder / f"short{revision}.safetensors", revision=revision, full=full)
        beside = [
            chained.folder / f"short{revision}{suffix}" for suffix in (".goldens.safetensors", ".safetensors.sig")
        ]
        assert [path.read_text() for path in beside] == ["d3-4.goldens.safetensors", "d3-4.safetensors.sig"]


def test_an_operator_who_writes_during_a_compaction_wins(chained: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    out = chained.folder / "short.safetensors"
    with pytest.raises(RevisionConflict):
        chained.desired_store.compact(out, revision=4)
    assert not out.exists()
    during_a_compaction(monkeypatch, lambda: chained.desired_store.rollback(revision=5, by="ana"))
    with pytest.raises(RevisionConflict):
        chained.desired_store.compact(out, revision=5)
    assert not out.exists()
    state = chained.desired_store.read()
    assert (state.revision, len(state.withdrawn)) == (6, 1)
    assert chained.desired_store.compact(out, revision=6).weights_id == state.weights_id


def during_a_compaction(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something in the next compaction, after its checks and before it writes."""
    check = DesiredStore._check_files

    def checked(*arguments: Any) -> None:
        check(*arguments)
        monkeypatch.setattr(DesiredStore, "_check_files", check)
        work()

    monkeypatch.setattr(DesiredStore, "_check_files", checked)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_of_two_compactions_to_one_file_the_loser_changes_nothing(
    full: bool, goes_on: bool, chained: Service, delta: WriteDelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """goes_on: the winner is based on a later revision, with other weights."""
    out = chained.folder / "short.safetensors"

    def win() -> None:
        if goes_on:
            chained.desired_store.promote(delta(4, 5))
        chained.desired_store.compact(out, revision=chained.revision, full=not full)

    during_a_compaction(monkeypatch, win)
    with pytest.raises(RevisionConflict):
        chained.desired_store.compact(out, revision=5, full=full)
    model = load(chained.tiny.path)
    with model.follow(chained.folder, 0.01) as follower:
        assert follower.wait(120)
    assert serves(model, 5 if goes_on else 4)
    assert not list(chained.folder.glob(".short*"))


def test_a_compaction_removes_what_a_killed_one_has_left(chained: Service) -> None:
    left = [chained.folder / f".{name}.tmp-0123abcd" for name in ("short.safetensors", "short.goldens.safetensors")]
    other = chained.folder / ".other.safetensors.tmp-0123abcd"
    for path in (*left, other):
        path.write_bytes(b"half")
    chained.desired_store.compact(chained.folder / "short.safetensors", revision=5)
    assert [path.exists() for path in (*left, other)] == [False, False, True]


@pytest.mark.parametrize("name", ["v0.safetensors", "desired.json"])
def test_no_compaction_replaces_what_the_desired_store_names(
    name: str, chained: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by any path, and not through a link."""
    (tmp_path / "other").symlink_to(chained.folder)
    (chained.folder / "link.safetensors").symlink_to(name)
    (chained.folder / "hard.safetensors").hardlink_to(chained.folder / name)
    monkeypatch.chdir(chained.folder)
    content = (chained.folder / name).read_bytes()
    here = str(chained.folder)
    for folder in (f"{here}/../service/", f"{here}/../other/", "../other/", "", f"{here}/"):
        for out, says in ((name, "names this file"), ("link.safetensors", "is a link"), ("hard.safetensors", "names")):
            with pytest.raises(Unsupported, match=says):
                chained.desired_store.compact(folder + out, revision=5)
    assert (chained.folder / name).read_bytes() == content
    assert chained.revision == 5


def test_only_a_chain_is_made_shorter(chained: Service, delta: WriteDelta) -> None:
    desired_store, out = chained.desired_store, chained.folder / "short.safetensors"
    for named in (delta(1, 2), delta(3, 4)):
        content = named.read_bytes()
        with pytest.raises(Unsupported):
            desired_store.compact(named, revision=5)
        assert named.read_bytes() == content
    with pytest.raises(Unsupported):
        desired_store.compact("s3://bucket/short.safetensors", revision=5)
    desired_store.compact(out, revision=5)
    with pytest.raises(Unsupported):
        desired_store.compact(chained.folder / "again.safetensors", revision=6)
    desired_store.compact(chained.folder / "full.safetensors", revision=6, full=True)
    with pytest.raises(Unsupported):
        desired_store.compact(chained.folder / "again.safetensors", revision=7, full=True)
    assert not (chained.folder / "again.safetensors").exists()


@pytest.mark.parametrize("full", [False, True])
def test_a_chain_with_a_damaged_or_exchanged_file_stays(chained: Service, delta: WriteDelta, full: bool) -> None:
    out, path = chained.folder / "short.safetensors", delta(1, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DigestMismatch):
        chained.desired_store.compact(out, revision=5, full=full)
    path.write_bytes(delta(2, 3).read_bytes())
    with pytest.raises(UnexpectedWeights):
        chained.desired_store.compact(out, revision=5, full=full)
    assert (chained.revision, out.exists()) == (5, False)


def test_a_publisher_replaces_a_chain_by_promoting_the_same_weights(
    chained: Service, delta: WriteDelta, tmp_path: Path
) -> None:
    """As a full set, or as a delta from an earlier file of the chain; a longer way, or another one, changes nothing."""
    middle = merge_deltas([delta(1, 2), delta(2, 3), delta(3, 4)], tmp_path / "middle.safetensors").path
    short = merge_deltas([delta(0, 1), middle], tmp_path / "short.safetensors").path
    other = write_delta(chained.write(9), chained.write(4), tmp_path / "other.safetensors").path
    (chained.folder / "v9.safetensors").unlink()
    weights_id = chained.desired
    for revision, (source, bases) in enumerate([(middle, 2), (short, 1)], 6):
        state = chained.desired_store.promote(source)
        assert (state.revision, state.weights_id, len(state.weights.bases)) == (  # type: ignore[union-attr,arg-type]
            revision,
            weights_id,
            bases,
        )
        for again in (middle, other, delta(3, 4)):
            assert chained.desired_store.promote(again) == state
    with pytest.raises(BaseMismatch):
        chained.desired_store.set(other, revision=7)
    assert chained.set(4) == weights_id
    assert wanted(chained.desired_store.read()).bases is msgspec.UNSET  # type: ignore[union-attr]


@pytest.mark.parametrize("full", [False, True])
def test_a_compaction_that_is_killed_leaves_the_old_chain_or_the_new_one(chained: Service, full: bool) -> None:
    document, out = chained.folder / "desired.json", chained.folder / "short.safetensors"
    before, choose, found = document.read_bytes(), random.Random(0), Counter[int]()
    model, longest = load(chained.tiny.path), 0.02  # seconds before a kill: so many that both happen, on any machine
    for number in range(200):
        killed(
            lambda: (chained.desired_store.compact(out, revision=5, full=full), time.sleep(60)),
            choose.random() * longest,
        )
        state = chained.desired_store.read()
        model.swap(chained.folder / "v0.safetensors" if number % 2 else chained.write(9))
        request = chained.desired_store.located(wanted(state))
        onto = [(base.source, base.weights_id) for base in request.bases or ()]
        model.stage(chained.desired_store.locate(wanted(state)), onto=onto, expect=state.weights_id).commit()
        assert serves(model, 4)
        found[state.revision] += 1
        longest *= 1.3 if state.revision == 5 else 1 / 1.3
        document.write_bytes(before)
        if min(found[5], found[6]) >= 3:
            break
    assert min(found[5], found[6]) >= 3


def test_a_long_chain_has_room(service: Service) -> None:
    """As many files as may lead to a delta, with a history of such weights; the oldest of that give way."""
    ids = [f"{number:064x}" for number in range(MOST_BASES + 25)]
    folder = service.folder / ("f" * 100)
    desired_store = service.desired_store
    desired_store.promote(folder / "v0.safetensors", known=Known(ids[0]))
    for number in range(1, MOST_BASES + 1):
        if number < MOST_BASES - 25:
            continue
        through = tuple(
            document.DesiredBase(source=str(folder / f"d{each}.safetensors"), weights_id=ids[each])
            for each in range(1, number)
            if number == MOST_BASES - 25
        )
        base = ids[0] if through else ids[number - 1]
        state = desired_store.promote(
            folder / f"d{number}.safetensors", known=Known(ids[number], base=base, through=through)
        )
    assert [base.weights_id for base in wanted(state).bases or ()] == ids[:MOST_BASES]
    assert (service.folder / "desired.json").stat().st_size <= document.KEPT_BYTES
    assert 1 < len(state.history) <= MOST_KEPT
    with pytest.raises(Unsupported, match=rf"after {MOST_BASES + 1} files .*--compact FILE"):
        desired_store.promote(folder / "more.safetensors", known=Known("f" * 64, base=ids[MOST_BASES]))
    assert desired_store.rollback(revision=state.revision, known_there=True).weights_id == ids[MOST_BASES - 1]


def said(size: int) -> dict[str, str]:
    return {"config": "x" * size}


def test_whatever_trainers_write_operators_can_write(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest size: withdrawn weights stay withdrawn all the same, and a rollback has a target."""
    desired_store, longest = service.desired_store, {"by": "\1" * 4096, "why": "\1" * 4096}
    monkeypatch.setattr(document, "MOST_WITHDRAWN", 20)
    ids = [f"{number:064x}" for number in range(40)]
    for number, weights_id in enumerate(ids):
        desired_store.promote(service.folder / "v.safetensors", known=Known(weights_id, labels=said(65_000)), **longest)
        if number % 10 == 9:
            revision = desired_store.read().revision
            with pytest.raises(Unsupported):
                desired_store.promote(service.folder / "v.safetensors", known=Known("f" * 64, labels=said(66_000)))
            state = desired_store.hold(revision=revision, **longest)
            assert wanted(state).labels == said(65_000)
            target = state.history[-8].weights_id
            state = desired_store.rollback(revision=revision + 1, to=target, known_there=True, **longest)
            assert state.weights_id == target
            assert (service.folder / "desired.json").stat().st_size <= document.KEPT_BYTES
            desired_store.release(revision=revision + 2)
    withdrawn = [each for number, each in enumerate(ids) if number % 10 >= 2]
    assert [each.weights_id for each in desired_store.read().withdrawn] == withdrawn[-20:]


def test_a_document_without_room_can_be_written(service: Service) -> None:
    """As other programs may have filled it, up to what is read."""
    path = service.folder / "desired.json"
    ids = [service.set(seed) for seed in (1, 2)]
    for part in ("weights", "history"):
        fields = json.loads(path.read_bytes())
        entry = fields[part][0] if part == "history" else fields[part]
        entry["labels"] = said(document_storage.MOST_BYTES - 300 - len(json.dumps(fields, indent=2)))
        path.write_text(json.dumps(fields, indent=2))
        assert service.desired_store.hold(revision=service.revision, by="ana", why="w" * 4096).hold is not None
        assert path.stat().st_size < document.KEPT_BYTES
    state = service.desired_store.rollback(revision=service.revision, by="ana")
    assert (state.weights_id, [each.weights_id for each in state.withdrawn]) == (ids[0], ids[1:])


def test_withdrawn_deltas_whose_bases_were_left_out_are_not_gone_back_to(
    service: Service, delta: WriteDelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.set(0)
    withdrawn = service.desired_store.promote(delta(0, 1)).weights_id
    monkeypatch.setattr(document, "KEPT_BYTES", 0)
    service.desired_store.rollback(revision=2)
    with pytest.raises(UnexpectedWeights, match="no longer says from which files"):
        service.desired_store.rollback(to=withdrawn, revision=3)


def test_paths_have_a_maximum_length(service: Service) -> None:
    with pytest.raises(Unsupported, match="a path or URL of 5013 bytes, but at most 4096"):
        service.desired_store.set(f"https://host/{'x' * 4998}", revision=0, known=Known("0" * 64))


def test_no_more_is_written_than_is_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.set(1)
    before = service.desired_store.read()
    monkeypatch.setattr(desired_store, "MOST_BYTES", 900)
    with pytest.raises(Unsupported, match="readers accept at most 900"):
        service.desired_store.hold(revision=1, why="x" * 900)
    assert service.desired_store.read() == before


def test_a_document_with_more_bases_than_are_written_is_damaged(service: Service, delta: WriteDelta) -> None:
    service.set(0)
    service.desired_store.set(delta(0, 1), revision=1)
    path = service.folder / "desired.json"
    document = json.loads(path.read_bytes())
    document["weights"]["bases"] *= MOST_BASES + 1
    path.write_text(json.dumps(document))
    with pytest.raises(DesiredError):
        service.desired_store.read()


def test_weights_of_another_graph_are_set_only_if_it_is_meant(service: Service, tmp_path: Path) -> None:
    service.set(1)
    other = service.tiny.write(tmp_path / "other.safetensors", service.tiny.values(2), graph_id="0" * 64)
    with pytest.raises(GraphMismatch):
        service.desired_store.set(other, revision=1)
    assert service.desired_store.set(other, revision=1, allow_other_graph=True).revision == 2


def test_the_history_has_an_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_KEPT", 3)
    ids = [service.promote(seed) for seed in range(1, 7)]
    assert [each.weights_id for each in service.desired_store.read().history] == ids[2:5]
    assert MOST_KEPT == 20


def with_field(field: str, value: str) -> bytes:
    """Return a document that is valid but for one field."""
    weights = {"source": '"v"', "weights_id": '"' + "0" * 64 + '"', "since": "0"}
    document = {"desired_version": "1", "revision": "1"}
    (document if field in document else weights)[field] = value
    document["weights"] = "{" + ", ".join(f'"{name}": {text}' for name, text in weights.items()) + "}"
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in document.items()) + "}").encode()


BROKEN = {
    "empty": b"",
    "torn": b'{"desired_version": 1, "revision": 4, "wei',
    "a list": b"[]",
    "no text": b"\xff\xfe\x00",
    "of another version": b'{"desired_version": 2, "revision": 1}',
    "without a version": b'{"revision": 1}',
    "without a revision": b'{"desired_version": 1}',
    "a negative revision": b'{"desired_version": 1, "revision": -1}',
    "an unknown field": b'{"desired_version": 1, "revision": 1, "more": 2}',
    "no id": with_field("weights_id", '"x"'),
    "no source": with_field("source", '""'),
    "deep": b"[" * 100_000,
    "deep in a field": b'{"desired_version": 1, "revision": 1, "more": ' + b"[" * 100_000,
    **{
        f"{field} of {value}": with_field(field, value)
        for field, values in {
            "revision": ("1e400", "9007199254740992", "1" + "0" * 400, "1.5", '"1"', "NaN"),
            "desired_version": ("1" + "0" * 400, "1" + "0" * 5000, "1.5", '"1"', "[[]]", "true"),
            "since": ("1e308", "-1e308", "1e999", "-1", "253402300800", "1" + "0" * 400, "NaN", "Infinity", '"1"'),
            "labels": ("[]", '{"a": 1}', "null", '{"a": "\\ud800"}'),
            "by": ("1", "null", '"\\ud800"'),
        }.items()
        for value in values
    },
    "large": b" " * (5 << 20),
}
REASONS = {
    "of another version": "format version 2; this runtime reads 1",
    "without a version": "no version",
    "without a revision": "no revision",
    "an unknown field": "unknown field `more`",
    "large": "more than a desired state can have",
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_invalid_document_is_neither_read_nor_overwritten(name: str, service: Service) -> None:
    path, content = service.write(1), BROKEN[name]
    (service.folder / "desired.json").write_bytes(content)
    before = descriptors()
    with pytest.raises(DesiredError, match=REASONS.get(name, "not a desired state")):
        service.desired_store.read()
    for write in (lambda: service.desired_store.set(path, revision=0), lambda: service.desired_store.promote(path)):
        with pytest.raises(DesiredError):
            write()
    assert (service.folder / "desired.json").read_bytes() == content
    gc.collect()
    assert descriptors() <= before


def test_a_pipe_is_not_waited_for(service: Service) -> None:
    os.mkfifo(service.folder / "desired.json")
    with pytest.raises(DesiredError):
        service.desired_store.read()


def test_a_document_behind_a_link_is_only_read(service: Service, tmp_path: Path) -> None:
    """As Kubernetes mounts one. A writer there would take another lock than one beside the document."""
    service.set(1)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "..data").symlink_to(service.folder)
    (linked / "desired.json").symlink_to("..data/desired.json")
    desired_store, path = DesiredStore(linked), service.write(2)
    assert desired_store.read() == service.desired_store.read()
    for write in (lambda: desired_store.hold(revision=1), lambda: desired_store.promote(path)):
        with pytest.raises(DesiredError, match=r"is a link, and only read; write to the folder of .*\.\.data/desired"):
            write()
    (linked / "..data").unlink()
    for use in (desired_store.read, lambda: desired_store.set(path, revision=0), lambda: desired_store.promote(path)):
        with pytest.raises(DesiredError):
            use()
    assert (service.revision, sorted(each.name for each in linked.iterdir())) == (1, ["desired.json"])


def test_a_desired_store_that_is_away_is_not_made(service: Service, tmp_path: Path) -> None:
    path = service.tiny.write(tmp_path / "v1.safetensors", service.tiny.values(1))
    away = DesiredStore(tmp_path / "away")
    for use in (away.read, lambda: away.set(path, revision=0), lambda: away.promote(path)):
        with pytest.raises(DesiredError):
            use()
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize(
    ("desired_store", "says"),
    [(7, "got a int"), ("", "is empty"), ("s3://a::b://c", "chained"), ("models:/x", "MLflow")],
)
def test_an_invalid_desired_store_is_refused(desired_store: object, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        DesiredStore(desired_store)  # type: ignore[arg-type]


def test_a_desired_store_without_permission_says_so(service: Service) -> None:
    if os.geteuid() == 0:
        (service.folder / ".desired.lock").mkdir()  # what root cannot open either
    else:
        service.folder.chmod(0o555)
    with pytest.raises(DesiredError, match="cannot be written"):
        service.set(1)
    assert not (service.folder / "desired.json").exists()


def test_a_suspended_writer_is_not_waited_for_forever(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_storage, "PATIENCE", 0.1)
    service.set(1)
    with (service.folder / ".desired.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DesiredError, match=r"has held .* for 0\.1 s"):
            service.set(2)
        assert service.revision == 1
    service.set(2)


def as_user(uid: int, groups: list[int], root: Path, work: Callable[[], bool]) -> bool:
    """Do the work as another user, whose paths begin in `root`, as others may not go through the tests' folders."""

    def child() -> bool:
        os.chroot(root)
        os.setgroups(groups)
        os.setgid(uid)
        os.setuid(uid)
        return work()

    return in_a_child(child)


TEAM, ANA, BO, GUEST = 6001, 6002, 6003, 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="other users can only be tried by root")
@pytest.mark.pairwise
@pytest.mark.parametrize("first", [ANA, BO, 0])
@pytest.mark.parametrize(
    "shared",
    [(0o755, ANA, [ANA]), (0o775, TEAM, [ANA, BO]), (0o2775, TEAM, [ANA, BO]), (0o777, TEAM, [ANA, BO, GUEST])],
)
@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_only_those_who_may_write_to_a_desired_store_can_lock_it(
    shared: tuple[int, int, list[int]], first: int, umask: int, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shared: the folder's mode and group, and who may write to it."""
    mode, group, writers = shared
    monkeypatch.setattr(document_storage, "SHARING_PATIENCE", 0.02)
    folder = service.folder
    os.chown(folder, ANA, group)
    folder.chmod(mode)
    folder.parent.chmod(0o755)

    def may_write() -> bool:
        os.umask(umask)
        desired_store = DesiredStore(f"/{folder.name}")
        try:
            return desired_store.hold(revision=desired_store.read().revision).hold is not None
        except DesiredError:
            return False

    def cannot_open() -> bool:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with pytest.raises(PermissionError):
                os.open(f"/{folder.name}/.desired.lock", flags)
        return True

    for user in (first, ANA, BO, GUEST):
        groups = [TEAM] if user in (ANA, BO) else []
        assert as_user(user, groups, folder.parent, may_write) == (user in (*writers, 0))
        if user not in (*writers, 0) and (folder / ".desired.lock").exists():
            assert as_user(user, groups, folder.parent, cannot_open)


@pytest.mark.skipif(os.geteuid() != 0, reason="other users can only be tried by root")
def test_a_lock_that_could_be_read_is_closed_to_readers_by_its_owner(service: Service) -> None:
    lock = service.folder / ".desired.lock"
    lock.touch(0o644)
    service.set(1)
    assert lock.stat().st_mode & 0o777 == 0o600


WRITE = """
import sys
from weightswap_runtime import DesiredStore, RevisionConflict
desired_store, weights, me, tries = DesiredStore(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
won = lost = 0
while won + lost < tries:
    seen = desired_store.read().revision
    try:
        written = desired_store.set(weights, revision=seen, by=me)
        print(written.revision, flush=True)
        won += 1
    except RevisionConflict:
        lost += 1
"""


def test_of_several_writers_none_loses_what_it_was_told_is_written(service: Service) -> None:
    tries, writers = 70, [str(number) for number in range(3)]
    paths = [service.write(seed) for seed in range(3)]
    command = [warm.python(), "-c", WRITE, str(service.folder)]
    processes = [
        subprocess.Popen([*command, str(path), me, str(tries)], stdout=subprocess.PIPE, text=True, env=environment())
        for me, path in zip(writers, paths, strict=True)
    ]
    won = {
        me: [int(line) for line in process.communicate()[0].split()]
        for me, process in zip(writers, processes, strict=True)
    }
    assert all(process.returncode == 0 for process in processes)
    revisions = Counter(revision for mine in won.values() for revision in mine)
    last = service.desired_store.read()
    assert sorted(revisions) == list(range(1, last.revision + 1))  # each was written, by one writer
    assert set(revisions.values()) == {1}
    assert last.revision in won[wanted(last).by]
    assert {path.name for path in service.folder.iterdir()} == {
        *(path.name for path in paths),
        "desired.json",
        ".desired.lock",
    }


def test_promotions_of_several_processes_all_arrive(service: Service) -> None:
    code = (
        "import sys\nfrom weightswap_runtime import DesiredStore\n"
        "for path in sys.argv[2:]: DesiredStore(sys.argv[1]).promote(path)"
    )
    paths = [str(service.write(seed)) for seed in range(12)]
    processes = [
        subprocess.Popen([warm.python(), "-c", code, str(service.folder), *paths[start::3]], env=environment())
        for start in range(3)
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    state = service.desired_store.read()
    assert state.revision == 12
    assert {each.weights_id for each in state.known} == {weights_id_of(Path(path)) for path in paths}


def test_a_writer_that_was_killed_leaves_nothing_that_lasts(service: Service) -> None:
    service.set(1)
    left = service.folder / ".desired.json.tmp-0123abcd"
    left.write_bytes(b'{"half": ')
    service.set(2)
    assert not left.exists()


def test_the_document_is_for_people_too(service: Service, tiny: TinyArtifact) -> None:
    service.set(1, by="ana")
    text = (service.folder / "desired.json").read_text()
    assert '\n    "by": "ana",\n' in text
    assert json.loads(text) == json.loads(json.dumps(service.desired_store.read().as_dict()))
    assert encode(service.desired_store.read()).decode() == text
