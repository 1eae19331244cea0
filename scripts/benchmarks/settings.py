"""Settings of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`megabytes` of float32 weights (10^6 bytes) in the large model; `rounds` of each subject with its peers.

    Models for export have at most `billions` of parameters.
    """

    megabytes: int
    rounds: int
    billions: float = 8.0
