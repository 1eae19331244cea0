"""A staged set on trial: the keeper lets workers call it before it is committed."""

from __future__ import annotations

from typing import Any, Protocol

from weightswap_runtime.format.identity import Identity
from weightswap_runtime.live.calling import Caller, Methods, run_chosen
from weightswap_runtime.live.context import Context
from weightswap_runtime.live.session import Session
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.variants.resident import Choice
from weightswap_runtime.threads.claims import Claim

from .control import Control
from .descriptions import Summary, describe


def begin_trial(control: Control, staged: Staged, terms: bytes = b"") -> int:
    """Let workers call what the keeper has staged; the word of the trial, which they find it by.

    It ends with `Control.end_trial`, with a commit, and before anything else is staged. terms: what workers are told.
    Raises StageClosed where it was committed or discarded, and WeightFileError where its labels take too much room.
    """
    with staged._closing:  # it is neither committed nor overwritten meanwhile
        return announce(control, staged._opened().contents.identity, terms)


def announce(control: Control, identity: Identity, terms: bytes = b"") -> int:
    """As `begin_trial`, of whatever lies whole in the idle arena."""
    generation = control.word  # that of the next commit
    control.end_trial()
    describe(control, generation, identity, terms)
    control.begin_trial(generation % 2)
    return control.trial


class Leasing(Protocol):
    """What leases the arena of a trial."""

    def acquire_trial(self, trial: int, lease: Claim) -> Session: ...

    def release(self, session: Session, lease: Claim) -> None: ...


class Trial(Caller):
    """A staged set as a worker calls it. Raises StageClosed once the trial is over.

    terms: what the keeper was told to say of it.
    """

    _serves = False

    def __init__(self, methods: Methods, leasing: Leasing, word: int, summary: Summary) -> None:
        super().__init__(methods)
        self._leasing, self.word = leasing, word
        self.weights_id, self.terms = summary.weights_id, summary.terms

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        lease = Claim()
        session = self._leasing.acquire_trial(self.word, lease)
        try:
            bound = session.bound[self._methods.member]
            return run_chosen(bound, self.weights_id, name, flat, context, choice)
        finally:
            self._leasing.release(session, lease)
