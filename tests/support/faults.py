"""Faults: the k-th call of an operation fails, for every k that a clean run reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

Act = Callable[..., Any]


class Fault(NamedTuple):
    """`owner.name` is what fails; `act` does so: it gets the original and the call's arguments.

    lasts: all later calls fail, too.
    """

    owner: Any
    name: str
    act: Act
    lasts: bool = False


def raises(error: BaseException) -> Act:
    """Fail with an error like this one instead of doing the work."""

    def act(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise type(error)(*error.args)  # a new one: it holds the frames that it comes through

    return act


def after(act: Callable[[], None]) -> Act:
    """Do the work, then something else."""

    def act_after(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act()
        return result

    return act_after


class Calls:
    """Counts the calls of an operation, from any thread; the one with number `at` goes wrong."""

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
        """The same as a function, which becomes a method where it is an attribute of a class."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call


@contextmanager
def failing(fault: Fault, at: int | None) -> Iterator[Calls]:
    """The call with number `at` goes wrong; None: only count."""
    calls = Calls(fault, at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.owner, fault.name, calls.method(), raising=False)
        yield calls


def each_call(fault: Fault, clean: Callable[[], object], most: int) -> Sequence[int]:
    """The numbers of the calls that a clean run makes; of more than `most` an even choice with both ends."""
    with failing(fault, None) as calls:
        clean()
    if calls.count <= most:
        return range(calls.count)
    return sorted({round(place * (calls.count - 1) / (most - 1)) for place in range(most)})
