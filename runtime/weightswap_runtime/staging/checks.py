"""Checks of what a staging has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightswap_runtime.errors import GraphMismatch, UnexpectedWeights
from weightswap_runtime.format.delta_file import DeltaStamp
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.nonfinite import Nonfinite, newly_nonfinite, refuse_nonfinite
from weightswap_runtime.format.weight_file import Stamp
from weightswap_runtime.tensors.digests import tensor_digest

from .request import Staging, SwapRequest

DAMAGED = "The file is damaged: copy it again, or pack it again."


def check_graph(graph_id: str, manifest: Manifest, where: str, request: SwapRequest) -> None:
    """Raise GraphMismatch for a file that was packed for another graph."""
    if graph_id != manifest.graph_id and not request.allow_other_graph:
        raise GraphMismatch(
            f"{where}: packed for the graph {graph_id[:12]}, this model is {manifest.graph_id[:12]}. "
            "Its tensors fit: pass allow_other_graph=True if that is meant, or pack the checkpoint for this one."
        )


def check_expected(found: str, where: str, request: SwapRequest) -> None:
    """Raise UnexpectedWeights for other weights than the caller has asked for."""
    if request.expect is not None and found != request.expect:
        raise UnexpectedWeights(f"{where}: gives the weights {found[:12]}, expected {request.expect[:12]}")


def digest_problems(stamp: Stamp | DeltaStamp | None, read: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Which tensors have other digests than the file records, by those of the blocks that were read."""
    if stamp is None:
        return []
    found = {name: tensor_digest(blocks) for name, blocks in sorted(read.items())}
    return [
        f"{name}: the file records the digest {stamp.digests[name][:12]}, its bytes have {digest[:12]}"
        for name, digest in found.items()
        if digest != stamp.digests[name]
    ]


def check_finite(identity: Identity, where: str, staging: Staging) -> Mapping[str, Nonfinite]:
    """What is not finite, and is in the weights that are served. Raises NonFiniteWeights if it is not allowed."""
    before = staging.replaces.nonfinite if staging.replaces else None
    found = newly_nonfinite(staging.manifest.weights, identity.nonfinite, before)
    refuse_nonfinite(found, staging.request.allow_nonfinite, where)
    return found
