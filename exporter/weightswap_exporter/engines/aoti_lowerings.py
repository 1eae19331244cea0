"""AOTInductor lowerings for servers on a CPU, where its own would end the process or make slow library calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor import lowering
from torch._inductor.virtualized import V

_aten = torch.ops.aten
_MOST_INLINE = 2**17  # elements of a matrix; for a larger one the library's threads pay off
_Lowering = Callable[..., Any]


def cpu_lowerings() -> Mapping[Any, _Lowering]:
    """Return the lowerings that replace AOTInductor's, by operator."""
    fallback: Any = lowering.fallback_handler
    return {
        # torch's kernel raises for a bad index; generated code would end the process
        _aten.index.Tensor: fallback(_aten.index.Tensor, add_to_fallback_set=False),
        _aten.mm.default: _row_inline(lowering.lowerings[_aten.mm.default], _product),
        _aten.addmm.default: _row_inline(lowering.lowerings[_aten.addmm.default], _sum_and_product),
    }


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


def _sum_and_product(bias: Any, row: Any, matrix: Any) -> Any:
    return _lowered(_aten.add.Tensor, bias, _product(row, matrix))


def _lowered(operator: Any, *args: Any) -> Any:
    return lowering.lowerings[operator](*args)
