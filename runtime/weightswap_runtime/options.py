"""Checks of numbers and texts that callers give."""

from __future__ import annotations

from math import inf
from numbers import Real
from sys import float_info
from threading import TIMEOUT_MAX
from typing import Any

from weightswap_runtime.errors import Unsupported

MOST_SAID = 4096  # characters of `by` and of `why`, which documents and answers repeat for each weights of a history


def check_said(by: Any, why: Any = "") -> None:
    """Raise Unsupported for texts that are too long."""
    for name, text in (("by", by), ("why", why)):
        if isinstance(text, str) and len(text) > MOST_SAID:
            raise Unsupported(f"{name}: has {len(text)} characters, and at most {MOST_SAID} are kept; say it in fewer")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold; a bool is none."""
    real = type(value) is not bool and isinstance(value, Real)
    return real and bool(abs(value) <= float_info.max)


def check_timeout(timeout: Any) -> None:
    """Raise Unsupported for what is no time to wait; with NaN, no deadline would ever be over."""
    if timeout is not None and not ((is_number(timeout) and timeout >= 0) or timeout == inf):
        raise Unsupported(f"timeout={timeout!r:.100}: expected seconds, 0 or more, or None for ever")


def join_seconds(timeout: float | None) -> float | None:
    """A timeout as threads take it, who know no infinity. Raises Unsupported."""
    check_timeout(timeout)
    return None if timeout is None else min(timeout, TIMEOUT_MAX)
