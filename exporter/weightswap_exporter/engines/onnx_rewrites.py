"""Rewrites of operators that torch translates to ONNX that computes otherwise than eager code, or ends the process."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from weightswap_exporter.capture.programs import arguments
from weightswap_exporter.engines.divisions import (
    exact_floor,
    exact_remainder,
    is_floor_of_fractions,
    is_remainder_of_fractions,
    replace,
)
from weightswap_exporter.engines.index_bounds import indices_of
from weightswap_exporter.engines.onnx_pools import exact_pool, is_dynamic_pool

# places in the arguments of operators: attention's mask; a norm's running mean, and whether it is in training mode
_MASK = 3
_RUNNING, _TRAINING = 3, 5
_TOO_LARGE = (1 << 31) - 1  # index, of any integer type that operators take
_ROUNDED = {"aten::div", "aten::div_", "aten::fmod", "aten::fmod_"}
# operators that order int64, for which ONNX Runtime takes half of the bits of a difference
_BOUNDS = {"minimum", "maximum", "min.other", "max.other", "clamp", "clamp_min", "clamp_max", "clip"}
_EXTREMES = {"amin", "amax", "min.default", "max.default", "min.dim", "max.dim"}
_CLAMPS = {
    getattr(torch.ops.aten, f"{name}{end}").default for name in ("clamp", "clip", "hardtanh") for end in ("", "_")
}
_MODE, _SUM, _MEAN = 4, 0, 1  # of bags: the place of the mode in their arguments, and its values
_OFFSETS = {"aten::upsample_nearest": 0.0, "aten::_upsample_nearest_exact": 0.5}  # of elements' centres


def adapt(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite a node that torch translates to something that computes otherwise, or ends the process."""
    for has_means, divide in ((_is_mean_bag, _sum_and_divide), (_scatters_means, _scatter_sums_and_divide)):
        if has_means(node):
            divide(graph, node)
    if node.target is torch.ops.aten.view.default:
        # decomposed attention may have other strides than views were captured for; ONNX has none
        node.target = torch.ops.aten.reshape.default
    elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
        _plain_attention(graph, node)
    elif node.target is operator.floordiv:
        _exact_division(graph, node)
    else:
        for applies, rewrite in (
            (_is_training_norm, _decompose_norm),
            (_has_indices, _refuse_indices),
            (_rounds_integers, _exact_integers),
            (is_remainder_of_fractions, exact_remainder),
            (_is_remainder_by_size, _with_size_as_tensor),
            (is_floor_of_fractions, exact_floor),
            (_is_nearest_to_size, _exact_nearest),
            (is_dynamic_pool, exact_pool),
            (_orders_integers, _exact_order),
            (_is_angle, _exact_angle),
            (_has_mixed_bounds, _with_bounds_of_fractions),
        ):
            if applies(node):
                rewrite(graph, node)
                break


def _plain_attention(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Decompose attention if it has a mask or not four dimensions.

    torch's translation takes four dimensions only, and gives NaN for a row that is wholly masked; eager gives zeros.
    """
    mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    if node.meta["val"].ndim == 4 and mask is None:
        return
    if isinstance(mask, torch.fx.Node) and mask.meta["val"].dtype is torch.bool:
        node.replace_input_with(mask, _additive_mask(graph, node, mask))
    with graph.inserting_after(node):
        first = graph.call_function(operator.getitem, (node, 0))
    first.meta = dict(node.meta)
    node.target = torch.ops.aten._scaled_dot_product_attention_math.default
    node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def _additive_mask(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node) -> torch.fx.Node:
    """Convert a boolean mask to numbers that are added to the scores."""
    aten = torch.ops.aten
    with graph.inserting_before(node):
        hidden = graph.call_function(aten.logical_not.default, (mask,))
        zeros = graph.call_function(aten.zeros_like.default, (mask,), {"dtype": node.meta["val"].dtype})
        return graph.call_function(aten.masked_fill.Scalar, (zeros, hidden, -math.inf))


def _has_indices(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.one_hot.default or _position_of_indices(node) is not None


def _position_of_indices(node: torch.fx.Node) -> int | None:
    found = indices_of(node)
    if node.target is torch.ops.aten.take_along_dim.default and [value for _, value in arguments(node)][2] is None:
        return 1  # along a dimension, eager takes any indices
    return found[2] if found else None


def _refuse_indices(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Make negative indices, which ONNX counts from the end, too large, which is refused as in eager.

    So are all indices of bags whose offsets eager refuses.
    """
    position = _position_of_indices(node) or 0  # of one_hot
    aten, indices = torch.ops.aten, node.args[position]
    with graph.inserting_before(node):
        wrong = graph.call_function(aten.lt.Scalar, (indices, 0))
        if "embedding_bag" in str(node.target):
            wrong = graph.call_function(aten.logical_or.default, (wrong, _wrong_offsets(graph, node)))
        checked = graph.call_function(aten.masked_fill.Scalar, (indices, wrong, _TOO_LARGE))
        if node.target is aten.one_hot.default:  # ONNX's gives zeros for what is no class
            classes = graph.call_function(aten.arange.default, (node.args[1],))
            checked = graph.call_function(aten.index.Tensor, (classes, [checked]))
    node.update_arg(position, checked)


def _wrong_offsets(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Return whether an embedding bag's offsets begin with another number than 0, or lead beyond the indices."""
    aten, call, (indices, offsets) = torch.ops.aten, graph.call_function, node.args[1:3]
    first, last = (call(aten.slice.Tensor, (offsets, 0, *ends)) for ends in ((0, 1), (-1, _TOO_LARGE)))
    size = call(aten.sym_size.int, (indices, 0))
    return call(aten.logical_or.default, (call(aten.ne.Scalar, (first, 0)), call(aten.gt.Scalar, (last, size))))


def _is_mean_bag(node: torch.fx.Node) -> bool:
    """Return whether the node is the means of bags without padding, whose translation ends ONNX Runtime's process."""
    if getattr(node.target, "_opname", "") != "embedding_bag":
        return False
    given = {argument.name: value for argument, value in arguments(node)}
    return given["mode"] == _MEAN and given.get("padding_idx") is None


def _sum_and_divide(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    aten, call, (indices, begins) = torch.ops.aten, graph.call_function, node.args[1:3]
    has_last = {argument.name: value for argument, value in arguments(node)}["include_last_offset"]
    node.update_arg(_MODE, _SUM)
    (bags,) = (user for user in node.users if user.args[1] == 0)
    with graph.inserting_after(bags):
        means = call(aten.div.Tensor, (bags, 1))
    with graph.inserting_before(means):
        ends = call(aten.slice.Tensor, (begins, 0, 1, _TOO_LARGE))
        if has_last:
            begins = call(aten.slice.Tensor, (begins, 0, 0, -1))
        else:
            last = call(aten.full_like.default, (begins, call(aten.sym_size.int, (indices, 0))))
            ends = call(aten.cat.default, ([ends, call(aten.slice.Tensor, (last, 0, 0, 1))],))
        sizes = call(aten.clamp.default, (call(aten.sub.Tensor, (ends, begins)), 1))
        divisor = call(aten.to.dtype, (call(aten.unsqueeze.default, (sizes, 1)), bags.meta["val"].dtype))
    means.meta = dict(bags.meta)
    bags.replace_all_uses_with(means, delete_user_cb=lambda user: user is not means)
    means.args = (bags, divisor)


def _scatters_means(node: torch.fx.Node) -> bool:
    """Return whether the node is `scatter_reduce` with means, for which torch's translation takes the last elements."""
    if node.target not in (torch.ops.aten.scatter_reduce.two, torch.ops.aten.scatter_reduce_.two):
        return False
    return any(argument.name == "reduce" and value == "mean" for argument, value in arguments(node))


def _scatter_sums_and_divide(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Let the node scatter sums, and divide them by sums of ones, which are the numbers of elements."""
    aten, call = torch.ops.aten, graph.call_function
    given = {argument.name: value for argument, value in arguments(node)}
    values, dim, indices, source = (given[name] for name in ("self", "dim", "index", "src"))
    node.args = (values, dim, indices, source, "sum")
    node.kwargs = {} if given["include_self"] is None else {"include_self": given["include_self"]}
    assert isinstance(node.target, torch._ops.OpOverload)
    in_place, is_float = node.target._schema.is_mutable, node.meta["val"].dtype.is_floating_point
    divide = aten.div if is_float else aten.floor_divide
    changing = aten.div_ if is_float else aten.floor_divide_
    with graph.inserting_before(node):
        ones = tuple(call(aten.ones_like.default, (each,)) for each in (values, source))
        counts = call(aten.scatter_reduce.two, (ones[0], dim, indices, ones[1], "sum"), dict(node.kwargs))
    with graph.inserting_after(node):
        means = call(changing.Tensor if in_place else divide.Tensor if is_float else divide.default, (node, counts))
    means.meta = dict(node.meta)
    node.replace_all_uses_with(means, delete_user_cb=lambda user: user is not means)


def _is_training_norm(node: torch.fx.Node) -> bool:
    """Return whether the node is a norm in training mode, which torch mistranslates or strips of its statistics."""
    aten = torch.ops.aten
    if node.target is aten.instance_norm.default and node.args[_RUNNING] is None:
        return False
    return node.target in (aten.batch_norm.default, aten.instance_norm.default) and bool(node.args[_TRAINING])


def _decompose_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Decompose a norm by the statistics of the batch or of each instance, and update the running statistics."""
    aten = torch.ops.aten
    source, weight, bias, running_mean, running_var, _, momentum, eps, _ = node.args
    assert isinstance(source, torch.fx.Node)
    value = source.meta["val"]
    dtype = torch.promote_types(value.dtype, torch.float32)  # the dtype in which eager sums
    reduced = [*([0] if node.target is aten.batch_norm.default else []), *range(2, value.ndim)]
    column = [-1, *[1] * (value.ndim - 2)]

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return graph.call_function(target, args, kwargs)

    with graph.inserting_before(node):
        x = call(aten.to.dtype, source, dtype)
        mean = call(aten.mean.dim, x, reduced, True)
        centred = call(aten.sub.Tensor, x, mean)
        var = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), reduced, True)
        result = call(aten.mul.Tensor, centred, call(aten.rsqrt.default, call(aten.add.Tensor, var, eps)))
        for operation, affine in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if affine is not None:
                result = call(operation, result, call(aten.reshape.default, affine, column))
        result = call(aten.to.dtype, result, value.dtype)
        unbiased = call(aten.var.correction, x, reduced, correction=1, keepdim=True)
        for running, statistic in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                new = call(aten.reshape.default, call(aten.mean.dim, statistic, [0]), [-1])
                step = call(aten.mul.Tensor, call(aten.sub.Tensor, new, running), momentum)
                call(aten.copy_.default, running, call(aten.add.Tensor, running, step))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _exact_division(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Subtract the remainder before a floor division, as ONNX does not round negative quotients down."""
    dividend, divisor = node.args
    with graph.inserting_before(node):
        remainder = graph.call_function(operator.mod, (dividend, divisor))
        node.args = (graph.call_function(operator.sub, (dividend, remainder)), divisor)


def _rounds_integers(node: torch.fx.Node) -> bool:
    """Return whether the node rounds a quotient of integers or is their `fmod`, which torch translates with floats."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _ROUNDED:
        return False
    rounds = "fmod" in node.target._schema.name or node.kwargs.get("rounding_mode")
    dtype = node.meta["val"].dtype
    return bool(rounds) and dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex


def _exact_integers(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite the node with floor division and remainder, whose translations compute with integers.

    The rewrite uses int64, as ONNX Runtime lacks some of these operators for narrower integers.
    """
    aten = torch.ops.aten
    with graph.inserting_before(node):
        dividend, divisor = (_int64(graph, value) for value in node.args[:2])
        result = _rounded(graph, dividend, divisor, node.kwargs.get("rounding_mode"))
        result = graph.call_function(aten.to.dtype, (result, node.meta["val"].dtype))
    replace(graph, node, result)


def _rounded(graph: torch.fx.Graph, dividend: torch.fx.Node, divisor: torch.fx.Node, mode: object) -> torch.fx.Node:
    aten = torch.ops.aten
    if mode == "floor":
        return graph.call_function(aten.floor_divide.default, (dividend, divisor))
    remainder = graph.call_function(aten.remainder.Tensor, (dividend, divisor))
    negative = tuple(graph.call_function(aten.lt.Scalar, (value, 0)) for value in (dividend, divisor))
    signs_differ = graph.call_function(aten.logical_xor.default, negative)
    inexact = graph.call_function(aten.ne.Scalar, (remainder, 0))
    away = graph.call_function(aten.logical_and.default, (signs_differ, inexact))  # rounding down is away from zero
    if mode == "trunc":
        floor = graph.call_function(aten.floor_divide.default, (dividend, divisor))
        return graph.call_function(aten.add.Tensor, (floor, _int64(graph, away)))
    fmod = graph.call_function(aten.sub.Tensor, (remainder, divisor))
    return graph.call_function(aten.where.self, (away, fmod, remainder))


def _is_remainder_by_size(node: torch.fx.Node) -> bool:
    """Return whether the node is the remainder of integers by a size, of which torch's translation makes a constant."""
    aten = torch.ops.aten
    return node.target in (aten.remainder.Scalar, aten.remainder_.Scalar) and isinstance(node.args[1], torch.fx.Node)


def _with_size_as_tensor(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    aten, (dividend, size) = torch.ops.aten, node.args
    with graph.inserting_before(node):
        divisor = graph.call_function(aten.scalar_tensor.default, (size,), {"dtype": node.meta["val"].dtype})
    node.target = aten.remainder.Tensor if node.target is aten.remainder.Scalar else aten.remainder_.Tensor
    node.args = (dividend, divisor)


def _offset(node: torch.fx.Node) -> float | None:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._overloadname != "vec":
        return None
    return _OFFSETS.get(node.target._schema.name[: -len("2d")])


def _is_nearest_to_size(node: torch.fx.Node) -> bool:
    """Return whether the node resizes to a given size, for which ONNX Runtime divides by a rounded ratio."""
    return _offset(node) is not None and node.args[1] is not None


def _exact_nearest(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite the node with the elements that eager selects: their places are products with a float32 ratio."""
    aten, call, offset = torch.ops.aten, graph.call_function, _offset(node)
    result, sizes = node.args[:2]
    assert isinstance(result, torch.fx.Node)
    assert isinstance(sizes, list | tuple)
    with graph.inserting_before(node):
        for dim, size in enumerate(sizes, 2):
            old, new = (
                call(aten.scalar_tensor.default, (value,), {"dtype": torch.float32})
                for value in (call(aten.sym_size.int, (node.args[0], dim)), size)
            )
            places = call(aten.add.Scalar, (call(aten.arange.default, (size,), {"dtype": torch.float32}), offset))
            chosen = call(aten.floor.default, (call(aten.mul.Tensor, (places, call(aten.div.Tensor, (old, new)))),))
            within = call(aten.minimum.default, (chosen, call(aten.sub.Scalar, (old, 1.0))))
            result = call(aten.index_select.default, (result, dim, call(aten.to.dtype, (within, torch.int64))))
    replace(graph, node, result)


def _orders_integers(node: torch.fx.Node) -> bool:
    """Return whether the node orders int64 by an operator that ONNX Runtime gets wrong if they are far apart."""
    if not isinstance(node.target, torch._ops.OpOverload) or _order(node) not in {"sign", *_BOUNDS, *_EXTREMES}:
        return False
    result = node.meta["val"][0] if isinstance(node.meta["val"], tuple) else node.meta["val"]
    (first, *_) = node.all_input_nodes
    return result.dtype is torch.int64 and bool(first.meta["val"].ndim or _order(node) not in _EXTREMES)


def _order(node: torch.fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
    return f"{name}.{node.target._overloadname}" if name in ("min", "max") else name


def _exact_order(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite the node with comparisons and with places of the least and the greatest, which are right."""
    aten, call, name = torch.ops.aten, graph.call_function, _order(node)
    given = {argument.name: value for argument, value in arguments(node)}
    if name in ("min.dim", "max.dim"):
        for user in [user for user in node.users if user.args[1] == 0]:  # the other one has the places
            with graph.inserting_before(user):
                result = _extreme(graph, given["self"], given["dim"], name, keep=bool(given["keepdim"]))
            result.meta = dict(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        return
    with graph.inserting_before(node):
        result = given["self"]
        if name in _EXTREMES:
            dims = range(result.meta["val"].ndim)
            for dim in sorted({dim % len(dims) for dim in given.get("dim") or dims}, reverse=True):
                result = _extreme(graph, result, dim, name, keep=bool(given.get("keepdim")))
        elif name == "sign":
            above, below = (call(compare, (result, 0)) for compare in (aten.gt.Scalar, aten.lt.Scalar))
            result = call(aten.sub.Tensor, (_int64(graph, above), _int64(graph, below)))
        else:
            is_least = name in ("maximum", "max.other")  # that the result may be
            least = given.get("min") if "other" not in given else given["other"] if is_least else None
            most = given.get("max") if "other" not in given else None if is_least else given["other"]
            result = _int64(graph, result)
            for bound, compare in ((least, aten.lt.Tensor), (most, aten.gt.Tensor)):
                if bound is not None:
                    limit = _int64(graph, bound)
                    result = call(aten.where.self, (call(compare, (result, limit)), limit, result))
    replace(graph, node, result)


def _extreme(graph: torch.fx.Graph, values: torch.fx.Node, dim: int, name: str, *, keep: bool) -> torch.fx.Node:
    """Return the least or the greatest values along a dimension."""
    aten = torch.ops.aten
    place = aten.argmin.default if "min" in name else aten.argmax.default
    found = graph.call_function(aten.gather.default, (values, dim, graph.call_function(place, (values, dim, True))))
    return found if keep else graph.call_function(aten.squeeze.dim, (found, dim))


def _is_angle(node: torch.fx.Node) -> bool:
    """Return whether the node is `atan2`, whose translation loses NaN, and has other quadrants at 0 and infinity."""
    return node.target in (torch.ops.aten.atan2.default, torch.ops.aten.atan2_.default)


def _exact_angle(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    aten, dtype = torch.ops.aten, node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)  # in which eager computes it

    def call(target: Any, *args: Any) -> torch.fx.Node:
        return graph.call_function(target, args)

    def is_negative(value: torch.fx.Node) -> torch.fx.Node:  # also -0.0, whose reciprocal is negative infinity
        below = call(aten.lt.Scalar, call(aten.reciprocal.default, value), 0)
        return call(aten.logical_or.default, call(aten.lt.Scalar, value, 0), below)

    with graph.inserting_before(node):
        y, x = (call(aten.to.dtype, value, wide) for value in node.args)
        height, width = (call(aten.abs.default, value) for value in (y, x))
        steep = call(aten.atan.default, call(aten.div.Tensor, height, width))
        eighth = call(aten.atan.default, call(aten.ones_like.default, steep))  # of a turn, in all digits of the dtype
        both_infinite = call(aten.eq.Scalar, call(aten.minimum.default, height, width), math.inf)
        both_zero = call(aten.eq.Scalar, call(aten.maximum.default, height, width), 0)
        acute = call(aten.where.self, both_infinite, eighth, call(aten.where.self, both_zero, height, steep))
        obtuse = call(aten.sub.Tensor, call(aten.mul.Scalar, eighth, 4), acute)
        angle = call(aten.where.self, is_negative(x), obtuse, acute)
        result = call(aten.where.self, is_negative(y), call(aten.neg.default, angle), angle)
        result = call(aten.to.dtype, result, dtype)
    replace(graph, node, result)


def _has_mixed_bounds(node: torch.fx.Node) -> bool:
    """Return whether the node is `clamp` with an integer and a fraction, which torch.onnx refuses."""
    return node.target in _CLAMPS and {type(bound) for bound in node.args[1:]} == {int, float}


def _with_bounds_of_fractions(_: torch.fx.Graph, node: torch.fx.Node) -> None:
    values, *bounds = node.args
    node.args = (values, *map(float, bounds))  # type: ignore[arg-type]


def _int64(graph: torch.fx.Graph, value: Any) -> torch.fx.Node:
    """Return a tensor or number of a graph as an int64 tensor."""
    if isinstance(value, torch.fx.Node) and not isinstance(value.meta.get("val"), int | torch.SymInt):
        return graph.call_function(torch.ops.aten.to.dtype, (value, torch.int64))
    return graph.call_function(torch.ops.aten.scalar_tensor.default, (value,), {"dtype": torch.int64})
