"""What exports do again and again, once for each process of the tests, with the same outcome."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests.support import warm
from weightswap_exporter.engines import trial


class WarmInterpreter:
    """`sys` as a trial sees it: its program is forked from an interpreter that has imported torch."""

    path = sys.path

    @property
    def executable(self) -> str:
        return warm.python()


@contextmanager
def quick_exports() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(trial, "sys", WarmInterpreter()))
        translations = functools.cache(ONNXRegistry.from_torchlib)  # torch reads their sources for each graph
        stack.enter_context(mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(translations)))
        yield
