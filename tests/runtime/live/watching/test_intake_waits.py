"""The waits of an intake: for files that are being copied, and for the base weights of a delta."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.desk import INTERVAL, Desk
from tests.support.tiny import serves
from weightswap_runtime import (
    TruncatedFile,
)
from weightswap_runtime.live.watching.intake import PATIENCE
from weightswap_runtime.sources.local import has_writer


def plain(desk: Desk, name: str, seed: int) -> Path:
    """A file without digests, as safetensors itself writes it."""
    import safetensors.torch

    path = desk.folder / f"{name}.safetensors"
    safetensors.torch.save_file({key: value.clone() for key, value in desk.tiny.values(seed).items()}, path)
    return path


def test_a_file_without_digests_is_taken_when_two_looks_found_it_the_same(desk: Desk) -> None:
    desk.look()
    path = plain(desk, "v1", 1)
    desk.look()
    path.write_bytes(plain(desk, "other", 2).read_bytes())
    (desk.folder / "other.safetensors").unlink()
    desk.look()
    assert desk.tries == []
    desk.look()
    desk.look()
    assert (desk.taken, serves(desk.model, 2)) == (["v1"], True)


def test_a_file_without_digests_is_taken_once_its_writer_has_closed_it(desk: Desk) -> None:
    desk.look()
    path = plain(desk, "v1", 1)
    with path.open("ab"):
        with path.open("rb") as reader:
            if not has_writer(reader.fileno()):
                pytest.skip("no leases here")
        for _ in range(10):
            desk.look()
        assert (desk.taken, desk.told, desk.intake.skipped) == ([], [], {})
        assert "is being written to" in str(desk.intake.last_error)
    for _ in range(10):
        desk.look(100)
    assert (desk.taken, desk.told, desk.intake.last_error) == (["v1"], [], None)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing yet": lambda raw: b"",
    "half a length": lambda raw: raw[:5],
    "half a header": lambda raw: raw[:100],
    "half of the data": lambda raw: raw[:-40],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_file_that_is_being_copied_is_waited_for(cut: Callable[[bytes], bytes], desk: Desk) -> None:
    desk.look()
    raw = desk.write("v1", 1).read_bytes()
    path = desk.folder / "v1.safetensors"
    path.write_bytes(cut(raw))
    for _ in range(int(PATIENCE / INTERVAL)):
        desk.look()
    assert (desk.tries, desk.told) == ([], [])
    assert isinstance(desk.intake.waiting["v1.safetensors"], TruncatedFile)
    path.write_bytes(raw)
    desk.look()
    assert (desk.taken, desk.told, desk.intake.waiting) == (["v1"], [], {})


def test_a_file_that_stays_cut_off_is_skipped(desk: Desk) -> None:
    desk.look()
    path = desk.write("v1", 1)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    desk.look()
    desk.look(PATIENCE)
    desk.look(PATIENCE)
    assert (desk.tries, desk.told) == (["v1"], [("skipped v1", "TruncatedFile")])
    assert isinstance(desk.intake.last_error, TruncatedFile)


def test_a_file_that_is_being_copied_does_not_keep_a_later_one(desk: Desk) -> None:
    desk.look()
    path = desk.write("v1", 1)
    path.write_bytes(path.read_bytes()[:-1])
    desk.look()
    desk.write("v2", 2)
    desk.look()
    assert desk.taken == ["v2"]
    assert desk.told == [("skipped v1", "Superseded")]
    assert "it is truncated" in str(desk.intake.skipped["v1.safetensors"])


def test_deltas_in_order(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.delta("v2", 1, 2)
    desk.delta("v3", 2, 3)
    desk.look()
    assert (desk.taken, serves(desk.model, 3)) == (["v1", "v2", "v3"], True)


def test_a_delta_waits_for_what_it_starts_from(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v3", 2, 3)
    desk.look()
    desk.look()
    assert (desk.tries, desk.told, desk.intake.last_error) == (["v1"], [("waiting v3", "BaseMismatch")], None)
    assert list(desk.intake.waiting) == ["v3.safetensors"]
    assert "which are not served yet" in str(desk.intake.waiting["v3.safetensors"])
    desk.delta("v2", 1, 2)
    desk.look()
    assert desk.taken == ["v1", "v2", "v3"]
    assert (len(desk.told), desk.intake.waiting) == (1, {})


def test_a_delta_is_taken_after_a_swap_by_hand(desk: Desk, tmp_path: Path) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v3", 2, 3)
    desk.look()
    desk.model.swap(desk.tiny.write(tmp_path / "hand", desk.tiny.values(2)))
    desk.look()
    assert desk.taken == ["v1", "v3"]


def test_a_delta_that_waits_is_passed_over_with_a_later_file(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v2", 8, 9)
    desk.look()
    desk.write("v3", 3)
    desk.look()
    assert desk.taken == ["v1", "v3"]
    assert desk.told == [("waiting v2", "BaseMismatch"), ("skipped v2", "Superseded")]
    assert desk.intake.waiting == {}
    assert "it is a delta from the weights" in str(desk.intake.skipped["v2.safetensors"])


def test_a_delta_whose_base_changes_between_the_look_and_the_swap_waits(desk: Desk) -> None:
    desk.write("v1", 1)
    desk.look()
    desk.delta("v2", 1, 2)
    original, base = desk.serves, desk.model.weights_id
    desk.model.swap(desk.tiny.write(desk.folder.parent / "hand", desk.tiny.values(5)))
    desk.serves = lambda weights_id: weights_id == base  # type: ignore[method-assign]
    desk.look()
    desk.serves = original  # type: ignore[method-assign]
    desk.model.rollback()
    desk.look()
    assert (desk.tries, desk.told) == (["v1", "v2", "v2"], [])
    assert serves(desk.model, 2)
