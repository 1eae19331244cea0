"""The interface of engines: an artifact's graphs, ready to be bound to arenas; and once they are bound."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from weightswap_runtime.format.goldens import Environment
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors.content import TensorBytes

AUTO = "auto"
CudaGraphs = Literal["auto"] | Sequence[Mapping[str, int] | Sequence[int]]


class EngineOptions(NamedTuple):
    """How an engine is opened. on_host: on a device, weights in host memory can be bound, too, for trials."""

    threads: int | None = None
    prologue: bool = True
    on_host: bool = False
    cuda_graphs: CudaGraphs | None = None


class State(Protocol):
    """One copy of what an artifact's graphs remember from call to call, for one engine. One call at a time uses it."""

    def reset(self) -> None:
        """Put the initial values back."""
        ...

    def content(self, name: str) -> TensorBytes:
        """What is in the tensor of one row of the manifest; the memory may be the state's own."""
        ...


class Chosen(Protocol):
    """The tensors of the variants that one call has chosen, for one engine. Nothing writes to them."""


class Bound(Protocol):
    """An engine bound to one arena, for good."""

    def run(
        self, method: str, inputs: list[Any], state: State | None = None, chosen: Chosen | None = None
    ) -> list[Any]:
        """Flat inputs to flat outputs. No output shares memory with the arena, the state or the constants.

        state: what the call reads and changes; None: a copy of the initial state, which is dropped. chosen: the
        variants that it reads; None: zeros.
        """
        ...

    @property
    def has_prologue(self) -> bool:
        """Whether `run_prologue` does anything."""
        ...

    def run_prologue(self) -> None:
        """Called when new weights are in the arena, before it serves anybody. May raise what operators raise."""
        ...

    def copy_prologue_from(self, other: Bound) -> bool:
        """Copy what `run_prologue` has computed in an engine that is bound to the same weights in another arena.

        Needs no memory. False, with nothing done, where that is not possible.
        """
        ...

    def keep(self) -> Callable[[], None]:
        """Copy what `run_prologue` has computed. The function that is returned puts it back, and needs no memory."""
        ...


class Engine(Protocol):
    """One artifact's graphs, ready to be bound. `dtypes` maps the engine's dtype objects to safetensors names."""

    @property
    def name(self) -> str: ...
    @property
    def runs(self) -> Mapping[str, str]:
        """The engine that runs each method: this one, or `torch` where the artifact has no file of this one for it."""
        ...

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

    def tensor(self, content: TensorBytes) -> Any:
        """A tensor of the engine's, in memory that is allocated as its own are: kernels look at alignments.

        Raises Unsupported for a dtype that the engine lacks.
        """
        ...

    def content(self, value: Any) -> TensorBytes:
        """What is in a tensor of the engine's, whose memory it may share.

        Raises Unsupported for a dtype without a safetensors name.
        """
        ...

    def environment(self) -> Environment | None:
        """What decides the last bits of an output here; None where no output is expected to equal eager bit for bit."""
        ...

    def default_torch_modes(self) -> AbstractContextManager[object]:
        """A block without what the calling thread has switched on, where that changes what the engine computes."""
        ...

    def bind(self, arena: Arena) -> Bound: ...

    def variant(self, rows: Iterable[NamedTensor], arena: Arena) -> Chosen:
        """The tensors of a variant, which lie in an arena of its own."""
        ...

    def joined(self, chosen: Iterable[Any]) -> Chosen:
        """The tensors of variants of several groups, which have no name in common."""
        ...

    def new_state(self, saved: Mapping[str, TensorBytes] | None = None) -> State:
        """A copy of the state, with the initial values or with saved ones, which are as the manifest's rows say."""
        ...
