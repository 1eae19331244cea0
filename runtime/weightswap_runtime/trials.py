"""Trying staged weights with goldens, before anybody is served by them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .artifact import Artifact
from .candidates import Candidate
from .engines import Engine
from .goldens import Goldens, artifact_goldens, goldens_beside
from .job import Job
from .places import Place
from .sources import Check
from .staging import Request
from .verifying import verify

Verified = Literal["goldens", "finite", "none"]


class Member(NamedTuple):
    """An artifact whose graphs run on the weights; `place` is that of its engine in every session."""

    artifact: Artifact
    engine: Engine
    place: int
    goldens: Goldens | None


class Trial(NamedTuple):
    """Goldens, and the artifact whose graphs they are for."""

    member: Member
    goldens: Goldens


def new_member(artifact: Artifact, engine: Engine, place: int) -> Member:
    """Raises ArtifactError, WeightFileError and GoldensError for an artifact whose goldens are damaged."""
    return Member(artifact, engine, place, artifact_goldens(artifact))


def find_trials(place: Place, owner: Member, members: Sequence[Member], request: Request, check: Check) -> list[Trial]:
    """The goldens beside a weight file for `owner`'s graph, and those in every artifact.

    check: called while a remote answer is waited for. Raises GoldensError and WeightFileError for damaged ones, and for
    goldens of another graph.
    """
    if request.verify == "off":
        return []
    found = [Trial(member, member.goldens) for member in members if member.goldens is not None]
    manifest = owner.artifact.manifest
    beside = goldens_beside(place, manifest, allow_other_graph=request.allow_other_graph, check=check)
    if beside is not None:
        # a part of a file gives other weights than those that were recorded
        found.append(Trial(owner, beside._replace(bundled=bool(request.only))))
    return found


def try_out(candidate: Candidate, trials: Sequence[Trial], request: Request, job: Job) -> tuple[Verified, float]:
    """Run all goldens on the candidate's session; returns how they were compared, and the seconds that it took.

    Raises GoldenMismatch, GoldensError and StageCancelled.
    """
    start = time.perf_counter()
    modes: set[str] = set()
    if trials:
        session = candidate.session(job)
        job.begin("verifying")
        for (artifact, engine, place, _), goldens in trials:
            bound = session.bound.get(place)
            if bound is None:  # its model was dropped meanwhile, so that nobody can call it any more
                continue
            mode = verify(
                goldens._replace(where=f"{candidate.contents.source}: tried with {goldens.where}"),
                bound,
                engine,
                artifact.manifest,
                candidate.contents.identity.weights_id,
                mode=request.verify,
                check=job.check,
            )
            modes.add(mode)
    verified: Verified = "goldens" if "goldens" in modes else "finite" if modes else "none"
    return verified, time.perf_counter() - start
