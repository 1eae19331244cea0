"""The revision in a replica's responses."""

from __future__ import annotations

from typing import Any, cast

import pytest

from .clusters import seen_again


@pytest.mark.filterwarnings("ignore")  # Ray's
def test_a_replica_that_was_paused_over_two_commits_claims_no_revision_of_others() -> None:
    """Its arena already has the revision of the commit after the next."""
    pytest.importorskip("ray")
    from weightswap_fleet.replica import Freshness

    class Paused:
        generations = iter([0, 1])

        @property
        def generation(self) -> int:
            return next(self.generations, 1)

    class RevisionPage:
        def revision(self, generation: int) -> int:
            return {0: 3, 1: 2}[generation]  # 1 was that of generation 0, whose arena gets that of 2

    assert Freshness(cast("Any", RevisionPage()), cast("Any", Paused())).revision == 2


def test_a_client_that_goes_back_under_one_revision_is_found() -> None:
    """Its first answer of a revision may be of the previous weights, later ones may not."""
    assert seen_again([[(1, 1), (1, 2), (2, 2), (2, 2)], [(2, 2), (2, 2)]]) == {2: {2}}
    assert seen_again([[(2, 2), (2, 2), (1, 2)]]) == {2: {1, 2}}
