"""Buffers that a call replaces by other tensors, as in `self.mean = self.mean + x`.

A graph has one tensor of one type for a buffer, and copies the new values into it when the call ends. torch sees
assignments to attributes of the model itself, but not of its submodules, nor those that bypass attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from weightswap_exporter.models.tensors import whole_tensors
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.messages import listed

from .views import memory

_Tensors = Mapping[str, tuple[torch.Tensor, set[int]]]


@contextmanager
def replaced_tensors(root: nn.Module) -> Iterator[set[str]]:
    """Give a set that, when the block ends, has the FQNs whose tensor or memory a call of `root` has replaced.

    The call itself copies the values back into the buffers of submodules. It raises CaptureError for a tensor of
    another type, and if it changes which buffers share memory.
    """
    names: set[str] = set()
    stack: list[_Tensors] = []  # a method may call its own module

    def begin(module: nn.Module, _: Any) -> None:
        if vars(module) is vars(root):
            stack.append(_tensors(root))

    def end(module: nn.Module, _: Any, output: Any) -> Any:
        if vars(module) is not vars(root):
            return None
        before = stack.pop()
        return None if stack else _copy_back(root, before, output, names)

    with register_module_forward_pre_hook(begin), register_module_forward_hook(end):
        yield names


def check_seen(replaced: Collection[str], mutated: Collection[str]) -> None:
    """Raise CaptureError for replaced tensors whose change the program does not have: `mutated` are those it has."""
    if unseen := sorted(set(replaced) - set(mutated)):
        raise CaptureError(
            f"a call replaces {listed(unseen)} in a way that a graph cannot express: a parameter, by .data, or in "
            "_buffers. A weight stays as it is: compute a new tensor in the call. What calls remember is assigned to a "
            "buffer's attribute, or changed in place"
        )


def _tensors(root: nn.Module) -> _Tensors:
    return {name: (tensor, memory(tensor)) for name, tensor in whole_tensors(root).items()}


def _copy_back(root: nn.Module, before: _Tensors, output: Any, names: set[str]) -> Any:
    """Return the call's output without views of buffers that are overwritten; None leaves the output as it is."""
    present = _tensors(root)
    now = {name: present[name] for name in before.keys() & present.keys()}
    names |= {name for name, pair in now.items() if pair[0] is not before[name][0] or pair[1] != before[name][1]}
    assigned = sorted(name for name in names & now.keys() if now[name][0] is not before[name][0])
    if not assigned:
        return None
    _check(assigned, before, now)
    old = set[int]().union(*(before[name][1] for name in assigned))
    output = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.clone() if memory(leaf) & old else leaf, output)
    deep = {id(before[name][0]): name for name in assigned if "." in name}.values()
    # torch copies into the root's buffers in turn: a copy may read a buffer that an earlier one has overwritten
    own = [name for name in assigned if "." not in name and now[name][1] & old]
    for name, value in [(name, _independent(*now[name], old)) for name in (*deep, *own)]:
        if "." in name:
            before[name][0].copy_(value)
        else:
            setattr(root, name, value)
    return output


def _independent(tensor: torch.Tensor, storages: set[int], old: set[int]) -> torch.Tensor:
    return tensor.detach().clone() if storages & old else tensor.detach()


def _check(assigned: list[str], before: _Tensors, now: _Tensors) -> None:
    if retyped := [name for name in assigned if _type(before[name][0]) != _type(now[name][0])]:
        raise CaptureError(
            f"a call replaces {listed(retyped)} with a tensor of another dtype or shape, but a graph's state keeps "
            "both: assign a tensor like the old one, or write to a part of it"
        )
    names = [name for name in before if name in now]
    if changed := [name for name in assigned if _sharing(name, names, before) != _sharing(name, names, now)]:
        raise CaptureError(
            f"a call changes which tensors share memory with {listed(changed)}, which a graph cannot do; assign a "
            ".clone(), or change the tensor in place"
        )


def _sharing(name: str, names: list[str], tensors: _Tensors) -> list[str]:
    return [other for other in names if tensors[other][1] & tensors[name][1]]


def _type(tensor: torch.Tensor) -> Any:
    return tensor.dtype, [str(size) for size in tensor.shape], tensor.device
