"""Admission: the `admit` callback of `load()`, which may refuse a file before it is read."""

from __future__ import annotations

from collections.abc import Hashable

from weightswap_runtime.errors import UnexpectedWeights, Unsupported
from weightswap_runtime.format.delta_file import DeltaStamp
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.staging.request import Admit, SwapRequest


def admitted(admit: Admit, weights: WeightSet, delta: DeltaStamp | None, request: SwapRequest) -> SwapRequest:
    """Return the request with the admitted weights id as its `expect`, so a file with other bytes is refused later.

    Raises what `admit` raises, Unsupported for a part of a set, and UnexpectedWeights.
    """
    stamp = delta or weights.stamp
    if stamp is None:
        raise UnexpectedWeights(f"{weights.where}: does not say which weights it holds, as required here; pack it")
    if request.only:
        raise Unsupported("only: no file claims the id of a part of a set; swap a full set")
    if request.expect not in (None, stamp.weights_id):
        raise UnexpectedWeights(f"{weights.where}: claims {stamp.weights_id[:12]}, expected {str(request.expect)[:12]}")
    admit(weights.location, stamp.weights_id)
    return request._replace(expect=stamp.weights_id)


def fingerprint_of(admit: Admit | None) -> Hashable:
    """Return what `admit.fingerprint()` returns; None if there is no such method, or if it fails."""
    try:
        value: Hashable = admit.fingerprint()  # type: ignore[union-attr]
    except Exception:  # such as AttributeError, for a function
        return None
    return value
