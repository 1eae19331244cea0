"""Engines: what executes a graph. Each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from weightswap_runtime.arena import HostArena
from weightswap_runtime.artifact import Artifact
from weightswap_runtime.errors import Unsupported

ENGINES = ("torch",)


class Bound(Protocol):
    """An engine bound to one arena, for good."""

    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs. No output shares memory with the arena, the state or the constants."""
        ...

    @property
    def has_state(self) -> bool: ...

    def reset_state(self) -> None:
        """Put the state back to its initial values, in place."""
        ...


class Engine(Protocol):
    """One artifact's graphs, ready to be bound. `dtypes` maps the engine's dtype objects to safetensors names."""

    @property
    def name(self) -> str: ...
    @property
    def tensor_type(self) -> type[Any]: ...
    @property
    def dtypes(self) -> Mapping[Any, str]: ...

    def misplaced(self, value: Any) -> str | None:
        """What is wrong with an input beside dtype and shape; None if nothing is."""
        ...

    def kind(self, value: Any) -> Hashable:
        """Everything about an input that its check looks at."""
        ...

    def bind(self, arena: HostArena) -> Bound: ...


def open_engine(name: str, artifact: Artifact, device: str) -> Engine:
    """Open the graphs of an artifact. Raises Unsupported for an engine or a device that does not exist here."""
    if name not in ENGINES:
        raise Unsupported(f"engine {name!r}: this version has {', '.join(ENGINES)}")
    if device != "cpu":
        raise Unsupported(f"device {device!r}: this version serves on 'cpu'")
    from .torch import TorchEngine

    return TorchEngine(artifact)
