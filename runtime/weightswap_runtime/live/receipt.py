"""Receipts of commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from weightswap_runtime.format.nonfinite import Nonfinite
from weightswap_runtime.memory.host import StagedIn
from weightswap_runtime.staging.request import Kind


@dataclass(frozen=True)
class SwapReceipt:
    """The receipt of one commit. Sizes in bytes, times in seconds.

    kind: "full", "partial", "delta" or "rollback". source: the path, the URL without credentials, or "rollback".
    only: the patterns of a partial swap; its `labels` are those of the weights before it.
    by: the requester, as given. ignored: names of the source that are not weights: state, `_extra_state`, and matches
    of `ignore=`. staged_in: the memory from which a commit in place copied, and why that was chosen.
    committed_at: seconds since the epoch. bytes_read: read from the source; bytes_copied: copied within the pause.
    seconds_staged: reading and hashing; seconds_verified: comparing, and running the goldens; seconds_paused: how long
    new calls could wait. verified: "goldens" if recorded outputs were reproduced, "finite" if outputs on recorded
    inputs were finite, "none" if there was nothing to try. nonfinite: the weights with NaN or infinities where the
    weights before had none (for the first weights: all with NaN, and those with infinities that require a gradient).
    contexts: the number of contexts whose state was made with other weights, by outcome: "invalidated", "reset", "kept"
    or "pinned". variants: the names GROUP/NAME of resident variants by outcome: "kept", or "dropped" because they
    belong to other weights.
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
        """Return the fields as dicts, tuples, texts and numbers alone, as `--json` prints them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields
