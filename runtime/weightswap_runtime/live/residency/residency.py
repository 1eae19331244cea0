"""The two ways to hold weights: two arenas and an exchange, or one arena and a copy in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, NoReturn, Protocol, get_args

from weightswap_runtime.errors import ModelClosed, Unsupported
from weightswap_runtime.live.gate import Version
from weightswap_runtime.live.session import Session
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.staging.request import StagedChange
from weightswap_runtime.threads.job import Job

from .candidate import Candidate, Committed, Resources, StagingTarget
from .double import Double
from .single import Single

ResidencyName = Literal["double", "single"]
RESIDENCIES: tuple[ResidencyName, ...] = get_args(ResidencyName)


class Residency(Protocol):
    """A strategy for where weights are staged, and how they become the served ones."""

    name: str

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that calls can reach."""
        ...

    def target(self, timeout: float | None, job: Job) -> AbstractContextManager[StagingTarget]:
        """Let the block write a full set into a session that is not served. Raises LeaseTimeout and OutOfMemory."""
        ...

    def stage_patch(self, change: StagedChange, timeout: float | None, job: Job) -> Candidate:
        """Stage the live set with a patch applied. Raises LeaseTimeout, OutOfMemory and StageCancelled."""
        ...

    def commit(self, candidate: Candidate, timeout: float | None, check: Check) -> Committed:
        """Serve a candidate. `check` is called during the wait for calls and pins; it may raise to end the commit."""
        ...

    @property
    def previous(self) -> Version[Session] | None:
        """The version that a rollback would serve."""
        ...

    def rollback(self, timeout: float | None) -> Committed:
        """Serve the previous version. Raises NothingToRollBack."""
        ...


class Ended:
    """The residency after all models were closed; it has no memory."""

    sessions: tuple[Session, ...] = ()
    previous = None

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ModelClosed

    target = stage_patch = commit = rollback = _refuse


def open_residency(name: str, resources: Resources) -> Residency:
    """Return the residency "double" or "single". Raises Unsupported for any other name."""
    if name == "double":
        return Double(resources)
    if name == "single":
        return Single(resources)
    raise Unsupported(f'residency={name!r}: expected "double" or "single"')
