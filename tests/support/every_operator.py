"""torch's own list of operators, captured, and run under other default dtypes.

A program of its own: the import of the list changes settings of the process. Run it with the number of a share and of
shares; it prints how many calls ran, and the operators whose results changed.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tests.support.graphs import Whole
from weightswap_exporter.capture.programs import fix_dtypes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
OVERLAPPING = {"expand_as"}  # its samples are written to by the comparison
GRADIENTS = {"native_dropout_backward"}


def calls(info: Any) -> Iterator[tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Yield functions of tensors alone, from samples of integers and of floating numbers."""
    for dtype in (torch.int64, torch.float32):
        if not info.supports_dtype(dtype, "cpu"):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", dtype), 2):
            flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

            def call(*tensors: torch.Tensor, flat: Any = flat, spec: Any = spec) -> Any:
                rest = iter(tensors)
                values = [next(rest) if isinstance(value, torch.Tensor) else value for value in flat]
                first, args, kwargs = pytree.tree_unflatten(values, spec)
                return info.op(first, *args, **kwargs)

            yield call, [value for value in flat if isinstance(value, torch.Tensor)]


def bits(module: Any, tensors: list[torch.Tensor]) -> Any:
    torch.manual_seed(0)
    results = pytree.tree_leaves(module(*[tensor.clone() for tensor in tensors]))
    return [_bits(value) if isinstance(value, torch.Tensor) else value for value in results]


def _bits(value: torch.Tensor) -> Any:
    dense = (value if value.layout is torch.strided else value.to_dense()).resolve_conj().resolve_neg().contiguous()
    flat = torch.view_as_real(dense) if dense.is_complex() else dense
    return value.dtype, value.shape, flat.reshape(-1).view(torch.uint8).tolist()


def main(share: int, shares: int) -> None:
    changed, ran = set[str](), 0
    for info in op_db[share::shares]:
        if info.name in UNINITIALISED | OVERLAPPING | GRADIENTS:
            continue
        for call, tensors in calls(info):
            try:
                program = torch.export.export(Whole(call), tuple(tensors), strict=False)
                before = bits(program.module(check_guards=False), tensors)
            except Exception:  # torch's own limits
                continue
            ran += 1
            if not is_fixed(program, tensors, before):
                changed.add(info.name)
    print(json.dumps([ran, sorted(changed)]))


def is_fixed(program: ExportedProgram, tensors: list[torch.Tensor], before: Any) -> bool:
    fix_dtypes(program)
    fixed = program.module(check_guards=False)
    results = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            results.append(bits(fixed, tensors))
        except Exception as error:
            results.append(error)
        finally:
            torch.set_default_dtype(torch.float32)
    return results == [before] * 3


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
