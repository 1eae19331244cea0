"""What AOTInductor computes otherwise than eager, put right while it compiles: patterns that drop what they do not
name, pools and lengths for the sizes of the sample alone, functions that lose digits or large numbers, numbers of
another dtype. And products of one row, without a library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._inductor import decomposition, lowering
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.pattern_matcher import FailedMatch, Ignored, _TargetArgsExpr
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min

_aten = torch.ops.aten
_BYTES = frozenset({torch.int8, torch.uint8})
_EXTREMES = (
    *(_aten.amax.default, _aten.amin.default, _aten.argmax.default, _aten.argmin.default),
    *(_aten.max.default, _aten.max.dim, _aten.min.default, _aten.min.dim),
)
_OF_MEMORY = frozenset({"layout", "device", "pin_memory", "memory_format", "requires_grad", "non_blocking"})
_POOLS = (_aten._adaptive_avg_pool2d.default, _aten.adaptive_max_pool2d.default)
_DECOMPOSED = (_aten.adaptive_max_pool2d.default, _aten.adaptive_max_pool3d.default)
_HALVES = frozenset({torch.bfloat16, torch.float16})
# eager has numbers beside tensors in the dtype of these; elsewhere, as in products, it computes with them in float32
_ROUNDING = (
    *(
        _aten.add.Tensor,
        _aten.add.Scalar,
        _aten.sub.Tensor,
        _aten.sub.Scalar,
        _aten.pow.Scalar,
        _aten.pow.Tensor_Scalar,
    ),
    *(_aten.fmod.Scalar, _aten.fmod.Tensor, _aten.remainder.Scalar, _aten.remainder.Tensor),
)
_FILLING = (_aten.full.default, _aten.scalar_tensor.default)
_MOST_INLINE = 2**17  # elements of a matrix; for a larger one the library's threads pay off
_Lowering = Callable[..., Any]


@contextmanager
def rewritten(on_gpu: bool) -> Iterator[None]:
    """Let AOTInductor compute, in the block, what eager computes."""
    from torch._inductor.fx_passes import post_grad, reinplace  # here, as they warn of what torch deprecates

    lowerings = _lowerings_of_pools() | ({} if on_gpu else _cpu_lowerings())
    decompositions = decomposition.select_decomp_table()
    with ExitStack() as stack:
        for patch in (
            mock.patch.dict(lowering.lowerings, lowerings),
            mock.patch.dict(decompositions, {each: _unless_dynamic(decompositions[each]) for each in _DECOMPOSED}),
            mock.patch.multiple(CppOverrides, **{name: _wrapping(name) for name in ("abs", "truncdiv")}),
            mock.patch.dict(decompositions, _DECOMPOSITIONS),
            mock.patch.dict(decompositions, {_aten.lerp.Scalar: _in_one_step(decompositions[_aten.lerp.Scalar])}),
            mock.patch.multiple(CppVecOverrides, **{name: _vectorised(name) for name in ("expm1", "atanh")}),
            mock.patch.multiple(CppVecOverrides, erf=staticmethod(_erf), acosh=staticmethod(_acosh)),
            mock.patch.object(_TargetArgsExpr, "_match", _matching_whole(_TargetArgsExpr._match)),
            mock.patch.object(fuse_attention, "_scaled_dot_product_attention", _attention),
            mock.patch.object(post_grad, "same_meta", _replaceable(post_grad.same_meta)),
            mock.patch.dict(reinplace.inplaceable_ops, _in_place(reinplace.inplaceable_ops)),
            mock.patch.multiple(SizeVarAllocator, evaluate_min=_size_between(Min), evaluate_max=_size_between(Max)),
        ):
            stack.enter_context(patch)
        yield


def _lowerings_of_pools() -> dict[Any, _Lowering]:
    fallback: Any = lowering.fallback_handler
    return {
        each: _unless_dynamic(lowering.lowerings[each], fallback(each, add_to_fallback_set=False)) for each in _POOLS
    }


def _unless_dynamic(original: _Lowering, otherwise: _Lowering = lambda *_: NotImplemented) -> _Lowering:
    """Return a function that pools to a given size; with `otherwise`, if the sizes before it are dynamic.

    AOTInductor writes a loop over windows for the sample's sizes, and lets it stand for all.
    """

    def pooled(values: Any, size: Any) -> Any:
        sizes = values.shape if isinstance(values, torch.Tensor) else values.get_size()
        is_static = all(isinstance(each, int) or getattr(each, "is_number", False) for each in sizes[-len(size) :])
        return (original if is_static else otherwise)(values, size)

    return pooled


def _size_between(bound: Any) -> Callable[..., Any]:
    """Return a function for the smaller or larger of two sizes: AOTInductor's takes the one that is so for the sample.

    So `x.diagonal()` of more rows than columns would be as long as there are rows.
    """
    original = SizeVarAllocator.evaluate_min if bound is Min else SizeVarAllocator.evaluate_max

    def chosen(sizes: SizeVarAllocator, left: Any, right: Any) -> Any:
        for smaller, larger in ((left, right), (right, left)):
            if sizes.statically_known_leq(smaller, larger):
                return smaller if bound is Min else larger
        return original(sizes, left, right) if free_unbacked_symbols((left, right)) else bound(left, right)

    return chosen


def _wrapping(name: str) -> Any:
    """Return AOTInductor's operator of C++, with a cast: C++ computes small integers as int, where none wraps around.

    AOTInductor casts most results back by itself.
    """
    written = getattr(CppOverrides, name)
    return staticmethod(lambda first, *others: f"decltype({first})({written(first, *others)})")


def _vectorised(name: str) -> Any:
    """Return ATen's function of vectors, which eager calls: AOTInductor's own loses the digits of small numbers."""

    def written(x: Any) -> str:
        return f"{x}.{name}()"

    written.__name__ = name  # by which AOTInductor finds the same function of one number
    return staticmethod(written)


def _erf(x: Any) -> str:
    """Return the error function of a vector: ATen's own for floats is a polynomial off by 1e-7, 0 for small numbers.

    Eager calls a library's. Close to 0 a series keeps all digits.
    """
    if x.dtype == torch.float64:
        return f"{x}.erf()"
    vector = f"decltype({x})"
    terms = [2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(7)]
    series = f"{vector}({terms[-1]!r})"
    for term in reversed(terms[:-1]):
        series = f"({series} * {x} * {x} + {vector}({term!r}))"
    return f"{vector}::blendv({x}.erf(), {x} * {series}, {x}.abs() < {vector}(0.5))"


def _acosh(x: Any) -> str:
    """Return the inverse hyperbolic cosine of a vector: that of the library squares numbers, so that large ones give
    infinity."""
    vector = f"decltype({x})"
    return f"{vector}::blendv({x}.acosh(), {x}.log() + {vector}({math.log(2)!r}), {x} > {vector}(1e15))"


def _searchsorted(sequence: torch.Tensor, number: float, **options: Any) -> torch.Tensor:
    """Find a number among sorted ones: AOTInductor makes it a constant, and a float32 whatever the others are."""
    found: torch.Tensor = _aten.searchsorted.Tensor(sequence, _like(sequence, number), **options)[0]
    return found


def _bucketize(number: float, boundaries: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = _aten.bucketize.Tensor(_like(boundaries, number), boundaries, **options)[0]
    return found


def _like(others: torch.Tensor, number: float) -> torch.Tensor:
    """Return a number as a vector of the dtype in which eager compares it with others."""
    exact = torch.float64 if isinstance(number, float) else torch.int64
    return torch.full((1,), number, dtype=exact, device=others.device).to(torch.result_type(others, number))


def _in_one_step(lerp: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that interpolates as eager does: the decomposition would round to 16 bits in between."""

    def interpolated(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
        if start.dtype in _HALVES:
            return lerp(start.float(), end.float(), weight).to(start.dtype)
        return lerp(start, end, weight)

    return interpolated


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.searchsorted.Scalar: _searchsorted,
    _aten.bucketize.Scalar: _bucketize,
}


def _matching_whole(match: Callable[..., Any]) -> Callable[..., Any]:
    """Return a match of a pattern with calls of operators, without those that have an argument which it does not name.

    AOTInductor replaces such calls, too, and drops the argument: alpha of `torch.add(x @ w, y, alpha=2)`. Its patterns
    of attention do not name the dimension of the softmax either, and put one over the last dimension for all.
    """

    def matched(pattern: Any, node: Any, context: Any) -> Any:
        if isinstance(node, Node) and (dropped := node.kwargs.keys() - pattern.kwargs.keys() - _OF_MEMORY):
            return FailedMatch("arguments that the pattern does not name: {}", sorted(dropped))
        if isinstance(node, Node) and _reduces_elsewhere(pattern, node):
            return FailedMatch("reduces another dimension than the last one")
        return match(pattern, node, context)

    return matched


def _reduces_elsewhere(pattern: Any, node: Node) -> bool:
    """Return whether the node reduces other dimensions than the last one, and the pattern ignores which."""
    if node.target not in (_aten.amax.default, _aten.sum.dim_IntList) or min(len(node.args), len(pattern.args)) < 2:
        return False
    values: Any = node.args[0]
    dimensions: Any = node.args[1]
    is_last = dimensions in ([-1], [values.meta["val"].ndim - 1])
    return isinstance(pattern.args[1], Ignored) and not is_last


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """Compute what AOTInductor puts for attention that is written out, also with a mask of one dimension."""
    if attn_mask is not None and attn_mask.dim() == 1:  # which a sum broadcasts, and the operator refuses
        attn_mask = attn_mask.unsqueeze(0)
    return _aten.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def _replaceable(is_same: Callable[[Node, Node], bool]) -> Callable[[Node, Node], bool]:
    """Return whether AOTInductor may put a tensor for a copy of it: not if the call changes that tensor afterwards.

    It looks at outputs and inputs alone, and state is neither: `old = state.clone(); state.add_(1); return old`, and
    `previous.copy_(state); state.add_(1)`, would give the new state.
    """

    def replaceable(copy: Node, source: Node) -> bool:
        changes = copy.graph.find_nodes(op="call_function", target=_aten.copy_.default)
        changed = {get_node_storage(change.args[0]) for change in changes}
        is_view = get_node_storage(copy) == get_node_storage(source)
        return is_same(copy, source) and (is_view or get_node_storage(source) not in changed)

    return replaceable


def _in_place(operators: dict[Any, Any]) -> dict[Any, Any]:
    """Return AOTInductor's operators that may write into what they are given, where nobody misses their results.

    It lets them write into state that the call overwrites later, also where their result is read after that.
    """

    def checked(operator: Any) -> Any:
        return replace(operator, extra_check=lambda node: operator.extra_check(node) and not _outlives(node, operators))

    return {target: checked(operator) for target, operator in operators.items()}


def _outlives(node: Node, operators: dict[Any, Any]) -> bool:
    """Return whether the result is read after something else has been copied to where it would be written."""
    result, given, written = get_node_storage(node), node, set()
    while given.op == "call_function" and isinstance(given.args[0], Node):
        source = given.args[0]
        if given.target not in operators and get_node_storage(source) != get_node_storage(given):
            break
        written.add(get_node_storage(source))
        given = source
    order = {each: position for position, each in enumerate(node.graph.nodes)}
    changes = [
        order[change]
        for change in node.graph.find_nodes(op="call_function", target=_aten.copy_.default)
        if get_node_storage(change.args[0]) in written and get_node_storage(change.args[1]) != result
    ]
    reads = (order[user] for each in order if get_node_storage(each) == result for user in each.users)
    return bool(changes) and max(reads, default=0) > min(changes)


def _cpu_lowerings() -> dict[Any, _Lowering]:
    fallback: Any = lowering.fallback_handler
    return {
        # torch's kernel raises for a bad index; generated code would end the process
        _aten.index.Tensor: fallback(_aten.index.Tensor, add_to_fallback_set=False),
        _aten.mm.default: _row_inline(lowering.lowerings[_aten.mm.default], _product),
        _aten.addmm.default: _row_inline(
            lowering.lowerings[_aten.addmm.default],
            lambda bias, row, matrix: _lowered(_aten.add.Tensor, bias, _product(row, matrix)),
        ),
        **{operator: _filled(lowering.lowerings[operator]) for operator in _FILLING},
        **{operator: _rounding(lowering.lowerings[operator]) for operator in _ROUNDING},
        **{operator: _widened(lowering.lowerings[operator]) for operator in _EXTREMES},
    }


def _rounding(operator: _Lowering) -> _Lowering:
    """Return a lowering that has numbers in the dtype of the 16-bit tensors beside them, and rounds only its result."""

    def lowered(*args: Any, alpha: float = 1, **kwargs: Any) -> Any:
        tensors = {each.get_dtype() for each in args if hasattr(each, "get_dtype")}
        dtype = functools.reduce(torch.promote_types, tensors)
        if dtype in _HALVES:
            alpha, args = _rounded(alpha, dtype), tuple(_rounded(each, dtype) for each in args)
        if alpha == 1:
            return operator(*args, **kwargs)
        if dtype not in _HALVES:
            return operator(*args, alpha=alpha, **kwargs)
        wide = (lowering.to_dtype(each, torch.float32) if hasattr(each, "get_dtype") else each for each in args)
        return lowering.to_dtype(operator(*wide, alpha=alpha, **kwargs), dtype)

    return lowered


def _filled(operator: _Lowering) -> _Lowering:
    """Return a lowering of tensors of one number, which has their dtype."""

    def lowered(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        numbers = (_rounded(each, dtype) if dtype in _HALVES else each for each in args)
        return operator(*numbers, dtype=dtype, **kwargs)

    return lowered


def _rounded(number: Any, dtype: torch.dtype | None) -> Any:
    return torch.tensor(number, dtype=dtype).item() if isinstance(number, float) else number


def _widened(extreme: _Lowering) -> _Lowering:
    """Return a lowering that finds the extremes of bytes among 16-bit integers.

    In generated code, the lanes of a vector of bytes that have no value yet are 0, which is less than each positive
    byte (pytorch#191499).
    """

    def lowered(values: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = values.get_dtype()
        if dtype not in _BYTES:
            return extreme(values, *args, **kwargs)
        found = extreme(lowering.to_dtype(values, torch.int16), *args, **kwargs)
        return pytree.tree_map(
            lambda each: lowering.to_dtype(each, dtype) if each.get_dtype() == torch.int16 else each, found
        )

    return lowered


def _row_inline(library: _Lowering, inline: _Lowering) -> _Lowering:
    """Return a lowering that multiplies one row with a small matrix inline, and others with the library.

    A library call takes several times as long as such a product, and is not fused with what follows.
    """

    def lowered(*args: Any, **kwargs: Any) -> Any:
        return library(*args, **kwargs) if kwargs or not _is_small(*args[-2:]) else inline(*args)

    return lowered


def _is_small(row: Any, matrix: Any) -> bool:
    sizes = V.graph.sizevars
    (rows, _), (depth, width) = row.get_size(), matrix.get_size()
    return (
        row.get_dtype() == torch.float32
        and sizes.statically_known_equals(rows, 1)
        and sizes.statically_known_leq(depth * width, _MOST_INLINE)
    )


def _product(row: Any, matrix: Any) -> Any:
    """Multiply row [1, depth] with matrix [depth, width]."""
    for factor in (row, matrix):
        factor.realize()  # else each column recomputes it
    column, matrices = _lowered(_aten.unsqueeze.default, row, 2), _lowered(_aten.unsqueeze.default, matrix, 0)
    return _lowered(_aten.sum.dim_IntList, _lowered(_aten.mul.Tensor, column, matrices), [1])


def _lowered(operator: Any, *args: Any) -> Any:
    return lowering.lowerings[operator](*args)
