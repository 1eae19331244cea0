"""How near an engine's outputs have to be to those of the reference."""

from __future__ import annotations

from typing import NamedTuple

from weightswap_runtime.engines.choosing import ENGINES
from weightswap_runtime.staging.golden_check import OTHER_KERNELS, default_tolerance
from weightswap_runtime.tensors.comparing import Tolerance
from weightswap_runtime.tensors.dtypes import has_fractions

from .measuring import Measure


class Tolerances(NamedTuple):
    """(rtol, atol) for each dtype; None is bit for bit. by_dtype: whether it depends on the dtype."""

    stated: Tolerance | None
    by_dtype: bool

    def __call__(self, dtype: str) -> Tolerance | None:
        return default_tolerance(dtype, OTHER_KERNELS) if self.by_dtype else self.stated

    def is_past(self, measured: Measure) -> bool:
        """Whether an intermediate result is too far from what it should be.

        As such results are sums of terms that cancel, single small elements say little: unless all bits have to be
        equal, the largest difference has to be past rtol of the largest value, too.
        """
        if measured.same:
            return False
        dtype = measured.expected.partition("[")[0]
        limits = self(dtype)
        exact = limits is None or not has_fractions(dtype) or measured.expected != measured.found
        return exact or measured.unlike > 0 or (limits is not None and measured.scaled > limits[0])


def tolerances(engine: str, stated: Tolerance | None) -> Tolerances:
    """Stated ones, or an engine's own: the engine `torch` computes what eager does, in the same order."""
    return Tolerances(stated, by_dtype=stated is None and not ENGINES[engine].is_exact)
