"""A state of torch tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.torch_tensors import tensor_content


class TorchState:
    """One copy of an artifact's state; calls write into its tensors.

    `tensors` maps FQNs to tensors, with tied ones under each of their names.
    """

    def __init__(self, rows: Sequence[NamedTensor], initial: Mapping[str, torch.Tensor]) -> None:
        """initial: values by the names of the rows; they are copied."""
        self._initial = initial
        self._by_row = {row.name: _copied(row, initial[row.name]) for row in rows}
        self.tensors = {name: self._by_row[row.name] for row in rows for name in row.names}
        self._all = list(self._by_row.values())
        self._by_graph: dict[Hashable, list[tuple[int, torch.Tensor]]] = {}

    def reset(self) -> None:
        """Restore the initial values, in the same memory except for tensors that a call has resized."""
        self.put(self._initial)

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set values by the names of the rows."""
        for name, value in values.items():
            _put(self._by_row[name], value)

    def content(self, name: str) -> TensorBytes:
        return tensor_content(self._by_row[name])

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors with the names of their rows."""
        return iter(self._by_row.items())

    def for_inputs(self, graph: Hashable, names: Sequence[tuple[int, str]]) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors for a graph's inputs, with their indices. names: index and FQN of each such input."""
        if (tensors := self._by_graph.get(graph)) is None:
            tensors = self._by_graph[graph] = [(index, self.tensors[name]) for index, name in names]
        return tensors

    def storages(self) -> list[int]:
        """Return the addresses of the tensors' storages, which may change when a call resizes one."""
        return [tensor.untyped_storage().data_ptr() for tensor in self._all]


def _copied(row: NamedTensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value in the row's shape and strides. The value may be a single expanded zero."""
    if row.stride is None:
        return torch.empty(row.shape, dtype=value.dtype, device=value.device).copy_(value)
    return torch.empty_strided(row.shape, row.stride, dtype=value.dtype, device=value.device).copy_(value)


@torch.no_grad()
def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape == value.shape:
        tensor.copy_(value)
    else:
        tensor.set_(value.clone(memory_format=torch.preserve_format))  # type: ignore[call-overload]
