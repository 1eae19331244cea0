"""Peeks at the headers of watched files, without swapping them in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from weightswap_runtime.errors import StageCancelled
from weightswap_runtime.format.delta_file import delta_stamp
from weightswap_runtime.format.weight_set import open_weights

_MOST_HEADER = 16 << 20  # bytes; a swap, which knows the model, reads what is needed of larger ones
_Error = TypeVar("_Error", bound=BaseException)


class HeaderPeek(NamedTuple):
    """The content of a file's header. `base`: the base weights of a delta. `error`: why the header cannot be read."""

    weights_id: str | None = None
    base: str | None = None
    error: Exception | None = None


def peek(path: str | Path, check: Callable[[], None]) -> HeaderPeek:
    """Read a file's header. `check` is called during the wait for a response, and may raise StageCancelled."""
    try:
        with open_weights(path, check, _MOST_HEADER) as weights:
            if delta := delta_stamp(weights):
                return HeaderPeek(delta.weights_id, delta.base)
            return HeaderPeek(weights.stamp.weights_id if weights.stamp else None)
    except StageCancelled:
        raise
    except Exception as error:  # a swap will raise it again
        without_traceback(error)
        return HeaderPeek(error=error)


def without_traceback(error: _Error) -> _Error:
    """Return the error without the tracebacks of it and its causes, whose frames keep the model alive."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
