"""Triton's model repository extension: `load` and `unload` of a model that the server has."""

from __future__ import annotations

import msgspec

from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_server.errors import BadRequest
from weightswap_server.protocol.tensors_on_the_wire import decoded

from .documents import LoadRequest, StageRequest
from .operations import ModelOperations


class _Config(msgspec.Struct):
    weights: str | None = None


def staging_of(request: LoadRequest) -> StageRequest | None:
    """Return the staging of the weights that a `load` names, if any. Raises BadRequest."""
    weights = request.parameters.weights
    if request.parameters.config is not None:
        try:
            weights = weights or decoded(request.parameters.config.encode(), _Config).weights
        except BadRequest as error:
            raise BadRequest(f"config: {error}; expected a JSON document, with a string as its weights") from error
    return StageRequest(source=weights) if weights else None


def load(operations: ModelOperations, staging: StageRequest | None, by: str) -> SwapReceipt | None:
    """Let a model answer again, with new weights if there is a staging. Raises what `ModelOperations.swap` raises."""
    receipt = operations.swap(staging, by) if staging is not None else None
    operations.served.switch.unloaded = False
    return receipt


def unload(operations: ModelOperations) -> None:
    """Let a model answer no requests until the next `load`. It stays in memory, and its weights can change."""
    operations.served.switch.unloaded = True
