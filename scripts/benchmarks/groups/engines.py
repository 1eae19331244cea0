"""All engines: opening, calls, swaps and the first answer, each compared with its peer."""

from __future__ import annotations

from collections.abc import Iterator

from report import Row
from settings import Settings

from . import aoti, call, elsewhere, onnx
from . import open as opening


def rows(settings: Settings) -> Iterator[Row]:
    """Measure the engine `torch`, then `aoti`, then `onnx`, then new weights in other kinds of servers."""
    yield from opening.rows(settings)
    yield from call.encoder(settings)
    yield from aoti.rows(settings)
    yield from onnx.rows(settings)
    yield from elsewhere.rows(settings)
