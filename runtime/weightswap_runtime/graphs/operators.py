"""Operators by the names that a graph has for them. Nothing but operators can be reached."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

from .effects import is_fresh, is_mutable, is_repeatable
from .schema import UnknownPart

_SCALAR = "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ not_ lshift rshift"
_NUMBERS: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _SCALAR.split()},
    **{f"math.{name}": getattr(math, name) for name in ("trunc", "ceil", "floor", "sqrt")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_not", "sym_int", "sym_float", "sym_ite", "sym_max", "sym_min", "sym_sum", "_sym_sqrt")
        if hasattr(torch, name)
    },
}
_OF_TORCH = ("torch._functorch.predispatch.", "torch.amp.autocast_mode._", "torch._C._set_grad_enabled")
_HIGHER_ORDER = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "cond", "while_loop", "map_impl", "scan"}
_FILES = {"aten::from_file"}  # operators that reach beyond their tensors
# checks of what the signature has fixed already: the dtypes and devices of intermediate results follow from the inputs'
DROPPED = {"aten::_assert_tensor_metadata"}
DROPOUTS = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}
SET_GRADIENTS = "torch.ops.higher_order.wrap_with_set_grad_enabled"  # whether, a graph, what that takes
AUTOCAST = {  # the first argument names a type of device
    "torch.ops.higher_order.wrap_with_autocast",
    "torch.amp.autocast_mode._enter_autocast",
}
_SIZES = {"aten::sym_size", "aten::sym_numel", "aten::sym_stride"}


class Operator(NamedTuple):
    """Something to call. pure: its call can be left out where nothing needs the result.

    keywords: the names that keyword arguments may have, as the operator itself has them. past_autograd: as in
    `Compiled`. repeatable: the same arguments always give the same tensors, and nothing else happens. mutable: it may
    write to its arguments. fresh: no result shares memory with an argument.
    """

    call: Callable[..., Any]
    name: str
    pure: bool
    keywords: frozenset[str] = frozenset()
    higher_order: bool = False
    past_autograd: bool = True
    repeatable: bool = False
    mutable: bool = False
    fresh: bool = False


class MissingOperator(Exception):
    """An operator that no package in this process has registered."""


class ForeignFunction(Exception):
    """Something that no graph has a reason to call."""


@functools.cache
def find_operator(target: str) -> Operator:
    """The operator that a graph calls `target`. Raises MissingOperator, ForeignFunction, and UnknownPart."""
    if target in _NUMBERS:
        return Operator(_NUMBERS[target], target, pure=True)
    root, _, path = target.partition(".ops.")
    parts = path.split(".")
    if target.startswith(_OF_TORCH):
        raise UnknownPart(f"the function {target!r:.80}")
    if root != "torch" or not all(part.isidentifier() for part in parts):
        raise ForeignFunction(repr(target[:80]))
    if parts[0] == "higher_order":
        return _higher_order(parts[1:], target)
    return _overload(parts, target)


def _higher_order(parts: list[str], target: str) -> Operator:
    found = getattr(torch.ops.higher_order, parts[0], None) if len(parts) == 1 else None
    if not isinstance(found, HigherOrderOperator):
        raise ForeignFunction(repr(target[:80]))
    if parts[0] not in _HIGHER_ORDER:
        raise UnknownPart(f"the operator {target!r:.80}")
    return Operator(found, target, pure=False, higher_order=True, mutable=True)


def _overload(parts: list[str], target: str) -> Operator:
    if len(parts) != 3:
        raise ForeignFunction(repr(target[:80]))
    namespace = getattr(torch.ops, parts[0], None)
    packet = getattr(namespace, parts[1], None) if isinstance(namespace, _OpNamespace) else None
    found = getattr(packet, parts[2], None) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(found, OpOverload):
        raise MissingOperator(target)
    name = found._schema.name
    if name in _FILES:
        raise ForeignFunction(f"{target!r}, which opens files")
    keywords = frozenset(each.name for each in found._schema.arguments if not iskeyword(each.name))
    own = name.startswith("aten::")
    return Operator(
        _FASTER.get(found, found._op),
        name,
        pure=name in _SIZES,
        keywords=keywords,
        past_autograd=own,
        repeatable=is_repeatable(found),
        mutable=is_mutable(found),
        fresh=is_fresh(found),
    )


def _faster() -> dict[OpOverload, Callable[..., Any]]:
    """Overloads that torch's own Python functions run with the same arguments in less time per call."""
    aten, tensor, nn = torch.ops.aten, torch.Tensor, torch._C._nn
    return {
        aten.sym_size.int: tensor.size,
        aten.sym_stride.int: tensor.stride,
        aten.sym_numel.default: tensor.numel,
        aten.add.Tensor: torch.add,
        aten.sub.Tensor: torch.sub,
        aten.mul.Tensor: torch.mul,
        aten.div.Tensor: torch.div,
        aten.matmul.default: torch.matmul,
        aten.bmm.default: torch.bmm,
        aten.linear.default: nn.linear,
        aten.transpose.int: torch.transpose,
        aten.view.default: tensor.view,
        aten.reshape.default: torch.reshape,
        aten.permute.default: torch.permute,
        aten.unsqueeze.default: torch.unsqueeze,
        aten.select.int: torch.select,
        aten.softmax.int: torch.softmax,
        aten.layer_norm.default: torch.layer_norm,
        aten.gelu.default: nn.gelu,
        aten.relu.default: torch.relu,
        aten.silu.default: nn.silu,
        aten.tanh.default: torch.tanh,
        aten.sigmoid.default: torch.sigmoid,
        aten.neg.default: torch.neg,
        aten.rsqrt.default: torch.rsqrt,
        aten.contiguous.default: tensor.contiguous,
        aten.expand.default: tensor.expand,
        aten.flatten.using_ints: torch.flatten,
        aten.unflatten.int: torch.unflatten,
        aten.squeeze.dim: torch.squeeze,
        aten.cat.default: torch.cat,
        aten.chunk.default: torch.chunk,
        aten.embedding.default: torch.embedding,
        aten.mean.dim: torch.mean,
        aten.conv2d.default: torch.conv2d,
        aten.batch_norm.default: torch.batch_norm,
        aten.max_pool2d.default: torch.max_pool2d,
        aten.dropout.default: torch.dropout,
        aten.scaled_dot_product_attention.default: nn.scaled_dot_product_attention,
    }


_FASTER = _faster()
