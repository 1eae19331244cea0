"""A session: engines bound once to one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from weightswap_runtime.engines.engine import Bound, Engine
from weightswap_runtime.errors import RESTART, DeviceError, OutOfMemory, WeightsMismatch, is_of_device, lacks_memory
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors.digests import Blocks
from weightswap_runtime.threads.claims import ClaimReference


class Session:
    """One arena and the engines that are bound to it, by member: one for each artifact that shares the weights.

    `leases` belongs to the gate.
    """

    def __init__(self, arena: Arena, engines: Mapping[int, Engine]) -> None:
        self.arena = arena
        self.bound: dict[int, Bound] = {member: bind(engine, arena) for member, engine in engines.items()}
        self.leases: dict[int, ClaimReference] = {}
        self.content: Mapping[str, Blocks] | None = None  # the digests of what lies whole in the arena
        self._prepared: set[int] = set()

    @property
    def has_prologue(self) -> bool:
        """Whether anything is computed from weights before they serve."""
        return any(bound.has_prologue for bound in list(self.bound.values()))

    def add(self, member: int, bound: Bound, prepared: bool) -> None:
        """Take in an engine that was bound to the arena. `prepared`: whether it has computed what depends on it."""
        if prepared:
            self._prepared.add(member)
        self.bound[member] = bound

    def run_prologues(self, where: str) -> None:
        """Compute what depends on the weights alone. They came from `where`, and serve nobody yet.

        Raises WeightsMismatch where that cannot be computed, and OutOfMemory.
        """
        self._prepared.clear()
        self.run_added_prologues(where)

    def copy_prologues_from(self, other: Session, where: str) -> None:
        """As `run_prologues`, where another session has the same weights, and has computed already."""
        self._prepared.clear()
        with self.arena.writing(join=True), self.arena.stream():
            for member, bound in list(self.bound.items()):
                theirs = other.bound.get(member)
                if theirs is not None and bound.copy_prologue_from(theirs):
                    self._prepared.add(member)
        self.run_added_prologues(where)

    def run_added_prologues(self, where: str) -> None:
        """As `run_prologues`, where that was not done since the weights came."""
        if self.bound.keys() <= self._prepared:
            return  # a device is asked for nothing
        with self.arena.writing(join=True), self.arena.stream():
            for member, bound in list(self.bound.items()):
                if member not in self._prepared:
                    run_prologue(bound, where)
                    self._prepared.add(member)

    def keep_prologues(self) -> Callable[[], None]:
        """Copy what was computed from weights; the function that is returned puts it back, and needs no memory.

        Raises OutOfMemory.
        """
        lack = "no memory to keep what was computed from the weights"
        with naming_lack_of_memory(lack), self.arena.writing(join=True), self.arena.stream():
            kept = [bound.keep() for bound in list(self.bound.values()) if bound.has_prologue]

        def put_back() -> None:
            with self.arena.writing(join=True), self.arena.stream():
                for put in kept:
                    put()
            self._prepared.update(self.bound)

        return put_back

    def synchronize(self, where: str) -> None:
        """Wait until what came from `where` is in the arena. Raises DeviceError."""
        try:
            self.arena.synchronize()
        except Exception as error:
            raise DeviceError(f"{where}: {type(error).__name__}: {error}. {RESTART}") from error


@contextmanager
def naming_lack_of_memory(what: str) -> Iterator[None]:
    """A block whose errors for want of memory are OutOfMemory."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"{what} ({error})") from error
        raise


def bind(engine: Engine, arena: Arena) -> Bound:
    """Bind an engine to an arena; calls wait for what that has asked a device for. Raises OutOfMemory."""
    with naming_lack_of_memory("no memory for an engine's state"), arena.writing(join=True), arena.stream():
        return engine.bind(arena)


def run_prologue(bound: Bound, where: str) -> None:
    """Let an engine compute what depends on weights from `where`.

    Raises WeightsMismatch and OutOfMemory, and what torch raises for a device.
    """
    try:
        with naming_lack_of_memory(f"{where}: no memory for what is computed from weights alone"):
            bound.run_prologue()
    except Exception as error:
        if isinstance(error, OutOfMemory) or is_of_device(error):
            raise
        raise WeightsMismatch(
            where,
            [f"what the graphs compute from weights alone cannot be computed: {type(error).__name__}: {error}"],
            "Every call would raise this. Load with prologue=False to serve these weights all the same.",
        ) from error
