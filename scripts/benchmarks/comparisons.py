"""Compares two weight files in one way: `comparisons.py WAY A B` prints seconds, peak memory, and the result.

Ways: `ours`, `norms` (only relative changes), `statistics` (about the figures of ours, in 64-bit floats). Each runs in
a process of its own, which imports what it needs before the clock starts: ours needs no torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Found = dict[str, float]
Way = Callable[[Path, Path], Found]


def ours() -> Way:
    """Compare with weightswap: relative changes, and everything else that it reports."""
    from weightswap_tools.diff import compare_weights

    return lambda before, after: {tensor.name: tensor.rel_change for tensor in compare_weights(before, after).tensors}


def norms() -> Way:
    """Load both files and subtract."""
    from safetensors.torch import load_file

    def compare(before: Path, after: Path) -> Found:
        old, new = load_file(before), load_file(after)
        return {name: float((new[name] - old[name]).norm() / old[name].norm()) for name in old}

    return compare


def statistics() -> Way:
    """Load both files, and compute for each tensor the statistics that a person would, one after another."""
    from safetensors.torch import load_file

    def compare(before: Path, after: Path) -> Found:
        old, new = load_file(before), load_file(after)
        return {name: _statistics(old[name].double(), new[name].double()) for name in old}

    return compare


def _statistics(old: torch.Tensor, new: torch.Tensor) -> float:
    gap = new - old
    for side in (old, new):
        _ = [side.isnan().sum(), side.isinf().sum(), side.mean(), side.std()]
        _ = (side == 0).flatten(1).all(1).sum() if side.ndim > 1 else None
    _ = [gap.abs().max(), gap.abs().argmax(), (gap != 0).sum(), (gap / old).abs().max()]
    _ = [(old * new < 0).sum(), (old * new).sum() / old.norm() / new.norm()]
    _ = gap.abs().log2().histc(bins=64)
    return float(gap.norm() / old.norm())


WAYS: dict[str, Callable[[], Way]] = {"ours": ours, "norms": norms, "statistics": statistics}


def main(way: str, before: str, after: str) -> None:
    compare = WAYS[way]()
    start = time.perf_counter()
    result = compare(Path(before), Path(after))
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": _peak(), "found": result}))


def _peak() -> int:
    """Return the peak memory of this process in bytes; that of getrusage includes the parent's."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main(*sys.argv[1:])
