"""The interface of engines: an Engine has opened an artifact's graphs, a Bound runs them on the weights of one arena.

Graphs are opened once. A swap brings weights into an arena, and a Bound has kept its addresses all along.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from weightswap_runtime.format.goldens import Environment
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors import TensorBytes

AUTO = "auto"
CudaGraphs = Literal["auto"] | Sequence[Mapping[str, int] | Sequence[int]]


class EngineOptions(NamedTuple):
    """Options of an engine."""

    threads: int | None = None  # for each call; None: the engine's default
    prologue: bool = True  # compute what depends on weights alone once for each set of weights, not in each call
    on_host: bool = False  # an engine on a device can also be bound to host memory, for trials
    cuda_graphs: CudaGraphs | None = None  # the calls that are recorded and replayed
    group: str | None = None  # for an artifact of several ranks: their process group, by its name in torch


class State(Protocol):
    """One copy of an artifact's state, for one engine. Only one call at a time may use it."""

    def reset(self) -> None:
        """Restore the initial values."""
        ...

    def content(self, name: str) -> TensorBytes:
        """Return the content of the tensor of one row of the manifest; it may share the state's memory."""
        ...


class Chosen(Protocol):
    """The tensors of the variants that a call uses, for one engine. They are read-only."""


class Bound(Protocol):
    """An engine bound to one arena, permanently; by default without a prologue."""

    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        """Run a method on flat inputs. Return flat outputs, which share no memory with arena, state or constants.

        state: read and changed by the call; None: a copy of the initial state, dropped afterwards. chosen: the
        variants that the call reads; None: zeros.
        """
        ...

    @property
    def has_prologue(self) -> bool:
        """True if `run_prologue` computes anything."""
        return False

    def run_prologue(self) -> None:
        """Compute what depends on weights and constants alone, before new weights serve. Raises operators' errors."""
        return

    def copy_prologue_from(self, other: Bound) -> bool:
        """Copy the results of `run_prologue` from an engine bound to the same weights in another arena.

        Allocates no memory. Returns False, with nothing done, if that is not possible.
        """
        return True

    def keep(self) -> Callable[[], None]:
        """Copy the results of `run_prologue`. Return a function that restores them without allocating memory."""
        return lambda: None


class Engine(Protocol):
    """One artifact's graphs, ready to be bound."""

    @property
    def name(self) -> str: ...
    @property
    def runs(self) -> Mapping[str, str]:
        """The engine of each method: this one, or `torch` if the artifact has no file of this engine for the method."""
        ...

    @property
    def tensor_type(self) -> type[Any]: ...
    @property
    def dtypes(self) -> Mapping[Any, str]:
        """The safetensors names of the engine's dtype objects."""
        ...

    def misplaced(self, value: Any) -> str | None:
        """Describe what is wrong with an input other than its dtype and shape. Return None if nothing is."""
        ...

    def kind(self, value: Any) -> Hashable:
        """Return a key with everything that the check of an input depends on."""
        ...

    def tensor(self, content: TensorBytes) -> Any:
        """Create a tensor from its content, in memory from the engine's allocator: kernels depend on alignment.

        Raises Unsupported for a dtype that the engine lacks.
        """
        ...

    def content(self, value: Any) -> TensorBytes:
        """Return the content of one of the engine's tensors; it may share the tensor's memory.

        Raises Unsupported for a dtype without a safetensors name.
        """
        ...

    def environment(self) -> Environment | None:
        """Return what decides the last bits of an output; None if outputs need not equal eager bit for bit."""
        ...

    def default_torch_modes(self) -> AbstractContextManager[object]:
        """Return a context in which modes that the calling thread has enabled do not change the engine's results."""
        ...

    def bind(self, arena: Arena) -> Bound: ...

    def variant(self, rows: Iterable[NamedTensor], arena: Arena) -> Chosen:
        """Return the tensors of a variant, which are in an arena of their own."""
        ...

    def joined(self, chosen: Iterable[Any]) -> Chosen:
        """Return the tensors of variants of several groups together. The groups have no name in common."""
        ...

    def new_state(self, saved: Mapping[str, TensorBytes] | None = None) -> State:
        """Create a copy of the state with the initial or with saved values, which fit the manifest's rows."""
        ...
