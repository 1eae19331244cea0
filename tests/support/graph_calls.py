"""Graph calls of the engine `torch` that a test holds."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest

from weightswap_runtime.engines.torch_calls import GraphCall


class HeldCalls(NamedTuple):
    """Calls that set `inside` when they begin, and continue when `go_on` is set."""

    inside: threading.Event
    go_on: threading.Event


def hold_calls(patch: pytest.MonkeyPatch) -> HeldCalls:
    held, original = HeldCalls(threading.Event(), threading.Event()), GraphCall.__call__

    def call(self: GraphCall, *args: Any) -> Any:
        held.inside.set()
        assert held.go_on.wait(120)
        return original(self, *args)

    patch.setattr(GraphCall, "__call__", call)
    return held
