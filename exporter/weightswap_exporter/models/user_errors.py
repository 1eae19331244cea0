"""Finding the user's code in an error that torch has raised below it."""

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
    """Loading code does something that a recording of it would lose."""


def wants_values(error: BaseException) -> bool:
    """Whether an operation failed because it needs the values of a tensor that has none, or cannot be recorded."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # half a second's import

    kinds = (*_WANTS_VALUES, GuardOnDataDependentSymNode, Unrecordable)
    return isinstance(error, kinds) or any(text in str(error) for text in _TEXTS)


def frame_of(error: BaseException) -> str:
    """`hook (model.py, line 12): `, the innermost frame that is neither torch's nor ours; empty if there is none."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<")]
    if not frames:
        return ""
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}): "


def first_line(error: BaseException) -> str:
    """The first line of an error's text, after the name of its class."""
    return reason(error, lines=1)


def reason(error: BaseException, lines: int = 60) -> str:
    """An error's text, after the name of its class."""
    if isinstance(error, Unrecordable):
        return str(error)
    found = str(error).strip().splitlines()
    more = f"\n... and {len(found) - lines} lines more" if len(found) > lines > 1 else ""
    return f"{type(error).__name__}: " + "\n".join(found[:lines]) + more
