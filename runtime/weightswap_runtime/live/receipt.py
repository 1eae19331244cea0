"""Receipts: what one commit did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from weightswap_runtime.format.nonfinite import Nonfinite
from weightswap_runtime.memory.host import StagedIn
from weightswap_runtime.staging.request import Kind


@dataclass(frozen=True)
class SwapReceipt:
    """What one commit did. Sizes in bytes, times in seconds; `seconds_paused` is how long new calls could wait.

    kind: "full", "partial", "delta" or "rollback". source: the path, the URL without credentials, or "rollback".
    only: the patterns of a partial swap, whose `labels` are those of the weights before it.
    by: who asked, as they said. ignored: names of the source that are no weights: state, `_extra_state`, and what
    `ignore=` has matched.
    staged_in: the memory from which a commit in place has copied, and why it was that.
    committed_at: seconds since the epoch. bytes_read: from the source; bytes_copied: within the pause.
    seconds_staged: reading and hashing; seconds_verified: comparing, and running the goldens. verified: "goldens" if
    recorded outputs were reproduced, "finite" if outputs on recorded inputs were finite, "none" if there was nothing to
    try. nonfinite: the weights that have NaN or infinities which those that were served before had not (before the
    first ones: all with NaN, and those with infinities that require a gradient). contexts: how many whose state was
    made with other weights there are, by what becomes of them: "invalidated", "reset", "kept" or "pinned".
    variants: those that are resident, as GROUP/NAME: "kept", or "dropped" as they go with other weights.
    """

    generation: int
    weights_id: str
    previous_weights_id: str | None
    graph_id: str
    kind: Kind
    source: str
    by: str
    labels: dict[str, str]
    only: tuple[str, ...]
    ignored: tuple[str, ...]
    residency: str
    staged_in: StagedIn
    bytes_read: int
    bytes_copied: int
    verified: str
    seconds_staged: float
    seconds_verified: float
    seconds_paused: float
    committed_at: float
    nonfinite: dict[str, Nonfinite] = field(default_factory=dict)
    contexts: dict[str, int] = field(default_factory=dict)
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The fields as dicts, tuples, texts and numbers alone, as `--json` prints them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
