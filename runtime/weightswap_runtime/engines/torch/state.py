"""A state whose tensors are torch's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.torch_tensors import tensor_content


class TorchState:
    """One copy of an artifact's state; calls write into its tensors.

    `tensors` are by FQN, tied ones under each of their names.
    """

    def __init__(self, rows: Sequence[NamedTensor], initial: Mapping[str, torch.Tensor]) -> None:
        """initial: values by the names of the rows, which are copied."""
        self._initial = initial
        self._own = {row.name: _copied(row, initial[row.name]) for row in rows}
        self.tensors = {name: self._own[row.name] for row in rows for name in row.names}
        self._all = list(self._own.values())
        self._placed: dict[Hashable, list[tuple[int, torch.Tensor]]] = {}

    def reset(self) -> None:
        """Put the initial values back, in the same memory; in other memory where a call has resized a tensor."""
        self.put(self._initial)

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take values by the names of the rows."""
        for name, value in values.items():
            _put(self._own[name], value)

    def content(self, name: str) -> TensorBytes:
        return tensor_content(self._own[name])

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by the names of their rows."""
        return iter(self._own.items())

    def placed(self, graph: Hashable, names: Sequence[tuple[int, str]]) -> list[tuple[int, torch.Tensor]]:
        """Its tensors with the indices of a graph's inputs; `names` are those, and the names there."""
        if (found := self._placed.get(graph)) is None:
            found = self._placed[graph] = [(index, self.tensors[name]) for index, name in names]
        return found

    def storages(self) -> list[int]:
        """Where the tensors lie, also those without elements; a call that resizes one moves it."""
        return [live.untyped_storage().data_ptr() for live in self._all]


def _copied(row: NamedTensor, value: torch.Tensor) -> torch.Tensor:
    """A copy in the row's strides; of zeros there may be one alone."""
    if row.stride is None:
        return torch.empty(row.shape, dtype=value.dtype, device=value.device).copy_(value)
    return torch.empty_strided(row.shape, row.stride, dtype=value.dtype, device=value.device).copy_(value)


@torch.no_grad()
def _put(live: torch.Tensor, value: torch.Tensor) -> None:
    """Give a state's tensor a value."""
    if live.shape == value.shape:
        live.copy_(value)
    else:
        live.set_(value.clone(memory_format=torch.preserve_format))  # type: ignore[call-overload]
