"""The two ways to hold weights: two arenas and an exchange, or one arena and a copy in place."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        self._saved = HostArena(layout) if keep else None
        self._displaced: Version[Session] | None = None
        self._sessions = [Session(engine, HostArena(layout)) for _ in range(2)]
        self._previous: Version[Session] | None = None

    def target(self, timeout: float | None) -> Session:
        current = self._gate.current
        idle = self._sessions[1] if current and current.session is self._sessions[0] else self._sessions[0]
        self._gate.wait_idle(idle, timeout)
        return idle

    def overwriting(self, session: Session) -> None:
        if self._saved and self._previous:
            self._saved.copy_from(session.arena, self._workers)
            self._displaced = self._previous
        self._previous = None

    def commit(self, session: Session, weights_id: str, labels: dict[str, str], timeout: float | None) -> Committed:
        session.bound.reset_state()
        old = self._gate.current
        version = Version(session, _generation(self._gate), weights_id, labels)
        paused = self._gate.exchange(version)
        self._previous, self._displaced = old, None
        return Committed(version, paused, 0)

    def rollback(self, timeout: float | None) -> Committed:
        back = self._previous or self._restored(timeout)
        if back is None:
            raise NothingToRollBack(
                "no previous weights are resident: nothing was committed before, or a staging has overwritten them "
                '(keep_previous="host" would keep them). Swap the file that you want.'
            )
        return self.commit(back.session, back.weights_id, back.labels, timeout)

    def _restored(self, timeout: float | None) -> Version[Session] | None:
        """The version that a staging without a commit has overwritten, put back where it was."""
        if self._saved and self._displaced:
            self._gate.wait_idle(self._displaced.session, timeout)
            self._displaced.session.arena.copy_from(self._saved, self._workers)
        return self._displaced


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
        if self._gate.current is None:
            return self._live
        return Session(self._engine, HostArena(self._layout))

    def overwriting(self, session: Session) -> None: ...

    def commit(self, session: Session, weights_id: str, labels: dict[str, str], timeout: float | None) -> Committed:
        version = Version(self._live, _generation(self._gate), weights_id, labels)
        if session is self._live:
            return Committed(version, self._first(version), 0)
        return self._commit_in_place(session.arena, version, timeout)

    def rollback(self, timeout: float | None) -> Committed:
        if self._previous is None:
            raise NothingToRollBack(
                'no previous weights are kept. Load with keep_previous="host" or residency="double" to keep them, '
                "or swap the file that you want."
            )
        arena, old = self._previous
        version = Version(self._live, _generation(self._gate), old.weights_id, old.labels)
        return self._commit_in_place(arena, version, timeout)

    def _first(self, version: Version[Session]) -> float:
        self._live.bound.reset_state()
        return self._gate.exchange(version)

    def _commit_in_place(self, source: HostArena, version: Version[Session], timeout: float | None) -> Committed:
        kept = self._snapshot()
        start = time.perf_counter()
        with self._gate.hold(self._live, timeout):
            self._previous = kept
            self._guarded(lambda: self._live.arena.copy_from(source, self._workers))
            self._gate.exchange(version)
        return Committed(version, time.perf_counter() - start, self._layout.nbytes)

    def _guarded(self, copy: Callable[[], None]) -> None:
        """From the first byte to the last: whatever breaks off in here leaves a mixture that must not serve."""
        try:
            copy()
            self._live.bound.reset_state()
        except BaseException as error:
            self._gate.fail(f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            raise ModelFailed(
                f"the in-place commit broke off ({type(error).__name__}: {error}). The model refuses calls until a "
                "swap or a rollback succeeds."
            ) from error

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
