"""Engines bound to an arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightswap_runtime.engines.engine import Bound, Engine
from weightswap_runtime.errors import (
    MOST_LISTED,
    RESTART,
    DeviceError,
    OutOfMemory,
    Unsupported,
    WeightsMismatch,
    WeightswapError,
    is_of_device,
    lacks_memory,
    listed,
)
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Goldens
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.jobs import ClaimReference
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors import Blocks, describe

if TYPE_CHECKING:
    from weightswap_runtime.staging.transforms import Transforms


@dataclass(eq=False)
class Member:
    """An artifact whose graphs run on the weights. `id` identifies its engine in every session."""

    artifact: Artifact
    engine: Engine
    id: int
    goldens: Goldens | None
    _transforms: Transforms | None = None

    def open_transforms(self) -> Transforms:
        """Return the conversion's graph, opened on first use. Raises ArtifactError, and MissingExtra without torch."""
        if self._transforms is None:
            from weightswap_runtime.staging.transforms import Transforms  # needs torch

            self._transforms = Transforms(self.artifact)
        return self._transforms


class Session:
    """One arena, with one engine bound to it for each member: each artifact that shares the weights.

    `leases` belongs to the gate.
    """

    def __init__(self, arena: Arena, engines: Mapping[int, Engine]) -> None:
        self.arena = arena
        self.bound: dict[int, Bound] = {member: bind(engine, arena) for member, engine in engines.items()}
        self.leases: dict[int, ClaimReference] = {}
        self.content: Mapping[str, Blocks] | None = None  # the digests of the complete set in the arena, if it has one
        self._prepared: set[int] = set()

    @property
    def has_prologue(self) -> bool:
        """True if an engine computes results from the weights before they are served."""
        return any(bound.has_prologue for bound in list(self.bound.values()))

    def add(self, member: int, bound: Bound, prepared: bool) -> None:
        """Add an engine that was bound to the arena. `prepared`: whether its prologue has run on these weights."""
        if prepared:
            self._prepared.add(member)
        self.bound[member] = bound

    def run_prologues(self, where: str) -> None:
        """Compute what depends on the weights alone. They came from `where`, and are not served yet.

        Raises WeightsMismatch if that fails, and OutOfMemory.
        """
        self._prepared.clear()
        self.run_added_prologues(where)

    def copy_prologues_from(self, other: Session, where: str) -> None:
        """Copy the results of another session that has the same weights; compute the rest as `run_prologues` does."""
        self._prepared.clear()
        with self.arena.writing(join=True), self.arena.stream():
            for member, bound in list(self.bound.items()):
                theirs = other.bound.get(member)
                if theirs is not None and bound.copy_prologue_from(theirs):
                    self._prepared.add(member)
        self.run_added_prologues(where)

    def run_added_prologues(self, where: str) -> None:
        """Run the prologues of those engines that have not run theirs on the present weights."""
        if self.bound.keys() <= self._prepared:
            return  # without work on a device
        with self.arena.writing(join=True), self.arena.stream():
            for member, bound in list(self.bound.items()):
                if member not in self._prepared:
                    run_prologue(bound, where)
                    self._prepared.add(member)

    def keep_prologues(self) -> Callable[[], None]:
        """Copy the results of the prologues; return a function that restores them without allocating.

        Raises OutOfMemory.
        """
        what = "no memory to keep what was computed from the weights"
        with memory_errors(what), self.arena.writing(join=True), self.arena.stream():
            restores = [bound.keep() for bound in list(self.bound.values()) if bound.has_prologue]

        def restore_all() -> None:
            with self.arena.writing(join=True), self.arena.stream():
                for restore in restores:
                    restore()
            self._prepared.update(self.bound)

        return restore_all

    def synchronize(self, where: str) -> None:
        """Wait until the device has written the weights from `where` to the arena. Raises DeviceError."""
        try:
            self.arena.synchronize()
        except Exception as error:
            raise DeviceError(f"{where}: {type(error).__name__}: {error}. {RESTART}") from error


def check_same_weights(weights: tuple[NamedTensor, ...], artifact: Artifact) -> None:
    """Raise Unsupported unless an artifact has exactly these weights, in the same layout."""
    ours = {weight.name: replace(weight, requires_grad=False) for weight in weights}
    theirs = {weight.name: replace(weight, requires_grad=False) for weight in artifact.manifest.weights}
    odd = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if odd:
        differences = [f"expected {name}: {_text(ours.get(name))}, found {_text(theirs.get(name))}" for name in odd]
        raise Unsupported(
            f"{artifact.path}: cannot share weights with a model whose table of weights differs: {listed(odd)}",
            *differences[:MOST_LISTED],
            "share= needs weights with the same names, types, shapes, ties and order in memory: export one module for "
            "both, including parts that only one of them calls, or load this artifact without share=.",
        )


def _text(weight: NamedTensor | None) -> str:
    if weight is None:
        return "none"
    ties = f", tied to {listed(weight.aliases)}" if weight.aliases else ""
    return describe(weight) + ties + (f", in strides of {weight.stride}" if weight.stride else "")


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Convert errors within the block that report lack of memory to OutOfMemory."""
    try:
        yield
    except WeightswapError:
        raise  # it says so already
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"{what} ({error})") from error
        raise


def bind(engine: Engine, arena: Arena) -> Bound:
    """Bind an engine to an arena; later calls wait for the work that this starts on a device. Raises OutOfMemory."""
    with memory_errors("no memory for an engine's state"), arena.writing(join=True), arena.stream():
        return engine.bind(arena)


def run_prologue(bound: Bound, where: str) -> None:
    """Let an engine compute what depends on the weights from `where` alone.

    Raises WeightsMismatch, OutOfMemory, and torch's errors of a device.
    """
    try:
        with memory_errors(f"{where}: no memory for what is computed from weights alone"):
            bound.run_prologue()
    except Exception as error:
        if isinstance(error, OutOfMemory) or is_of_device(error):
            raise
        raise WeightsMismatch(
            where,
            [f"what the graphs compute from weights alone cannot be computed: {type(error).__name__}: {error}"],
            "Every call would raise this. Load with prologue=False to serve these weights anyway.",
        ) from error
