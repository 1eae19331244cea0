"""A verified set of weights that serves nobody yet, and the receipt of its commit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from .errors import StageClosed
from .gate import Claim, Gate
from .session import Caller, Methods, Session
from .staging import Contents

LEASE_TIMEOUT = 60.0


@dataclass(frozen=True)
class SwapReceipt:
    """What one commit did. Sizes in bytes, times in seconds; `seconds_paused` is how long new calls could wait.

    `ignored` are names of the source that are no weights: state, `_extra_state`.
    """

    generation: int
    weights_id: str
    previous_weights_id: str | None
    graph_id: str
    source: str
    labels: dict[str, str]
    ignored: tuple[str, ...]
    residency: str
    bytes_read: int
    bytes_copied: int
    seconds_staged: float
    seconds_verified: float
    seconds_paused: float


class Staged(Caller, AbstractContextManager["Staged"]):
    """A verified set of weights that serves nobody yet. Call it to try it; then `commit()` or `discard()`.

    Leaving its `with` block, or dropping the last reference, discards it.
    """

    def __init__(
        self,
        methods: Methods,
        gate: Gate[Session],
        session: Session,
        contents: Contents,
        commit: Callable[[Session, Contents, float | None], SwapReceipt],
        ticket: Claim,
    ) -> None:
        super().__init__(methods)
        self._gate = gate
        self._session: Session | None = session
        self._contents = contents
        self._commit = commit
        self._ticket = ticket
        self._closing = Lock()

    @property
    def weights_id(self) -> str:
        return self._contents.weights_id

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._contents.labels)

    def commit(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve these weights. Raises StageClosed; LeaseTimeout (nothing changed, still staged); ModelFailed."""
        with self._closing:
            session = self._opened()
            self._gate.wait_idle(session, timeout)  # trial calls may still run, and would leave traces in the state
            receipt = self._commit(session, self._contents, timeout)
            self._close()
        return receipt

    def discard(self) -> None:
        """Give the staged weights up. A second time, or after a commit, it does nothing."""
        with self._closing:
            self._close()

    def __exit__(self, *_: object) -> None:
        self.discard()

    def _opened(self) -> Session:
        if self._session is None:
            raise StageClosed("this staging was already committed or discarded; stage the file again")
        return self._session

    def _close(self) -> None:
        self._session = None
        self._ticket.end()

    def _run(self, name: str, flat: list[Any]) -> list[Any]:
        lease = Claim()
        with self._closing:
            session = self._opened()
            self._gate.acquire_session(session, lease)
        try:
            return session.bound.run(name, flat)
        finally:
            self._gate.release(session, lease)
