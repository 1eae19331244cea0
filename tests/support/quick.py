"""What exports do repeatedly with the same result is done once per test process, and servers look often."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
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


class _QuickLoop:
    """`asyncio` for uvicorn's server, which looks ten times a second whether it shall stop."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@contextmanager
def quick_servers() -> Iterator[None]:
    """Servers of this process stop soon after they are told to, and look at what is staged more often."""
    import uvicorn.server

    from weightswap_server.admin import plane

    with mock.patch.object(uvicorn.server, "asyncio", _QuickLoop()), mock.patch.object(plane, "_CHECK_INTERVAL", 0.05):
        yield
