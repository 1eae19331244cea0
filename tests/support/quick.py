"""What exports do again and again, once for each process of the tests, with the same outcome."""

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
    """`sys` as an engine check sees it: its program is forked from an interpreter that has imported torch."""

    path = sys.path

    @property
    def executable(self) -> str:
        return warm.python()


@contextmanager
def quick_exports() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine_check, "sys", WarmInterpreter()))
        if find_spec("onnxscript"):  # a machine with a GPU has a few packages alone
            stack.enter_context(_translations_are_read_once())
        yield


def _translations_are_read_once() -> AbstractContextManager[object]:
    """torch reads their sources for each graph."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
