"""Refusal of calls within torch.func's transformations and on dual tensors, which a graph would ignore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from weightswap_runtime.errors import InputMismatch

F = TypeVar("F", bound=Callable[..., Any])
_innermost_transformation = torch._C._functorch.peek_interpreter_stack
_NO_TRANSFORMATION = (
    "cannot be called within torch.func's transforms: instead of vmap, pass it the whole batch at once; for grad, vjp, "
    "jvp and the like, its outputs have no derivatives"
)
_NO_DUAL = "cannot be called on dual tensors, as its outputs have no tangents; pass it the primal part"

_eval_frame = torch._C._dynamo.eval_frame


def uncompiled(function: F) -> F:
    """Exclude a function and its callees from torch.compile. (`torch.compiler.disable` takes a second to import.)"""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    if hasattr(_eval_frame, "set_code_exec_strategy"):  # private to torch, and not in every version
        skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
        _eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def check_plain(method: str, inputs: Sequence[Any]) -> None:
    """Raise InputMismatch within torch.func's transformations and for dual tensors. Takes 0.1 us."""
    if _innermost_transformation() is not None:
        raise InputMismatch(method, [_NO_TRANSFORMATION])
    if forward_ad._current_level >= 0 and any(map(_is_dual, inputs)):
        raise InputMismatch(method, [_NO_DUAL])


def _is_dual(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
