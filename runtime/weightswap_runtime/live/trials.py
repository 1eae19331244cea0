"""Trying staged weights with goldens, before anybody is served by them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Goldens, artifact_goldens, goldens_beside
from weightswap_runtime.sources.location import Location
from weightswap_runtime.staging.golden_check import verify
from weightswap_runtime.staging.request import Staging

from .residency.candidate import Candidate

if TYPE_CHECKING:
    from weightswap_runtime.staging.transforms import Transforms

Verified = Literal["goldens", "finite", "none"]


@dataclass(eq=False)
class Member:
    """An artifact whose graphs run on the weights; `id` is that of its engine in every session."""

    artifact: Artifact
    engine: Engine
    id: int
    goldens: Goldens | None
    _transforms: Transforms | None = None

    def open_transforms(self) -> Transforms:
        """The adapter's graph, opened on first use. Raises ArtifactError, and MissingExtra without torch."""
        if self._transforms is None:
            from weightswap_runtime.staging.transforms import Transforms  # needs torch

            self._transforms = Transforms(self.artifact)
        return self._transforms


class Trial(NamedTuple):
    """Goldens, and the artifact whose graphs they are for."""

    member: Member
    goldens: Goldens


def new_member(artifact: Artifact, engine: Engine, number: int) -> Member:
    """Raises ArtifactError, WeightFileError and GoldensError for an artifact whose goldens are damaged."""
    return Member(artifact, engine, number, artifact_goldens(artifact))


def find_trials(location: Location, owner: Member, members: Sequence[Member], staging: Staging) -> list[Trial]:
    """The goldens beside a weight file for `owner`'s graph, and those in every artifact.

    Raises GoldensError and WeightFileError for damaged ones, and for goldens of another graph.
    """
    request, check = staging.request, staging.job.check
    if request.verify == "off":
        return []
    trials = [Trial(member, member.goldens) for member in members if member.goldens is not None]
    beside = goldens_beside(location, staging.manifest, allow_other_graph=request.allow_other_graph, check=check)
    if beside is not None:
        # a part of a file gives other weights than those that were recorded
        trials.append(Trial(owner, beside._replace(bundled=bool(request.only))))
    return trials


def try_out(candidate: Candidate, trials: Sequence[Trial], staging: Staging) -> tuple[Verified, float]:
    """Run all goldens on the candidate's session; returns how they were compared, and the seconds that it took.

    Raises GoldenMismatch, GoldensError and StageCancelled.
    """
    start = time.perf_counter()
    modes: set[str] = set()
    if trials:
        session = candidate.trial_session(staging.job)
        staging.job.begin("verifying")
        for member, goldens in trials:
            bound = session.bound.get(member.id)
            if bound is None:  # its model was dropped meanwhile, so that nobody can call it any more
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
