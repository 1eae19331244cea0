"""Storms: threads that call again and again while something changes, and which answers they may get."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tests.support.accelerators import moved
from weightswap_runtime import Model, SwapReceipt

T = TypeVar("T")
PATIENCE = 60.0  # seconds that a thread's last piece of work may take


@contextmanager
def storm(
    work: Callable[[int], T | None], threads: int, begin: Callable[[int], object] = lambda number: None
) -> Iterator[list[list[T]]]:
    """Let threads do a piece of work again and again while the block runs.

    work: called with the number of the thread; begin: the same, once before. Yields what each thread's work has
    returned but None, in order, complete at the end. There, the first error of any thread is raised; one that does not
    end is an error, too.
    """
    ended, failures = Event(), list[BaseException]()
    seen: list[list[T]] = [[] for _ in range(threads)]

    def run(number: int) -> None:
        try:
            begin(number)
            while not ended.is_set():
                if (found := work(number)) is not None:
                    seen[number].append(found)
        except BaseException as error:
            failures.append(error)

    running = [Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in running:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in running), "stuck"
    for failure in failures:
        raise failure


class Seen(NamedTuple):
    """What an answer was made with, and the model's generations before and after the call."""

    served: Any
    first: int | None
    last: int | None


class Ledger:
    """What each generation of a model serves, as the test knows it, from the present one on."""

    def __init__(self, model: Model, served: Hashable) -> None:
        assert model.generation is not None
        self._model, self._first, self._sets = model, model.generation, [served]

    def committed(self, receipt: SwapReceipt, served: Hashable) -> None:
        """Note a commit, in the order of commits."""
        assert receipt.generation == self._first + len(self._sets)
        self._sets.append(served)

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def now(self) -> Any:
        return self._sets[-1]

    def watch(self, call: Callable[[], Any], answers: Mapping[bytes, Hashable]) -> Seen:
        """Call, and look up what the answer was made with; `answers` has the `content` of each that may be."""
        first = self._model.generation
        output = call()
        return Seen(found_in(answers, output), first, self._model.generation)

    def check(self, seen: Iterable[Sequence[Seen]]) -> None:
        """Check that each answer is of a generation served during its call, and that no thread goes back in time."""
        for thread in seen:
            assert thread, "a thread without answers"
            reached = self._first
            for served, first, last in thread:
                assert first is not None
                assert last is not None
                span = range(max(first, reached), last + 1)
                fitting = [number for number in span if self._sets[number - self._first] == served]
                assert fitting, f"{served} in the generations {span.start} to {last}"
                reached = fitting[0]


def found_in(answers: Mapping[bytes, T], output: Any) -> T:
    """Return which of the answers an output is. Raises AssertionError if it is none."""
    found = answers.get(content(output))
    assert found is not None, "an output of no set of weights"
    return found


def content(output: Any) -> bytes:
    """Return the bytes of the tensors or arrays of an output: what the answers of several sets of weights differ in."""
    leaves = pytree.tree_leaves(output)
    return b"".join(
        np.asarray(moved(leaf, "cpu").detach() if isinstance(leaf, torch.Tensor) else leaf).tobytes() for leaf in leaves
    )
