"""Trials of a model: calls with other weights, inputs or attributes, after which it is as it was before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weightswap_exporter.modules.stand_ins import install, restored, tied
from weightswap_exporter.modules.tensors import ModelView, is_composed, is_fake, parts_of
from weightswap_runtime.torch_tensors import tensor_bytes

from .programs import graphs, memory

MOST_FILLED = 4 << 30  # bytes of other numbers for a model, of which fractions of one shape share theirs
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FIRST, SECOND = 7_062_013, 7_062_014  # seeds; the weights themselves are not likely to come from them


@contextmanager
def in_a_trial(view: ModelView, tensors: Mapping[str, torch.Tensor], program: ExportedProgram) -> Iterator[set[int]]:
    """Give a model other parameters and buffers, by FQN, in the block, whose end restores it and all attributes.

    The block runs without gradients and warnings, and with the same random numbers each time. What it writes to memory
    from before it is undone at its end: a trial may take ways that no call takes. Yields the storages of that memory.
    program: of the model; where that has branches of torch.cond, parameters are copied instead.
    """
    copies = {}
    # torch compiles them in eager calls, and not within a mode
    if branches := _has_branches(program):
        real = {name: value for name, value in view.parameters.items() if not is_fake(value)}
        copies = tied(view, {name: value.detach().clone() for name, value in real.items()})
    undoing = _WritesUndone(view)
    with restored(view.model), torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        install(view, {**copies, **tensors})
        try:
            with nullcontext() if branches else undoing:
                yield undoing.written
        finally:
            undoing.undo()


def _has_branches(program: ExportedProgram) -> bool:
    targets = (node.target for module in graphs(program) for node in module.graph.nodes)
    return any(isinstance(target, HigherOrderOperator) for target in targets)


class WritesChecked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which `check(values, operator)` sees what operators are about to write to, and may raise."""

    def __init__(self, check: Callable[[list[Any], object], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.is_write:
                    value = args[position] if position < len(args) else named.get(argument.name)
                    self._check(list(value) if isinstance(value, list | tuple) else [value], func)
        return func(*args, **named)


class _WritesUndone(WritesChecked):  # type: ignore[no-untyped-call]
    """Mode that keeps what is in older memory before operators write to it, for `undo`."""

    def __init__(self, view: ModelView) -> None:
        super().__init__(self._keep)
        self.written: set[int] = set()
        self._new: set[int] = set()
        self._kept: list[tuple[Any, int, Any]] = []  # storages, where their memory is, and what was there
        # an assignment of `.data`, which is no operator, changes a parameter that the user has
        self._data = [(tensor, tensor.detach()) for tensor in view.tensors.values() if not is_composed(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        if not any(each.alias_info for each in func._schema.returns):
            self._new.update(storage._cdata for storage in _storages(returned))
        return returned

    def _keep(self, values: list[Any], _: object) -> None:
        for storage in _storages(values):
            if storage._cdata not in self._new and storage._cdata not in self.written:
                self.written.add(storage._cdata)
                content = storage.clone()  # type: ignore[no-untyped-call]
                self._kept.append((storage, storage.data_ptr(), content))

    def undo(self) -> None:
        storages = [tensor.untyped_storage() for tensor, _ in self._data if not is_fake(tensor)]
        owners = {storage.data_ptr(): storage._cdata for storage in storages}
        for storage, address, content in self._kept:
            # else tensors have been resized, or given other memory: `share_memory_` writes to that through a storage
            # of its own, before the tensor's has it
            is_its_own = owners.get(address, storage._cdata) == storage._cdata
            if is_its_own and (storage.data_ptr(), len(storage)) == (address, len(content)):
                storage.copy_(content)
        for tensor, before in self._data:
            if _place(tensor) != _place(before):
                tensor.data = before


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what an assignment of `.data` changes."""
    return memory(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield from (part.untyped_storage() for part in parts_of("", leaf).values() if not is_fake(part))


def filling(view: ModelView, names: Iterable[str], seed: int = FIRST) -> dict[str, torch.Tensor] | None:
    """Return random numbers for the named tensors, which may have none, as a skeleton's; None if they are huge.

    They are around 1 in vectors, which scale, and around 0 in matrices, so that no layer makes all the same. Tensors of
    one shape share them: a skeleton is exported where a model of its size may not fit.
    """
    tensors = {name: view.tensors[name] for name in names}
    like = {(tensor.dtype, tuple(tensor.shape)): tensor for tensor in tensors.values()}
    if sum(tensor.nbytes for tensor in like.values()) > MOST_FILLED:
        return None
    generator = torch.Generator().manual_seed(seed)
    numbers = {key: _random_like(tensor, generator) for key, tensor in like.items()}
    # a view for each: one tensor would tie them
    return tied(view, {name: numbers[tensor.dtype, tuple(tensor.shape)].detach() for name, tensor in tensors.items()})


def has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def other_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return an integer or bool tensor in another order, as integers may be indices; all alike: other ones."""
    if tensor.dtype is torch.bool:
        return ~tensor.detach()
    rolled = tensor.detach().flatten().roll(1).view(tensor.shape)
    if not torch.equal(rolled, tensor):
        return rolled
    signed = _SIGNED[tensor.itemsize]  # torch adds no unsigned integers of more than a byte
    return (rolled.view(signed) + 1).view(tensor.dtype)


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not has_fractions(tensor):
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    single = torch.complex64 if tensor.is_complex() else torch.float32
    dtype = single if tensor.dtype is torch.complex32 or tensor.itemsize == 1 else tensor.dtype
    numbers = torch.rand(tensor.shape, generator=generator, dtype=dtype)
    if tensor.dim() < 2:
        numbers += 0.5
    else:
        numbers -= 0.5
        numbers *= 4 / max(1, tensor.shape[-1]) ** 0.5
    return numbers.to(tensor.dtype)


def are_close(one: list[Any], other: list[Any]) -> bool:
    """Return whether what two calls have returned differs by no more than rounding.

    What is computed in another order, or was prepared in advance, rounds otherwise: floats may differ by the root of
    their dtype's precision, in relation to the largest.
    """
    return len(one) == len(other) and all(map(_is_close, one, other))


def _is_close(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.is_complex():
        return _is_close(torch.view_as_real(one), torch.view_as_real(other))
    if not one.is_floating_point():
        return bool(bits(one) == bits(other))
    wide = one.detach().double()
    finite = wide.nan_to_num(0, 0, 0)
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = torch.finfo(one.dtype).eps ** 0.5 * largest
    return torch.allclose(wide, other.detach().double(), rtol=0, atol=tolerance, equal_nan=True)


def bits(value: Any) -> Any:
    """Return dtype, shape and bytes of a tensor, which can be compared; other values as they are."""
    return (value.dtype, tuple(value.shape), bytes(tensor_bytes(value))) if isinstance(value, torch.Tensor) else value
