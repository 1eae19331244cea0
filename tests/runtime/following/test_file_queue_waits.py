"""The waits of a file queue: for files that are being copied, and for the base weights of a delta."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.damage import damaged
from tests.support.file_queue_rig import INTERVAL, FileQueueRig
from tests.support.tiny import serves
from weightswap_runtime.errors import reason_of
from weightswap_runtime.following.file_queue import PATIENCE
from weightswap_runtime.sources.byte_source import has_writer


def plain(rig: FileQueueRig, name: str, seed: int) -> Path:
    """A file without digests, as safetensors itself writes it."""
    return tiny.plain(rig.tiny, rig.folder / f"{name}.safetensors", **rig.tiny.values(seed))


def test_a_file_without_digests_is_taken_when_two_polls_found_it_the_same(rig: FileQueueRig) -> None:
    rig.poll()
    path = plain(rig, "v1", 1)
    rig.poll()
    path.write_bytes(plain(rig, "other", 2).read_bytes())
    (rig.folder / "other.safetensors").unlink()
    rig.poll()
    assert rig.attempts == []
    rig.poll()
    rig.poll()
    assert (rig.committed, serves(rig.model, 2)) == (["v1"], True)


def test_a_file_without_digests_is_taken_once_its_writer_has_closed_it(rig: FileQueueRig) -> None:
    rig.poll()
    path = plain(rig, "v1", 1)
    with path.open("ab"):
        with path.open("rb") as reader:
            if not has_writer(reader.fileno()):
                pytest.skip("no leases here")
        for _ in range(10):
            rig.poll()
        assert (rig.committed, rig.reports, rig.file_queue.skipped) == ([], [], {})
        assert "is being written to" in str(rig.file_queue.last_error)
    for _ in range(10):
        rig.poll(100)
    assert (rig.committed, rig.reports, rig.file_queue.last_error) == (["v1"], [], None)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing yet": lambda raw: b"",
    "half a length": lambda raw: raw[:5],
    "half a header": lambda raw: raw[:100],
    "half of the data": lambda raw: raw[:-40],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_file_that_is_being_copied_is_waited_for(cut: Callable[[bytes], bytes], rig: FileQueueRig) -> None:
    rig.poll()
    raw = rig.write("v1", 1).read_bytes()
    path = rig.folder / "v1.safetensors"
    path.write_bytes(cut(raw))
    for _ in range(int(PATIENCE / INTERVAL)):
        rig.poll()
    assert (rig.attempts, rig.reports) == ([], [])
    assert reason_of(rig.file_queue.waiting["v1.safetensors"]) == "truncated"
    path.write_bytes(raw)
    rig.poll()
    assert (rig.committed, rig.reports, rig.file_queue.waiting) == (["v1"], [], {})


def test_a_file_that_stays_cut_off_is_skipped(rig: FileQueueRig) -> None:
    rig.poll()
    path = rig.write("v1", 1)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    rig.poll()
    rig.poll(PATIENCE)
    rig.poll(PATIENCE)
    assert (rig.attempts, rig.reports) == (["v1"], [("skipped v1", "truncated")])
    assert reason_of(rig.file_queue.last_error) == "truncated"


def test_a_file_that_is_being_copied_does_not_keep_a_later_one(rig: FileQueueRig) -> None:
    rig.poll()
    path = rig.write("v1", 1)
    path.write_bytes(path.read_bytes()[:-1])
    rig.poll()
    rig.write("v2", 2)
    rig.poll()
    assert rig.committed == ["v2"]
    assert rig.reports == [("skipped v1", "superseded")]
    assert "it is truncated" in str(rig.file_queue.skipped["v1.safetensors"])


@pytest.mark.usefixtures("_places")
def test_deltas_that_follow_each_other_are_taken_at_once(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.delta("v2", 1, 2)
    rig.delta("v3", 2, 3)
    rig.poll()
    assert (rig.committed, serves(rig.model, 3), rig.model.generation) == (["v1", "v3"], True, 1)
    for number in (4, 5, 6):
        rig.delta(f"v{number}", number - 1, number)
    rig.poll()
    rig.poll()
    assert (rig.committed[2:], serves(rig.model, 6), rig.model.generation) == (["v6"], True, 2)
    assert (rig.reports, rig.file_queue.skipped, rig.file_queue.waiting) == ([], {}, {})


@pytest.mark.parametrize("number", [2, 3, 4])
def test_of_deltas_that_cannot_be_taken_at_once_each_is_taken_by_itself(number: int, rig: FileQueueRig) -> None:
    """Those before a damaged one are served, and the event names it."""
    rig.write("v1", 1)
    rig.poll()
    paths = [rig.delta(f"v{new}", new - 1, new) for new in (2, 3, 4)]
    damaged(paths[number - 2])
    rig.poll()
    rig.poll()
    assert rig.committed == [f"v{each}" for each in range(1, number)]
    assert rig.reports[0] == (f"skipped v{number}", "DigestMismatch")
    assert serves(rig.model, number - 1)
    rig.delta(f"v{number}", number - 1, number)
    rig.poll()
    assert serves(rig.model, 4)
    assert rig.committed[number - 1 :] == ["v4"]


def test_a_delta_of_another_chain_ends_what_is_taken_at_once(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.poll()
    rig.delta("v2", 1, 2)
    rig.delta("v3", 2, 3)
    rig.delta("v4", 8, 9)
    rig.delta("v5", 3, 5)
    rig.poll()
    assert (rig.committed, serves(rig.model, 5)) == (["v1", "v3", "v5"], True)
    assert rig.reports == [("skipped v4", "superseded")]


@pytest.mark.usefixtures("_places")
def test_a_delta_waits_for_what_it_starts_from(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.poll()
    rig.delta("v3", 2, 3)
    rig.poll()
    rig.poll()
    assert (rig.attempts, rig.reports, rig.file_queue.last_error) == (["v1"], [("waiting v3", "BaseMismatch")], None)
    assert list(rig.file_queue.waiting) == ["v3.safetensors"]
    assert "which are not served yet" in str(rig.file_queue.waiting["v3.safetensors"])
    rig.delta("v2", 1, 2)
    rig.poll()
    assert rig.committed == ["v1", "v3"]
    assert (len(rig.reports), rig.file_queue.waiting) == (1, {})


def test_a_delta_is_taken_after_a_swap_by_hand(rig: FileQueueRig, tmp_path: Path) -> None:
    rig.write("v1", 1)
    rig.poll()
    rig.delta("v3", 2, 3)
    rig.poll()
    rig.model.swap(rig.tiny.write(tmp_path / "hand", rig.tiny.values(2)))
    rig.poll()
    assert rig.committed == ["v1", "v3"]


def test_a_delta_that_waits_is_passed_over_with_a_later_file(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.poll()
    rig.delta("v2", 8, 9)
    rig.poll()
    rig.write("v3", 3)
    rig.poll()
    assert rig.committed == ["v1", "v3"]
    assert rig.reports == [("waiting v2", "BaseMismatch"), ("skipped v2", "superseded")]
    assert rig.file_queue.waiting == {}
    assert "it is a delta from the weights" in str(rig.file_queue.skipped["v2.safetensors"])


def test_a_delta_whose_base_changes_between_the_poll_and_the_swap_waits(rig: FileQueueRig) -> None:
    rig.write("v1", 1)
    rig.poll()
    rig.delta("v2", 1, 2)
    original, base = rig.serves, rig.model.weights_id
    rig.model.swap(rig.tiny.write(rig.folder.parent / "hand", rig.tiny.values(5)))
    rig.serves = lambda weights_id: weights_id == base  # type: ignore[method-assign]
    rig.poll()
    rig.serves = original  # type: ignore[method-assign]
    rig.model.rollback()
    rig.poll()
    assert (rig.attempts, rig.reports) == (["v1", "v2", "v2"], [])
    assert serves(rig.model, 2)
