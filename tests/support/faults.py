"""Fault injection: the k-th call of an operation fails, for every k that a clean run reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

Act = Callable[..., Any]


class Fault(NamedTuple):
    """Fault of the operation `owner.name`. `act` gets the original function and the call's arguments.

    lasts: all later calls fail, too.
    """

    owner: Any
    name: str
    act: Act
    lasts: bool = False


def raises(error: BaseException) -> Act:
    """Return an action that raises an error like this one instead of calling the original."""

    def act(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise type(error)(*error.args)  # a new error each time: an error refers to the frames that it passes

    return act


def after(act: Callable[[], None]) -> Act:
    """Return an action that calls the original, then something else."""

    def act_after(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act()
        return result

    return act_after


class Calls:
    """Counter of an operation's calls from any thread; call number `at` fails."""

    def __init__(self, fault: Fault, at: int | None) -> None:
        self._fault = fault
        self._original = getattr(fault.owner, fault.name, None) or __builtins__[fault.name]  # type: ignore[index]
        self._at = at
        self._lock = threading.Lock()
        self.count = 0
        self.happened = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            mine = self.count
            self.count += 1
            hit = self._at is not None and (mine == self._at or (self._fault.lasts and mine > self._at))
            self.happened = self.happened or hit
        if hit:
            return self._fault.act(self._original, *args, **kwargs)
        return self._original(*args, **kwargs)

    def method(self) -> Any:
        """Return a function that calls this, which becomes a method if it is an attribute of a class."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call


@contextmanager
def failing(fault: Fault, at: int | None) -> Iterator[Calls]:
    """Let call number `at` fail; None only counts."""
    calls = Calls(fault, at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.owner, fault.name, calls.method(), raising=False)
        yield calls


def each_call(fault: Fault, clean: Callable[[], object], most: int) -> Sequence[int]:
    """Return the numbers of the calls that a clean run makes; at most `most`, evenly spaced with both ends."""
    with failing(fault, None) as calls:
        clean()
    if calls.count <= most:
        return range(calls.count)
    return sorted({round(place * (calls.count - 1) / (most - 1)) for place in range(most)})
