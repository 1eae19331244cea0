"""Calls of the eager model, made as a session runs its graphs: without gradients, from the initial state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from weightswap_exporter.capture.trees import plain_tree
from weightswap_exporter.checkpoints.tensor import pieces
from weightswap_exporter.models import huggingface
from weightswap_exporter.models.parts import parts_of
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.tensors.digests import digest_of
from weightswap_runtime.tensors.torch_tensors import tensor_bytes


class Outputs(NamedTuple):
    """Flat outputs of a call with their names, in the graph's order. Tensors are copies."""

    names: list[str]
    values: list[Any]


@contextmanager
def eager(model: nn.Module, functions: Mapping[str, str], initial: Mapping[str, torch.Tensor]) -> Iterator[Eager]:
    """Prepare the model for calls inside a `with` block.

    functions: the model's attribute for each method whose name differs. initial: the initial state by FQN. Inside the
    block, gradients and autocast are off, attention takes its ordinary path, which is the captured one, and a
    transformers model has no key-value cache. On exit, torch's random state and the model's buffers are restored, also
    after an exception; a copy of every buffer is held until then.
    """
    buffers = _ModelBuffers(model, initial)
    fast = torch.backends.mha.get_fastpath_enabled()
    plain = torch.autocast("cpu", enabled=False)
    with torch.no_grad(), plain, torch.random.fork_rng(devices=[]), huggingface.without_cache(model):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield Eager(model, functions, buffers)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            buffers.restore()


class Eager:
    """An eager model that is ready to be called, as yielded by `eager()`."""

    def __init__(self, model: nn.Module, functions: Mapping[str, str], buffers: _ModelBuffers) -> None:
        self._model = model
        self._functions = functions
        self._buffers = buffers
        self._parameters = _parameters(model)

    def run(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        within: AbstractContextManager[object] | None = None,
    ) -> Outputs:
        """Call a method from the initial state, with row-major copies of the inputs, as goldens keep them.

        within: a context manager around the call alone.
        """
        self._buffers.reset()
        args, kwargs = pytree.tree_map(_row_major, (args, kwargs))
        name = self._functions.get(method, method)
        call = self._model if name == "forward" else getattr(self._model, name)
        with within or nullcontext():
            result = call(*args, **kwargs)
        tree, values = plain_tree(result)
        return Outputs([leaf.name for leaf in leaves(tree)], [_row_major(value) for value in values])

    def changed(self) -> list[str]:
        """Return the names of weights and constants that calls have changed."""
        now = _parameters(self._model)
        return self._buffers.changed() + [name for name, value in self._parameters.items() if now.get(name) != value]


def _row_major(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return value.detach().clone(memory_format=torch.contiguous_format)


def _parameters(model: nn.Module) -> dict[str, tuple[int, str]]:
    """Return the identity and digest of each parameter: writes through `.data` do not change its version counter."""
    digests = {id(value): _digest(value) for value in model.parameters()}
    return {name: (id(value), digests[id(value)]) for name, value in model.named_parameters(remove_duplicate=False)}


def _digest(value: torch.Tensor) -> str:
    parts = parts_of("", value).values() if value.layout is torch.strided else ()
    return " ".join(digest_of(pieces(part)) for part in parts)


class _BufferPlace(NamedTuple):
    """A buffer, the dict and key that hold it in its module, and a copy of its values."""

    fqn: str
    owner: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
    values: torch.Tensor


class _ModelBuffers:
    """Buffers of a model. `initial` has the values, before each call, of those that a call may change."""

    def __init__(self, model: nn.Module, initial: Mapping[str, torch.Tensor]) -> None:
        self._initial = initial
        self._buffers = [
            _BufferPlace(f"{path}.{key}" if path else key, module._buffers, key, buffer, buffer.detach().clone())
            for path, module in model.named_modules(remove_duplicate=False)
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def reset(self) -> None:
        for fqn, owner, key, tensor, _ in self._buffers:
            if fqn in self._initial:
                owner[key] = tensor  # a call may have assigned another tensor
                tensor.copy_(self._initial[fqn])

    def changed(self) -> list[str]:
        return [buffer.fqn for buffer in self._buffers if buffer.fqn not in self._initial and _is_changed(buffer)]

    def restore(self) -> None:
        for buffer in self._buffers:
            if _is_changed(buffer):
                buffer.owner[buffer.key] = buffer.tensor
                buffer.tensor.copy_(buffer.values)


def _is_changed(buffer: _BufferPlace) -> bool:
    return buffer.owner.get(buffer.key) is not buffer.tensor or not _same_bits(buffer.values, buffer.tensor)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_type = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_type and np.array_equal(tensor_bytes(one), tensor_bytes(other))
