"""Verification of a candidate with goldens, before it is served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from weightswap_runtime.format.goldens import Goldens, goldens_beside
from weightswap_runtime.sources.location import Location
from weightswap_runtime.staging.golden_check import verify
from weightswap_runtime.staging.request import Staging

from .member import Member
from .residency.candidate import Candidate

Verified = Literal["goldens", "finite", "none"]


class MemberGoldens(NamedTuple):
    """Goldens, and the member whose graphs they are for."""

    member: Member
    goldens: Goldens


def find_goldens(location: Location, owner: Member, members: Sequence[Member], staging: Staging) -> list[MemberGoldens]:
    """Return the goldens in every artifact, and those beside a weight file, which are for `owner`'s graph.

    Raises GoldensError and WeightFileError for damaged ones, and for goldens of another graph.
    """
    request, check = staging.request, staging.job.check
    if request.verify == "off":
        return []
    all_goldens = [MemberGoldens(member, member.goldens) for member in members if member.goldens is not None]
    beside = goldens_beside(location, staging.manifest, allow_other_graph=request.allow_other_graph, check=check)
    if beside is not None:
        # a part of a file results in other weights than those that the goldens were recorded for
        all_goldens.append(MemberGoldens(owner, beside._replace(bundled=bool(request.only))))
    return all_goldens


def verify_candidate(
    candidate: Candidate, all_goldens: Sequence[MemberGoldens], staging: Staging
) -> tuple[Verified, float]:
    """Run all goldens on the candidate's session; return the comparison that was done, and the seconds that it took.

    Raises GoldenMismatch, GoldensError and StageCancelled.
    """
    start = time.perf_counter()
    modes: set[str] = set()
    if all_goldens:
        session = candidate.trial_session(staging.job)
        staging.job.begin("verifying")
        for member, goldens in all_goldens:
            bound = session.bound.get(member.id)
            if bound is None:  # its model was dropped meanwhile
                continue
            mode = verify(
                goldens._replace(where=f"{candidate.contents.source}: tried with {goldens.where}"),
                bound,
                member.engine,
                member.artifact.manifest,
                candidate.contents.identity.weights_id,
                mode=staging.request.verify,
                check=staging.job.check,
            )
            modes.add(mode)
    verified: Verified = "goldens" if "goldens" in modes else "finite" if modes else "none"
    return verified, time.perf_counter() - start
