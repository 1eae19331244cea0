"""Blocks of a few bytes, so that small tensors take the code paths of large ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightswap_runtime import byte_ranges
from weightswap_runtime import tensors as digests
from weightswap_runtime.format import delta as deltas
from weightswap_runtime.format.canonical import canonical_order, write_weight_file
from weightswap_runtime.format.safetensors import TensorRow
from weightswap_runtime.memory import arena as patches
from weightswap_runtime.staging import delta as overlay
from weightswap_runtime.staging import reading

MODULES = (byte_ranges, deltas, digests, overlay, patches, reading)
DTYPES = {"u1": "U8", "f4": "F32"}


def make_blocks_small(patch: pytest.MonkeyPatch, size: int) -> None:
    for module in MODULES:
        patch.setattr(module, "BLOCK", size)
    patch.setattr(reading, "IN_CACHE", 3 * size)


def save(path: Path, values: dict[str, np.ndarray], graph_id: str = "0" * 64) -> Path:
    rows = [TensorRow(name, DTYPES[value.dtype.str[1:]], value.shape) for name, value in values.items()]
    data = {row.name: [memoryview(values[row.name].tobytes())] for row in canonical_order(rows)}
    write_weight_file(path, rows, data, graph_id=graph_id)
    return path
