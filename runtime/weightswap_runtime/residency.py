"""The two ways to hold weights: two arenas and an exchange, or one arena and a copy in place."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from .arena import ArenaLayout, HostArena
from .engines import Engine
from .errors import ModelFailed, NothingToRollBack, Unsupported
from .gate import Gate, Version
from .session import Session
from .workers import Workers


class Committed(NamedTuple):
    """The version that is now served, how long new calls could wait for it (seconds), and the bytes copied."""

    version: Version[Session]
    seconds_paused: float
    bytes_copied: int


class Residency(Protocol):
    """Where a set of weights is staged, and how it becomes the one that is served."""

    name: str

    def target(self, timeout: float | None) -> Session:
        """A session that serves nobody. Raises LeaseTimeout and OutOfMemory."""
        ...

    def overwriting(self, session: Session) -> None:
        """Called just before the first byte of a staging is written to `session`."""
        ...

    def commit(self, session: Session, weights_id: str, labels: dict[str, str], timeout: float | None) -> Committed: ...

    def rollback(self, timeout: float | None) -> Committed:
        """Raises NothingToRollBack."""
        ...


def open_residency(
    name: str,
    keep_previous: str | None,
    engine: Engine,
    layout: ArenaLayout,
    gate: Gate[Session],
    workers: Workers,
) -> Residency:
    """`double` or `single`. Raises Unsupported for anything else."""
    if keep_previous not in (None, "host"):
        raise Unsupported(f'keep_previous={keep_previous!r}: expected None or "host"')
    if name == "double":
        return Double(engine, layout, gate, workers, keep=keep_previous == "host")
    if name == "single":
        return Single(engine, layout, gate, workers, keep=keep_previous == "host")
    raise Unsupported(f'residency={name!r}: expected "double" or "single"')


def _generation(gate: Gate[Session]) -> int:
    return gate.current.generation + 1 if gate.current else 0


class Double:
    """Two arenas, each with its own session. A commit exchanges them; the old weights stay for a rollback.

    A staging overwrites the old weights. With `keep` they are saved first, for a rollback if no commit follows.
    """

    name = "double"

    def __init__(
        self, engine: Engine, layout: ArenaLayout, gate: Gate[Session], workers: Workers, *, keep: bool
    ) -> None:
        self._gate = gate
        self._workers = workers
        self._sessions = [Session(engine, HostArena(layout)) for _ in range(2)]
        self._resident: dict[Session, Version[Session]] = {}  # what lies whole in each session
        self._saved = HostArena(layout) if keep else None
        self._displaced: Version[Session] | None = None  # what lies in `_saved`

    def target(self, timeout: float | None) -> Session:
        idle = self._idle()
        self._gate.wait_idle(idle, timeout)
        return idle

    def overwriting(self, session: Session) -> None:
        previous = self._resident.get(session)
        if self._saved and previous:
            self._displaced = None
            self._saved.copy_from(session.arena, self._workers)
            self._displaced = previous
        self._resident.pop(session, None)

    def commit(self, session: Session, weights_id: str, labels: dict[str, str], timeout: float | None) -> Committed:
        session.bound.reset_state()
        version = Version(session, _generation(self._gate), weights_id, labels)
        self._displaced = None
        paused = self._gate.exchange(version)
        self._resident[session] = version
        return Committed(version, paused, 0)

    def rollback(self, timeout: float | None) -> Committed:
        idle = self._idle()
        if self._gate.current is None or not (idle in self._resident or self._displaced):
            raise NothingToRollBack(
                "no previous weights are resident: nothing was committed before, or a staging has overwritten them "
                '(keep_previous="host" would keep them). Swap the file that you want.'
            )
        if idle not in self._resident:
            self._restore(idle, timeout)
        elif idle.bound.has_state:  # a pin on it would see its state start again
            self._gate.wait_idle(idle, timeout)
        back = self._resident[idle]
        return self.commit(idle, back.weights_id, back.labels, timeout)

    def _idle(self) -> Session:
        current = self._gate.current
        return self._sessions[1] if current and current.session is self._sessions[0] else self._sessions[0]

    def _restore(self, idle: Session, timeout: float | None) -> None:
        """Put back what a staging without a commit has overwritten."""
        assert self._saved is not None
        assert self._displaced is not None
        self._gate.wait_idle(idle, timeout)
        idle.arena.copy_from(self._saved, self._workers)
        self._resident[idle] = self._displaced


class Single:
    """One arena that serves. Stagings use memory of their own, freed after the commit has copied it in place."""

    name = "single"

    def __init__(
        self, engine: Engine, layout: ArenaLayout, gate: Gate[Session], workers: Workers, *, keep: bool
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._gate = gate
        self._workers = workers
        self._keep = keep
        self._live = Session(engine, HostArena(layout))
        self._previous: tuple[HostArena, Version[Session]] | None = None

    def target(self, timeout: float | None) -> Session:
        if self._gate.current is not None:
            return Session(self._engine, HostArena(self._layout))
        self._gate.wait_idle(self._live, timeout)  # a trial call of an earlier staging may still run
        return self._live

    def overwriting(self, session: Session) -> None: ...

    def commit(self, session: Session, weights_id: str, labels: dict[str, str], timeout: float | None) -> Committed:
        version = Version(self._live, _generation(self._gate), weights_id, labels)
        if session is not self._live:
            return self._commit_in_place(session.arena, version, timeout)
        session.bound.reset_state()
        return Committed(version, self._gate.exchange(version), 0)

    def rollback(self, timeout: float | None) -> Committed:
        if self._previous is None:
            raise NothingToRollBack(
                'no previous weights are kept. Load with keep_previous="host" or residency="double" to keep them, '
                "or swap the file that you want."
            )
        arena, old = self._previous
        version = Version(self._live, _generation(self._gate), old.weights_id, old.labels)
        return self._commit_in_place(arena, version, timeout)

    def _commit_in_place(self, source: HostArena, version: Version[Session], timeout: float | None) -> Committed:
        kept = self._snapshot()
        start = time.perf_counter()
        with self._gate.hold(self._live, timeout):
            self._previous = kept
            interrupt = self._copy(source, version)
        paused = time.perf_counter() - start
        if interrupt is not None:
            raise interrupt
        return Committed(version, paused, self._layout.nbytes)

    def _copy(self, source: HostArena, version: Version[Session]) -> BaseException | None:
        """Copy, and make the version current. An interrupt does not end it half-way; it is returned at the end."""
        self._gate.fail("it has not ended")  # until the exchange: what breaks off in between must not serve
        interrupt = None
        while self._gate.current is not version:
            try:
                self._live.arena.copy_from(source, self._workers)
                self._live.bound.reset_state()
                self._gate.exchange(version)
            except Exception as error:
                self._gate.fail(f"{type(error).__name__}: {error}")
                raise ModelFailed(
                    f"the in-place commit broke off ({type(error).__name__}: {error}). The model refuses calls until a "
                    "swap or a rollback succeeds."
                ) from error
            except BaseException as error:
                interrupt = error
        return interrupt

    def _snapshot(self) -> tuple[HostArena, Version[Session]] | None:
        """The weights that a commit is about to replace, copied while they still serve."""
        current = self._gate.current
        if not self._keep or current is None:
            return None
        if self._gate.failure is not None:
            return self._previous
        arena = HostArena(self._layout)
        arena.copy_from(self._live.arena, self._workers)
        return arena, current
