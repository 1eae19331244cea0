"""Operators by their exact names in a graph. A graph can reach nothing else of torch or Python."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload

from .allowed import SAFE, is_sparse, problem
from .effects import is_fresh, is_mutable, is_repeatable
from .schema import UnknownPart

_SCALAR = "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ not_ lshift rshift"
_SYMBOLIC = "sym_not sym_int sym_float sym_ite sym_max sym_min sym_sum sym_sqrt _sym_sqrt"
_NUMBERS: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _SCALAR.split()},
    **{f"math.{name}": getattr(math, name) for name in ("trunc", "ceil", "floor", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split() if hasattr(torch, name)},
}
_LEVELS = "lazy_load_decompositions _vmap_increment_nesting _vmap_decrement_nesting _add_batch_dim _remove_batch_dim"
# `torch.vmap` leaves these calls in a graph, where a level of it begins and ends
_VMAP: dict[str, Callable[..., Any]] = {
    f"{predispatch.__name__}.{name}": getattr(predispatch, name)
    for name in _LEVELS.split()
    if hasattr(predispatch, name)
}
_HIGHER_ORDER = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "cond", "while_loop", "map_impl", "scan"}
OF_TORCH = {"aten", "prims"}
# internal to torch, for compilers, processes and packed objects: no export calls them, and some read more than tensors
_INTERNAL = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "c10d"),
        *("debug_mode_ops", "debugprims", "export", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked"),
        *("onednn", "onnx", "prim", "profiler", "quantization", "quantized", "rngprims", "sparse", "static_runtime"),
        *("streams", "symm_mem"),
    }
)
# their operators' strings are modes; elsewhere a string may be the path of a file (`image::write_file`)
_TAKES_STRINGS = {*OF_TORCH, "quantized_decomposed", "torchao"}
_STRINGS = {"as_string", "as_strings", "as_string_to_argument"}
_HANDLES = re.compile(r"\b(Storage|Stream)\b")
# a check of dtypes and devices of intermediate results, which the signature's inputs have determined already
DROPPED = {"aten::_assert_tensor_metadata"}
DROPOUTS = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}
SET_GRADIENTS = "torch.ops.higher_order.wrap_with_set_grad_enabled"  # arguments: a boolean, a graph, the graph's inputs
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"  # the first argument names a type of device
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZES = {"aten::sym_size", "aten::sym_numel", "aten::sym_stride"}


class Operator(NamedTuple):
    """An operator or function that a graph calls. pure: a call whose result is unused can be removed.

    keywords: the names of arguments that may be passed by keyword. past_autograd: as in `Compiled`. repeatable: equal
    arguments always give equal tensors, without side effects. mutable: it may write to its arguments. fresh: no result
    shares memory with an argument. vmap: it is a part of `torch.vmap`.
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
    vmap: bool = False


class MissingOperator(Exception):
    """An operator that no package in this process has registered."""


class ForeignFunction(Exception):
    """A function that no graph has a reason to call."""


@functools.cache
def find_operator(target: str) -> Operator:
    """Return the operator that a graph calls `target`. Raises MissingOperator, ForeignFunction, and UnknownPart."""
    if target in _NUMBERS:
        return Operator(_NUMBERS[target], target, pure=True)
    if target in _VMAP:
        return Operator(_VMAP[target], target, pure=False, past_autograd=False, mutable=True, vmap=True)
    if target.startswith(f"{predispatch.__name__}."):
        raise UnknownPart(f"the function {target!r:.80}")
    parts = target.split(".")
    if parts[:2] != ["torch", "ops"] or not all(_WORD.fullmatch(part) for part in parts):
        raise ForeignFunction(f"{target!r:.80}")
    if parts[2:3] == ["higher_order"]:
        return _higher_order(parts[3:], target)
    return _overload(parts[2:], target)


def check_strings(operator: Operator, kinds: Iterable[str]) -> None:
    """Raise ForeignFunction if a call has strings that could be more than modes. kinds: those of its arguments."""
    namespace = operator.name.partition("::")[0]
    of_torch = namespace in _TAKES_STRINGS or operator.higher_order or operator.vmap
    if not of_torch and _STRINGS.intersection(kinds):
        raise ForeignFunction(f"{operator.name!r:.80} with a string, which could be the name of a file")


def _higher_order(parts: list[str], target: str) -> Operator:
    torch_operator = getattr(torch.ops.higher_order, parts[0], None) if len(parts) == 1 else None
    if not isinstance(torch_operator, HigherOrderOperator):
        raise ForeignFunction(f"{target!r:.80}")
    if parts[0] not in _HIGHER_ORDER:
        raise UnknownPart(f"the operator {target!r:.80}")
    return Operator(torch_operator, target, pure=False, higher_order=True, mutable=True)


def _overload(parts: list[str], target: str) -> Operator:
    if len(parts) != 3:
        raise ForeignFunction(f"{target!r:.80}")
    namespace, operator, overload = parts
    if namespace in _INTERNAL:
        raise ForeignFunction(f"{target!r:.80}, which is internal to torch")
    full = f"{namespace}::{operator}" + (f".{overload}" if overload != "default" else "")
    if not _is_dispatched(full):
        raise MissingOperator(target)
    torch_operator = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    schema = torch_operator._schema
    name = schema.name
    if any(_HANDLES.search(str(argument.type)) for argument in schema.arguments):
        raise ForeignFunction(f"{target!r}, which bypasses tensors")
    if namespace in OF_TORCH and (why := problem(torch_operator)):
        raise ForeignFunction(f"{target!r}, {why}")
    keywords = frozenset(argument.name for argument in schema.arguments if not iskeyword(argument.name))
    return Operator(
        SAFE.get(torch_operator) or _FASTER.get(torch_operator, torch_operator._op),
        name,
        pure=name in _SIZES,
        keywords=keywords,
        past_autograd=name.startswith("aten::") and not is_sparse(torch_operator),
        repeatable=is_repeatable(torch_operator),
        mutable=is_mutable(torch_operator),
        fresh=is_fresh(torch_operator),
    )


def _is_dispatched(name: str) -> bool:
    """Return whether torch's dispatcher has an operator. TorchScript has more, some of which write files."""
    try:
        return torch._C._dispatch_has_kernel(name)
    except RuntimeError as error:  # not the name of an operator
        raise ForeignFunction(f"{name!r:.80}") from error


_aten, _tensor, _nn = torch.ops.aten, torch.Tensor, torch._C._nn
# torch functions that do the same as an overload, with the same arguments, in less time per call
_FASTER: dict[OpOverload, Callable[..., Any]] = {
    _aten.sym_size.int: _tensor.size,
    _aten.sym_stride.int: _tensor.stride,
    _aten.sym_numel.default: _tensor.numel,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.index_copy_.default: _tensor.index_copy_,
    _aten.clone.default: torch.clone,
    _aten.matmul.default: torch.matmul,
    _aten.bmm.default: torch.bmm,
    _aten.linear.default: _nn.linear,
    _aten.transpose.int: torch.transpose,
    _aten.view.default: _tensor.view,
    _aten.reshape.default: torch.reshape,
    _aten.permute.default: torch.permute,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.select.int: torch.select,
    _aten.softmax.int: torch.softmax,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.gelu.default: _nn.gelu,
    _aten.relu.default: torch.relu,
    _aten.silu.default: _nn.silu,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.neg.default: torch.neg,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.contiguous.default: _tensor.contiguous,
    _aten.expand.default: _tensor.expand,
    _aten.flatten.using_ints: torch.flatten,
    _aten.unflatten.int: torch.unflatten,
    _aten.squeeze.dim: torch.squeeze,
    _aten.cat.default: torch.cat,
    _aten.chunk.default: torch.chunk,
    _aten.embedding.default: torch.embedding,
    _aten.mean.dim: torch.mean,
    _aten.conv2d.default: torch.conv2d,
    _aten.batch_norm.default: torch.batch_norm,
    _aten.max_pool2d.default: torch.max_pool2d,
    _aten.dropout.default: torch.dropout,
    _aten.scaled_dot_product_attention.default: _nn.scaled_dot_product_attention,
}
