"""The reconciler, which makes a model serve the desired weights. No thread, and no clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from weightswap_runtime.errors import DesiredError, NoWeights, StageCancelled, WeightswapError
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import printable

from .controller import Controller
from .desired_state import DesiredState, DesiredWeights
from .desired_store import DesiredStore
from .directory import UNKNOWN, fingerprints, without_traceback
from .file_queue import delay, is_transient

_Fingerprints = Mapping[str | Path, Hashable]  # by path


class Reconciler:
    """The reconciliation of a model with a desired store. A loop calls `poll()` repeatedly.

    Weights that cannot be served are retried when the desired store has a new revision, when a file that decides on
    them changes, and, if the error is transient, after growing pauses. If nothing is served meanwhile, or weights that
    were withdrawn, the reconciler serves the last good weights of the history.
    """

    def __init__(
        self,
        desired_store: DesiredStore,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_only_source: bool = False,
        least: Callable[[], int] = lambda: 0,
    ) -> None:
        """is_only_source: True if nothing else brings weights; an event then says once that they are waited for.
        least: returns a revision that the desired store has certainly had; an older document is stale."""
        self.last_error: BaseException | None = None
        self.state: DesiredState | None = None  # the last one read
        self.reachable = True  # at the last read
        self._desired_store = desired_store
        self._interval = interval
        self._clock = clock
        self._least = least
        self._outages = 0
        self._refusal: _Refusal | None = None
        self._reports_empty = is_only_source

    def poll(self, target: Controller) -> float:
        """Serve the desired weights. Return the seconds until the next poll."""
        with suppress(StageCancelled):
            try:
                state = self._read(target.check)
            except StageCancelled:
                raise
            except WeightswapError as error:
                return self._unreachable(error, target)
            if self._outages:
                self._outages, self.reachable, self.last_error = 0, True, None
            self._serve(state, target)
        return self._interval

    def forget_refusal(self) -> None:
        """Retry refused weights at the next poll, as the caller's conditions have changed."""
        self._refusal = None

    def _read(self, check: Callable[[], None]) -> DesiredState:
        before, state = self.state, self._desired_store.read(check)
        self.check_not_older(state.revision, max(before.revision if before else 0, self._least()))
        if state != before:  # not the revision alone: another desired store may come to its path at the same one
            self._refusal = self.last_error = None
        self.state = state
        return state

    def check_not_older(self, revision: int, known: int) -> None:
        """Raise DesiredError if the desired store is at a revision before one that is known."""
        if revision < known:
            raise DesiredError(
                f"{self._desired_store.where}: is at revision {revision}, but was at {known}: an older copy replaced "
                f"it, or it was removed. Restore the newer one, or set the weights again, and a hold, until it is past "
                f"{known}."
            )

    def _unreachable(self, error: WeightswapError, target: Controller) -> float:
        self._outages += 1
        self.reachable, self.last_error = False, without_traceback(error)
        if self._outages == 1:
            target.notify("unreachable", self._desired_store.where, error)
        # reading a local directory is cheap, so it needs no longer pauses
        return self._interval if self._desired_store.is_local else delay(self._interval, self._outages)

    def _serve(self, state: DesiredState, target: Controller) -> None:
        desired = state.weights
        if desired is None and target.serves_nothing:
            self._report_empty(state, target)
        if desired is None or target.serves(desired.weights_id):
            self._refusal = self.last_error = None
        elif self._refusal is None or self._refusal.may_be_mended(self._clock(), target.check):
            self._try(desired, state, target)

    def _report_empty(self, state: DesiredState, target: Controller) -> None:
        if self._reports_empty:
            self._reports_empty, where = False, self._desired_store.where
            advice = f"weightswap desired {where} --set FILE --revision {state.revision}"
            target.notify("waiting", where, NoWeights(f"{where}: desires no weights yet; set them, as by `{advice}`"))

    def _try(self, desired: DesiredWeights, state: DesiredState, target: Controller) -> None:
        path = self._desired_store.locate(desired)
        bases = [self._desired_store.locate(base) for base in desired.bases or ()]
        # before the reading: a change during it is then noticed at the next poll
        files = fingerprints((path, *bases), target.check)
        try:
            target.apply(
                path,
                self._desired_store.located(desired),
                partial(self._is_still, lambda now: now.weights_id == desired.weights_id, target.check),
            )
            self._refusal = self.last_error = None
        except StageCancelled:
            raise
        except Exception as error:
            self._refuse(path, files, error, target)
        withdrawn = any(target.serves(weights.weights_id) for weights in state.withdrawn)
        if self._refusal is not None and (target.serves_nothing or withdrawn):
            self._serve_last_good(state, target)

    def _is_still(self, wanted: Callable[[DesiredState], bool], check: Callable[[], None]) -> bool:
        """Return whether weights are still wanted, which may change during a staging; True if unreachable."""
        try:
            return wanted(self._desired_store.read(check))
        except StageCancelled:
            raise
        except WeightswapError:
            return True

    def _refuse(self, path: str | Path, files: _Fingerprints, error: Exception, target: Controller) -> None:
        before, self.last_error = self._refusal, without_traceback(error)
        attempts = before.attempts + 1 if before else 1
        retry_at = self._clock() + delay(self._interval, attempts) if is_transient(error) else None
        self._refusal = _Refusal(files, str(error), attempts, retry_at)
        if not is_transient(error) and (before is None or before.text != str(error)):
            target.notify("skipped", printable(path), error)

    def _serve_last_good(self, state: DesiredState, target: Controller) -> None:
        for weights in reversed(state.history):
            is_good = partial(_is_good, weights.weights_id)
            try:
                target.apply(
                    self._desired_store.locate(weights),
                    self._desired_store.located(weights),
                    partial(self._is_still, is_good, target.check),
                )
            except StageCancelled:
                raise
            except Exception:  # reported as an event
                continue
            return


def _is_good(weights_id: str, state: DesiredState) -> bool:
    """Return whether weights may stand in for the desired ones: an operator may have withdrawn them meanwhile."""
    good = (*state.history, *((state.weights,) if state.weights else ()))
    return any(each.weights_id == weights_id for each in good) and all(
        each.weights_id != weights_id for each in state.withdrawn
    )


class _Refusal(NamedTuple):
    """A refusal of the desired weights."""

    fingerprints: _Fingerprints  # of their files, before they were read
    text: str
    attempts: int
    retry_at: float | None  # None if it is permanent

    def may_be_mended(self, now: float, check: Check) -> bool:
        if self.retry_at is not None and now >= self.retry_at:
            return True
        now_there = fingerprints(self.fingerprints, check)
        return any(now_there[path] not in (UNKNOWN, before) for path, before in self.fingerprints.items())
