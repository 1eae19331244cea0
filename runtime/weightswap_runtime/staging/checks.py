"""Checks of staged weights: graph id, weights id, digests, and non-finite values."""

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

DAMAGED = "The file is damaged: copy it again, or pack its checkpoint again."


def check_graph(graph_id: str, manifest: Manifest, where: str, request: SwapRequest) -> None:
    """Raise GraphMismatch for a file that was packed for another graph."""
    if graph_id != manifest.graph_id and not request.allow_other_graph:
        raise GraphMismatch(
            f"{where}: packed for the graph {graph_id[:12]}, but this model has {manifest.graph_id[:12]}. "
            "Pack the checkpoint for this one. Its tensors fit: if both graphs compute them alike from checkpoints, "
            "allow_other_graph=True takes them as they are."
        )


def check_expected(weights_id: str, where: str, request: SwapRequest) -> None:
    """Raise UnexpectedWeights if the weights id is not the one that the caller expects."""
    if request.expect is not None and weights_id != request.expect:
        raise UnexpectedWeights(f"{where}: gives the weights {weights_id[:12]}, expected {request.expect[:12]}")


def digest_problems(stamp: Stamp | DeltaStamp | None, read: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Return a message for each tensor whose digest differs from the stamp's; `read` has the digests of its blocks."""
    if stamp is None:
        return []
    digests = {name: tensor_digest(blocks) for name, blocks in sorted(read.items())}
    return [
        f"{name}: the file records the digest {stamp.digests[name][:12]}, its bytes have {digest[:12]}"
        for name, digest in digests.items()
        if digest != stamp.digests[name]
    ]


def check_finite(identity: Identity, where: str, staging: Staging) -> Mapping[str, Nonfinite]:
    """Return the weights with a kind of non-finite value that they do not have in the served weights.

    Raises NonFiniteWeights if they are not allowed.
    """
    served = staging.replaces.nonfinite if staging.replaces else None
    nonfinite = newly_nonfinite(staging.manifest.weights, identity.nonfinite, served)
    refuse_nonfinite(nonfinite, staging.request.allow_nonfinite, where)
    return nonfinite
