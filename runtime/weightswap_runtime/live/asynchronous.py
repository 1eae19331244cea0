"""Stagings for asyncio: the work runs in threads, and the event loop never blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypedDict

from weightswap_runtime.errors import StageCancelled
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.format.name_matching import Keys
from weightswap_runtime.staging.request import LEASE_TIMEOUT, Busy

from .receipt import SwapReceipt
from .staged import Staged
from .turns import Turns


class StageOptions(TypedDict, total=False):
    """The keyword arguments of `Model.stage`, except `background` and `onto`."""

    only: str | Sequence[str] | None
    ignore: str | Sequence[str]
    keys: Keys | None
    expect: str | None
    allow_other_graph: bool
    verify: Mode
    allow_nonfinite: bool | str | Sequence[str] | None
    by: str
    rate_limit: float | None
    busy: Busy
    timeout: float | None


class AsyncStaging:
    """One staging on behalf of an asyncio task, in a thread of its own."""

    def __init__(
        self, stage: Callable[..., Staged], turns: Turns, path: str | os.PathLike[str], options: StageOptions
    ) -> None:
        self._stage = stage
        self._turns = turns
        self._path = path
        self._options = options
        self._staged: Staged | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the staging without waiting, also before it has begun."""
        self._cancelled = True
        if self._staged is not None:
            self._staged.cancel_soon()

    def _check(self) -> None:
        if self._cancelled:
            raise StageCancelled("the task was cancelled; nothing was changed")

    def stage(self) -> Staged:
        """Stage, and wait until that is done. Raises what `Model.stage` and `Staged.wait` raise."""
        self._check()
        self._staged = staged = self._stage(self._path, background=True, **self._options)
        if self._cancelled:  # by the event loop meanwhile
            staged.cancel_soon()
        return staged.wait()

    def swap(self) -> SwapReceipt:
        """Stage and commit, in turn with other swaps. Raises what `Model.swap` raises."""
        with self._turns.wait_for_turn(self._check), self.stage() as staged:
            return staged.commit(timeout=self._options.get("timeout", LEASE_TIMEOUT))
