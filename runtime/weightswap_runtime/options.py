"""Checks of numbers and texts that callers pass."""

from __future__ import annotations

from math import inf
from numbers import Real
from sys import float_info
from threading import TIMEOUT_MAX
from typing import Any

from weightswap_runtime.errors import Unsupported

MAX_TEXT = 4096  # characters of `by` and of `why`, which documents and responses repeat for each entry of a history


def check_said(by: Any, why: Any = "") -> None:
    """Raise Unsupported if `by` or `why` is too long."""
    for name, text in (("by", by), ("why", why)):
        if isinstance(text, str) and len(text) > MAX_TEXT:
            raise Unsupported(f"{name}: has {len(text)} characters, but at most {MAX_TEXT} are allowed; shorten it")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold; a bool is not a number."""
    is_real = type(value) is not bool and isinstance(value, Real)
    return is_real and bool(abs(value) <= float_info.max)


def check_timeout(timeout: Any) -> None:
    """Raise Unsupported for an invalid timeout. NaN is one: its deadline would never pass."""
    if timeout is not None and not ((is_number(timeout) and timeout >= 0) or timeout == inf):
        raise Unsupported(f"timeout={timeout!r:.100}: expected seconds, 0 or more, or None for no limit")


def join_seconds(timeout: float | None) -> float | None:
    """Return a timeout that `threading` accepts: it takes no infinity. Raises Unsupported."""
    check_timeout(timeout)
    return None if timeout is None else min(timeout, TIMEOUT_MAX)
