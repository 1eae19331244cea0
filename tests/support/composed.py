"""Tensor subclasses composed of other tensors by torch's protocol alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Sum(torch.Tensor):
    """Tensor subclass that is the sum of two tensors; `note` is metadata."""

    one: torch.Tensor
    two: torch.Tensor
    note: Any

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor, note: Any = None) -> Sum:
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, strides=one.stride(), dtype=one.dtype)

    def __init__(self, one: torch.Tensor, two: torch.Tensor, note: Any = None) -> None:
        self.one, self.two, self.note = one, two, note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["one", "two"], {"note": self.note}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Sum:
        return Sum(inner["one"], inner["two"], context["note"])

    def whole(self) -> torch.Tensor:
        one, two = (part.whole() if isinstance(part, Sum) else part for part in (self.one, self.two))
        return one + two

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:  # torch.export lets subclasses decompose operators only here
            return func(*(value.whole() if isinstance(value, cls) else value for value in args))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].one.detach(), args[0].two.detach(), args[0].note)
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class Rows(torch.Tensor):
    """Stand-in for a sharded tensor, without processes."""

    def full_tensor(self) -> torch.Tensor:
        raise NotImplementedError


def summed(linear: nn.Linear, note: Any = None) -> nn.Linear:
    """Replace a parameter by a composed tensor, like quantisers do."""
    half = linear.weight.detach() / 2
    linear.weight = nn.Parameter(Sum(half, half.clone(), note), requires_grad=False)
    return linear
