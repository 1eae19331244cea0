"""Checks of what a staging has read."""

from __future__ import annotations

from collections.abc import Mapping

from weightswap_runtime.errors import GraphMismatch, UnexpectedWeights
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.nonfinite import Nonfinite, newly_nonfinite, refuse_nonfinite

from .request import SwapRequest


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


def check_finite(
    manifest: Manifest, identity: Identity, served: Identity | None, where: str, request: SwapRequest
) -> Mapping[str, Nonfinite]:
    """What is not finite, and is in the weights that are served. Raises NonFiniteWeights if it is not allowed."""
    found = newly_nonfinite(manifest.weights, identity.nonfinite, served.nonfinite if served else None)
    refuse_nonfinite(found, request.allow_nonfinite, where)
    return found
