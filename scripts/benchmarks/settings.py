"""What a run was asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`megabytes` of float32 weights (10^6 bytes) in the large model; `rounds` of each subject with its peers.

    `billions` of parameters are exported at most.
    """

    megabytes: int
    rounds: int
    billions: float = 8.0
