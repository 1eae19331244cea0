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

from .candidate import Candidate, Committed, Means, StagingTarget
from .double import Double
from .single import Single

ResidencyName = Literal["double", "single"]
RESIDENCIES: tuple[ResidencyName, ...] = get_args(ResidencyName)


class Residency(Protocol):
    """Where a set of weights is staged, and how it becomes the one that is served."""

    name: str

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that calls can reach."""
        ...

    def target(self, timeout: float | None, job: Job) -> AbstractContextManager[StagingTarget]:
        """A block that may write a full set into a session that serves nobody. Raises LeaseTimeout and OutOfMemory."""
        ...

    def stage_patch(self, change: StagedChange, timeout: float | None, job: Job) -> Candidate:
        """A full set that is the live one with a patch applied. Raises LeaseTimeout, OutOfMemory, StageCancelled."""
        ...

    def commit(self, candidate: Candidate, timeout: float | None, check: Check) -> Committed:
        """`check` is called while calls and pins are waited for; what it raises ends the commit."""
        ...

    @property
    def previous(self) -> Version[Session] | None:
        """What a rollback leads to."""
        ...

    def rollback(self, timeout: float | None) -> Committed:
        """Raises NothingToRollBack."""
        ...


class Ended:
    """What is left of a residency whose models were all closed: no memory."""

    sessions: tuple[Session, ...] = ()
    previous = None

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ModelClosed

    target = stage_patch = commit = rollback = _refuse


def open_residency(name: str, means: Means) -> Residency:
    """`double` or `single`. Raises Unsupported for anything else."""
    if name == "double":
        return Double(means)
    if name == "single":
        return Single(means)
    raise Unsupported(f'residency={name!r}: expected "double" or "single"')
