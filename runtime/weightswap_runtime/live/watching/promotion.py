"""When a watched file becomes what is desired."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from weightswap_runtime.desired.document import names_in
from weightswap_runtime.desired.place import DesiredPlace, Known
from weightswap_runtime.errors import Unproven, Unsupported
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import printable

Policy = Literal["newest", "proven"]


class Promotion(NamedTuple):
    """Where weights are promoted, when, and who says so."""

    place: DesiredPlace
    policy: Policy
    by: str

    def check(self, path: str | Path, weights_id: str | None, check: Check) -> None:
        """Raise Held, Superseded or DesiredError where nothing would come of a staging."""
        self.place.check_promotable(path, weights_id, check)

    def promote(self, path: str | Path, staged: Staged, graph_id: str) -> None:
        """Desire what was staged. Raises Unproven, and what `DesiredPlace.promote` raises."""
        if staged.kind != "full":
            raise Unsupported(f"{printable(path)}: a delta, from which no new process can start, and not promoted")
        if self.policy == "proven":
            check_proven(printable(path), staged.verified, list(staged.nonfinite))
        known = Known(staged.weights_id, graph_id, staged.labels)
        self.place.promote(path, known=known, by=self.by, why=self.policy)

    def names(self) -> AbstractSet[str]:
        """The names of files that were promoted, or put by hand. Raises DesiredError."""
        return names_in(self.place.read())


def check_promotion_policy(policy: str) -> None:
    """Raise Unsupported for what is no policy."""
    if policy not in get_args(Policy):
        raise Unsupported(f"policy={policy!r}: expected {' or '.join(map(repr, get_args(Policy)))}")


def check_proven(where: str, verified: str, nonfinite: list[str]) -> None:
    """Raise Unproven unless recorded outputs were reproduced by finite weights."""
    if nonfinite:
        raise Unproven(f"{where}: not promoted, as {', '.join(nonfinite[:5])} are not finite")
    if verified != "goldens":
        raise Unproven(
            f"{where}: not promoted, as no outputs were recorded for these weights (verified: {verified!r}). Record "
            "them, pack(goldens=...) or publish(goldens=...), or promote by policy='newest'"
        )
