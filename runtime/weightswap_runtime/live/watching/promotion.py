"""Promotions: the conditions under which a watched file becomes the desired weights of a place."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from weightswap_runtime.desired.document import DesiredState, check_new, check_promotable
from weightswap_runtime.desired.place import DesiredPlace, Known
from weightswap_runtime.errors import Superseded, Unproven, Unsupported
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.messages import listed
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import printable

from .directory import Entry, order_of_names

Policy = Literal["newest", "proven"]


class Promotion(NamedTuple):
    """The place to promote weights in, the policy, and the name of the promoter."""

    place: DesiredPlace
    policy: Policy
    by: str

    def check(self, path: str | Path, weights_id: str | None, check: Check) -> None:
        """Raise Held, Superseded or DesiredError if a staging could not be promoted anyway."""
        self._check(path, weights_id or "", self.place.read(check))

    def promote(self, path: str | Path, staged: Staged, graph_id: str) -> None:
        """Make the staged weights the desired ones. Raises Unproven, and what `DesiredPlace.promote` raises."""
        if self.policy == "proven":
            check_proven(printable(path), staged.verified, list(staged.nonfinite))
        known = Known(staged.weights_id, graph_id, staged.labels, staged.base)
        may = partial(self._check, path, staged.weights_id)
        self.place.promote(path, known=known, by=self.by, why=self.policy, may=may)

    def known_names(self, entries: Iterable[Entry]) -> AbstractSet[str]:
        """Return the names of those files of a directory that the place knows. Raises DesiredError."""
        known = {str(self.place.locate(weights)) for weights in self.place.read().known}
        return {entry.name for entry in entries if str(entry.path) in known}

    def _check(self, path: str | Path, weights_id: str, state: DesiredState) -> None:
        """Raise Held, or Superseded if a watcher that comes late would go back: nobody has asked for this file."""
        if state.weights_id == weights_id:
            return
        check_promotable(state, weights_id, printable(path))
        check_new(state, weights_id, printable(path))
        folder, _, name = str(path).rpartition("/")
        for weights in state.known:
            known_folder, _, known_name = str(self.place.locate(weights)).rpartition("/")
            if known_folder == folder and order_of_names(known_name) > order_of_names(name):
                raise Superseded(f"{printable(path)}: not promoted, because {known_name} comes later and already was")


def check_promotion_policy(policy: str) -> None:
    """Raise Unsupported for an unknown policy."""
    if policy not in get_args(Policy):
        raise Unsupported(f"policy={policy!r}: expected {' or '.join(map(repr, get_args(Policy)))}")


def check_proven(where: str, verified: str, nonfinite: list[str]) -> None:
    """Raise Unproven unless recorded outputs were reproduced by finite weights."""
    if nonfinite:
        raise Unproven(f"{where}: not promoted, because {listed(nonfinite)} are not finite")
    if verified != "goldens":
        raise Unproven(
            f"{where}: not promoted, because no outputs were recorded for these weights (verified: {verified!r}). "
            "Record them with pack(goldens=...) or publish(goldens=...), or promote with policy='newest'"
        )
