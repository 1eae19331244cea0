"""Errors that torch has raised in the user's code: its frame, and the reason."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_WANTS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_TEXTS = ("numpy() is not supported for tensor subclasses", "Can't call metadata mutating ops on non-Fake Tensor")


class Unrecordable(Exception):
    """Error for an operation of loading code that a recording would lose."""


def wants_values(error: BaseException) -> bool:
    """Return whether an operation failed because it needs values of a fake tensor or cannot be recorded."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # its import takes half a second

    kinds = (*_WANTS_VALUES, GuardOnDataDependentSymNode, Unrecordable)
    return isinstance(error, kinds) or any(text in str(error) for text in _TEXTS)


def frame_of(error: BaseException) -> str:
    """Return `hook (model.py, line 12): `, the innermost frame outside torch and weightswap; empty without one."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<")]
    if not frames:
        return ""
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}): "


def first_line(error: BaseException) -> str:
    """Return the name of an error's class and the first line of its text."""
    return reason(error, lines=1)


def reason(error: BaseException, lines: int = 60) -> str:
    """Return the name of an error's class and at most `lines` lines of its text."""
    if isinstance(error, Unrecordable):
        return str(error)
    text = str(error).strip().splitlines()
    more = f"\n... and {len(text) - lines} lines more" if len(text) > lines > 1 else ""
    return f"{type(error).__name__}: " + "\n".join(text[:lines]) + more
