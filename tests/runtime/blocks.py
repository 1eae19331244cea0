"""Blocks of a few bytes, so that small tensors take the roads of large ones."""

from __future__ import annotations

import pytest

from weightswap_runtime import deltas, digests, overlay, patches, reading, sources

MODULES = (deltas, digests, overlay, patches, reading)


def make_blocks_small(patch: pytest.MonkeyPatch, size: int) -> None:
    for module in MODULES:
        patch.setattr(module, "BLOCK", size)
    patch.setattr(deltas, "FEWEST", 1)
    patch.setattr(sources.LocalFile, "unit", 3 * size)
