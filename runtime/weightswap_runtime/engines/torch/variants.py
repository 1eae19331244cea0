"""The tensors of variants that calls use."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class ChosenTensors:
    """Tensors by FQN, with tied ones under each of their names. `storages` are the addresses of their storages."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], storages: list[int] | None = None) -> None:
        self.tensors = tensors
        if storages is None:
            storages = list({tensor.untyped_storage().data_ptr() for tensor in tensors.values()})
        self.storages = storages

    def lend(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream has done its work so far. All of a variant's tensors share one storage."""
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in self.tensors.values()}.values():
            tensor.record_stream(stream)
