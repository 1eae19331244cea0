"""The ranks of a model answer with one set of weights, whatever is swapped, refused, rolled back, killed or stopped.

Each answer has the mark of every rank's weights, which the ranks exchange in the call itself.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.rank_processes import SIGNALS, Blow, Step, Told, play, prepare


@pytest.fixture(scope="module", params=[2, 4])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return prepare(tmp_path_factory.mktemp("ranks"), request.param), request.param


def steps(size: int) -> st.SearchStrategy[Step]:
    whats = st.sampled_from(["call", "swap", "delta", "stage", "refuse", "roll back"])
    return st.builds(Step, whats, st.integers(0, 3), st.integers(0, size - 1))


def check(told: list[Told | None], size: int) -> list[Told]:
    """Check that no rank has failed and that no answer mixes sets; return what the ranks told that ended."""
    ended = [each for each in told if each is not None]
    assert not [each.crashed for each in ended if each.crashed]
    for each in ended:
        assert all(len(set(marks)) == 1 and len(marks) == size for marks in each.answers)
    shortest = min(len(each.answers) for each in ended)
    assert len({tuple(each.answers[:shortest]) for each in ended}) == 1
    return ended


@pytest.mark.parametrize("residency", ["double", "single"])
def test_a_storm_of_changes_and_refusals(residency: str, rig: tuple[Path, int]) -> None:
    folder, size = rig
    draw = random.Random(size)
    whats = ["call", "call", "swap", "delta", "stage", "refuse", "roll back"]
    played = [Step(draw.choice(whats), draw.randrange(4), draw.randrange(size)) for _ in range(60)]
    ended = check(play(folder, size, residency, played), size)
    assert len(ended) == size
    assert not [each.lost for each in ended if each.lost]
    assert len({tuple(each.ids) for each in ended}) == 1
    assert len(ended[0].answers) >= 60


@pytest.mark.parametrize("residency", ["double", "single"])
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
@pytest.mark.pairwise
def test_who_is_left_when_a_rank_is_gone_says_so(signal: int, residency: str, rig: tuple[Path, int]) -> None:
    folder, size = rig
    played = [Step("call"), Step("swap", 1), *[Step("call")] * 400]
    _check_blow(folder, size, residency, played, Blow(signal, size - 1, 20, 0.0))


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_ranks_that_are_killed_or_stopped_anywhere(rig: tuple[Path, int], data: st.DataObject) -> None:
    folder, size = rig
    played = data.draw(st.lists(steps(size), min_size=3, max_size=15))
    blow = Blow(
        data.draw(st.sampled_from(SIGNALS)),
        data.draw(st.integers(0, size - 1)),
        data.draw(st.integers(0, len(played) - 1)),
        data.draw(st.floats(0, 0.02)),
    )
    residency = data.draw(st.sampled_from(["double", "single"]))
    told = play(folder, size, residency, played, blow)
    for each in check(told, size):
        assert not each.lost or each.refused_later == ["RanksLost"] * 3


def _check_blow(folder: Path, size: int, residency: str, played: list[Step], blow: Blow) -> None:
    for each in check(play(folder, size, residency, played, blow), size):
        assert "another rank is gone, or took more than 2 s" in each.lost
        assert each.refused_later == ["RanksLost"] * 3
