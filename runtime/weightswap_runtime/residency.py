"""The two ways to hold weights: two arenas and an exchange, or one arena and a copy in place."""

from __future__ import annotations

from typing import Literal, NoReturn, Protocol, get_args

from .arena import ArenaLayout
from .candidates import Candidate, Committed, Fill, NewSession
from .double import Double
from .errors import ModelClosed, Unsupported
from .gate import Gate
from .job import Job
from .memory import Memory
from .patches import HostPatch
from .session import Session
from .single import Single
from .staging import Contents
from .workers import Workers

ResidencyName = Literal["double", "single"]
RESIDENCIES: tuple[ResidencyName, ...] = get_args(ResidencyName)


class Residency(Protocol):
    """Where a set of weights is staged, and how it becomes the one that is served."""

    name: str

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that calls can reach."""
        ...

    def stage(self, fill: Fill, timeout: float | None, job: Job) -> Candidate:
        """Let `fill` write a full set into memory that serves nobody. Raises LeaseTimeout and OutOfMemory."""
        ...

    def stage_patch(self, patch: HostPatch, contents: Contents, timeout: float | None, job: Job) -> Candidate:
        """A full set that is the live one with a patch applied. Raises LeaseTimeout, OutOfMemory, StageCancelled."""
        ...

    def commit(self, candidate: Candidate, timeout: float | None) -> Committed: ...

    def rollback(self, timeout: float | None) -> Committed:
        """Raises NothingToRollBack."""
        ...


class Ended:
    """What is left of a residency whose models were all closed: no memory."""

    sessions: tuple[Session, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ModelClosed

    stage = stage_patch = commit = rollback = _refuse


def open_residency(
    name: str,
    keep_previous: str | None,
    new_session: NewSession,
    memory: Memory,
    layout: ArenaLayout,
    gate: Gate[Session],
    workers: Workers,
) -> Residency:
    """`double` or `single`. Raises Unsupported for anything else."""
    if keep_previous not in (None, "host"):
        raise Unsupported(f'keep_previous={keep_previous!r}: expected None or "host"')
    if name == "double":
        return Double(new_session, memory, layout, gate, workers, keep=keep_previous == "host")
    if name == "single":
        return Single(new_session, memory, layout, gate, workers, keep=keep_previous == "host")
    raise Unsupported(f'residency={name!r}: expected "double" or "single"')
