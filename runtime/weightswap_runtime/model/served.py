"""Pins: versions of a model, held for several calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from weightswap_runtime.errors import PinReleased
from weightswap_runtime.jobs import Claim
from weightswap_runtime.live.calls import Caller, Methods, run_chosen
from weightswap_runtime.live.context import Context
from weightswap_runtime.live.gate import Gate, Pin, Version
from weightswap_runtime.live.session import Session
from weightswap_runtime.live.variants import Choice


class Pinned(Caller, AbstractContextManager["Pinned"]):
    """One version of the model for the length of a `with` block; threads may share it."""

    def __init__(self, methods: Methods, gate: Gate[Session]) -> None:
        super().__init__(methods)
        self._gate = gate
        self._version: Version[Session] | None = None
        self._lease: Pin

    def __enter__(self) -> Pinned:
        if self._version is not None:
            raise PinReleased("this pin was already entered; call model.pin() for each block")
        self._lease = Pin()  # of the thread that enters
        self._version = self._gate.acquire(self._lease)
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.end()
        version = self._pinned()
        self._version = Version(None, version.generation, version.identity)  # type: ignore[arg-type]  # drops the session
        if version.session is not None:
            self._gate.release(version.session, self._lease)

    @property
    def weights_id(self) -> str:
        return self._pinned().weights_id

    @property
    def generation(self) -> int:
        return self._pinned().generation

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._pinned().labels)

    def _pinned(self) -> Version[Session]:
        if self._version is None:
            raise PinReleased("enter the pin first: with model.pin() as pinned: ...")
        return self._version

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        version = self._pinned()
        session: Session | None = version.session
        lease = Claim()
        try:
            if session is None or not self._gate.acquire_within(self._lease, session, lease):
                raise PinReleased("the `with model.pin()` block has ended; pin again")
            bound = session.bound[self._methods.member]
            return run_chosen(bound, version.weights_id, name, flat, context, choice)
        finally:
            if session is not None:
                self._gate.release(session, lease)
