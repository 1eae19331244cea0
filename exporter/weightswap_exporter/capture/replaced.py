"""Buffers that a call replaces by other tensors, as by `self.mean = self.mean + x`.

A graph has one tensor for a buffer, with one type, and copies the new values there when the call ends. torch sees what
the model's own attributes are given, and not those of submodules, nor what bypasses attributes.
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

_Held = Mapping[str, tuple[torch.Tensor, set[int]]]


@contextmanager
def replaced_tensors(root: nn.Module) -> Iterator[set[str]]:
    """A set that has, when the block ends, the FQNs that hold other tensors or memory since a call of `root` in it.

    The call itself copies those of submodules back. Raises CaptureError, in the call, for a tensor of another type, and
    where it changes which of them share memory.
    """
    names: set[str] = set()
    before: list[_Held] = []  # a method may call its own module

    def begin(module: nn.Module, _: Any) -> None:
        if vars(module) is vars(root):
            before.append(_held(root))

    def end(module: nn.Module, _: Any, output: Any) -> Any:
        if vars(module) is not vars(root):
            return None
        was = before.pop()
        return None if before else _copied_back(root, was, output, names)

    with register_module_forward_pre_hook(begin), register_module_forward_hook(end):
        yield names


def check_seen(replaced: Collection[str], mutated: Collection[str]) -> None:
    """Raise CaptureError for tensors that were replaced without a trace in the program, whose changes are `mutated`."""
    if unseen := sorted(set(replaced) - set(mutated)):
        raise CaptureError(
            f"a call replaces {listed(unseen)} in a way that no graph has: a parameter, by .data, or in _buffers. "
            "Assign to a buffer's attribute, or change it in place"
        )


def _held(root: nn.Module) -> _Held:
    return {name: (tensor, memory(tensor)) for name, tensor in whole_tensors(root).items()}


def _copied_back(root: nn.Module, was: _Held, output: Any, names: set[str]) -> Any:
    """The call's output, apart from buffers that are overwritten here or at the end of the graph."""
    now = _held(root)
    same = {name: now[name] for name in was.keys() & now.keys()}
    names |= {name for name, held in same.items() if held[0] is not was[name][0] or held[1] != was[name][1]}
    assigned = sorted(name for name in names & same.keys() if same[name][0] is not was[name][0])
    if not assigned:
        return None
    _check(assigned, was, same)
    old = set[int]().union(*(was[name][1] for name in assigned))
    output = pytree.tree_map_only(torch.Tensor, lambda each: each.clone() if memory(each) & old else each, output)
    deep = {id(was[name][0]): name for name in assigned if "." in name}.values()
    # torch copies those of the root one after another, the second from what the first has overwritten
    own = [name for name in assigned if "." not in name and same[name][1] & old]
    for name, value in [(name, _apart(*same[name], old)) for name in (*deep, *own)]:
        if "." in name:
            was[name][0].copy_(value)
        else:
            setattr(root, name, value)
    return output


def _apart(tensor: torch.Tensor, storages: set[int], old: set[int]) -> torch.Tensor:
    return tensor.detach().clone() if storages & old else tensor.detach()


def _check(assigned: list[str], was: _Held, now: _Held) -> None:
    if other := [name for name in assigned if _type(was[name][0]) != _type(now[name][0])]:
        raise CaptureError(
            f"a call replaces {listed(other)} by a tensor of another type or shape; a graph's state stays of "
            "one type: give it the same one, or write to a part of it"
        )
    names = [name for name in was if name in now]
    if changed := [name for name in assigned if _sharing(name, names, was) != _sharing(name, names, now)]:
        raise CaptureError(
            f"a call changes with which others {listed(changed)} share memory, and a graph keeps that; assign a "
            ".clone(), or change the tensor in place"
        )


def _sharing(name: str, names: list[str], held: _Held) -> list[str]:
    return [other for other in names if held[other][1] & held[name][1]]


def _type(tensor: torch.Tensor) -> Any:
    return tensor.dtype, [str(size) for size in tensor.shape], tensor.device
