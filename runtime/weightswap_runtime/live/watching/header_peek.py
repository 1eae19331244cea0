"""A look at the header of a watched file, without swapping it in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from weightswap_runtime.errors import StageCancelled
from weightswap_runtime.format.delta_file import delta_stamp
from weightswap_runtime.format.weight_set import open_weights

_Error = TypeVar("_Error", bound=BaseException)


class HeaderPeek(NamedTuple):
    """What a file's header says. `base` is what a delta starts from; `error` is why the header cannot be read."""

    weights_id: str | None = None
    base: str | None = None
    error: Exception | None = None


def peek(path: str | Path, check: Callable[[], None]) -> HeaderPeek:
    """Look at a file's header. `check` is called while an answer is waited for. Raises StageCancelled, from it."""
    try:
        with open_weights(path, check) as weights:
            if delta := delta_stamp(weights):
                return HeaderPeek(delta.weights_id, delta.base)
            return HeaderPeek(weights.stamp.weights_id if weights.stamp else None)
    except StageCancelled:
        raise
    except Exception as error:  # a swap will say it again
        without_traceback(error)
        return HeaderPeek(error=error)


def without_traceback(error: _Error) -> _Error:
    """The error; the frames that it and its causes have come through, which hold the model, are let go."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
