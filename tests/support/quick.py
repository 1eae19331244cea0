"""Caches for what exports do repeatedly with the same result, once per test process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from unittest import mock

from tests.support import warm
from weightswap_exporter.engines import engine_check


class WarmInterpreter:
    """`sys` for engine checks: its program is forked from an interpreter that has imported torch."""

    path = sys.path

    @property
    def executable(self) -> str:
        return warm.python()


@contextmanager
def quick_exports() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine_check, "sys", WarmInterpreter()))
        if find_spec("onnxscript"):  # machines with a GPU have few packages
            stack.enter_context(_translations_are_read_once())
        yield


def _translations_are_read_once() -> AbstractContextManager[object]:
    """Cache the translations, whose sources torch would read for each graph."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
