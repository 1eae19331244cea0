"""Triton's model repository extension: `load` and `unload` of a model that the server has."""

from __future__ import annotations

import msgspec

from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_server.errors import BadRequest

from .documents import LoadRequest, StageRequest
from .operations import ModelOperations


class _Config(msgspec.Struct):
    weights: str | None = None


def load_request(asked: LoadRequest) -> StageRequest | None:
    """The weights that a `load` names, if it does. Raises BadRequest."""
    weights = asked.parameters.weights
    if asked.parameters.config is not None:
        try:
            weights = weights or msgspec.json.decode(asked.parameters.config, type=_Config).weights
        except msgspec.MsgspecError as error:
            raise BadRequest(f"config: {error}; expected a JSON document, with a text as its weights") from error
    return StageRequest(source=weights) if weights else None


def load(operations: ModelOperations, asked: StageRequest | None, by: str) -> SwapReceipt | None:
    """Answer again, with other weights where some are named. Raises what `ModelOperations.swap` raises."""
    receipt = operations.swap(asked, by) if asked is not None else None
    operations.served.switch.unloaded = False
    return receipt


def unload(operations: ModelOperations) -> None:
    """Answer nobody until the next `load`. Weights and memory stay, and go on to be changed."""
    operations.served.switch.unloaded = True
