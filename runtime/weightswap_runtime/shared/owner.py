"""The owner: the one process that may change the weights in a segment of shared memory, which its workers serve.

It may be killed at any time. Then workers serve on, and the next owner continues with what the segment holds. So what
it must know, such as digests and the history, is in the segment before a word there speaks of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from weightswap_runtime.engines.choosing import open_engine
from weightswap_runtime.engines.engine import EngineOptions
from weightswap_runtime.errors import ArtifactError, OutOfMemory, WaitTimeout, listed, plural
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.live.gate import Gate, Version
from weightswap_runtime.live.receipt import Event
from weightswap_runtime.live.residency import Double
from weightswap_runtime.live.session import Session
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.memory.device_arena import available
from weightswap_runtime.memory.device_memory import FOR_TWO, HOST, HostMemory
from weightswap_runtime.model.model import Model
from weightswap_runtime.staging.request import Admit
from weightswap_runtime.tensors import block_count

from .control import Control, Description, control_size, describe, read_description, read_history, write_history

PARTS = ("control", "0", "1")  # of a segment
OPTIONS = EngineOptions(prologue=False)  # its results would be private to each process, and become stale
_ADVICE = FOR_TWO.partition(",")[0] + ": the workers of the machine hold two sets between them."
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a process that truncates the file would kill all its readers
_POLL = 0.002  # seconds between two looks at the slots of workers


def own(
    artifact: str | os.PathLike[str] | Artifact,
    segment: Segment,
    admit: Admit | None = None,
    max_hash_trees: int | None = None,
) -> Model:
    """Return a model whose commits change the weights that all workers of a segment serve.

    Weights that the segment already holds stay served, with their generation, history and id, so an owner that was
    killed can be replaced. There must be one owner at a time, with the segment that `Segment.create` returned. The
    engine is "torch", on the CPU. admit, max_hash_trees: as in `load`; workers have no hash trees.

    Raises ArtifactError, also for another graph than that of the earlier owner, Unsupported and MissingExtra.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    control = Control(segment.control)
    check_graph(control, opened)
    engine = open_engine("torch", opened, HOST, OPTIONS)
    gate = OwnerGate(control)
    memory = KeptMemory(segment, control)
    store = WeightStore(opened.manifest.weights, "double", None, memory, gate, max_hash_trees)
    store.admit = admit
    _adopt(store, gate, control)
    control.graph_id = opened.graph_id
    model = Model(opened, store, device=HOST, engine=engine)

    def write(event: Event) -> None:
        if event.receipt is not None:
            write_history(control, store.history)

    model.listen(write)
    return model


def check_graph(control: Control, artifact: Artifact) -> None:
    """Raise ArtifactError for another graph than that which all processes of a segment serve, from its first owner on.

    A process that is replaced opens the artifact anew, and another one may have come to its path.
    """
    if control.graph_id not in ("", artifact.graph_id):
        raise ArtifactError(
            f"{artifact.path}: has the graph {artifact.graph_id[:12]} now, but the processes that share these weights "
            f"serve {control.graph_id[:12]}. Put that artifact back, or restart the server to serve this one."
        )


def _adopt(store: WeightStore, gate: OwnerGate, control: Control) -> None:
    """Continue with the served weights and the previous ones of an earlier owner."""
    control.fence()  # an earlier owner may have been killed between its word and its fence
    store.history.extend(read_history(control))
    generation = control.generation
    if generation is None or (now := read_description(control, generation, Description)) is None:
        return
    store.inherited = True
    before = read_description(control, generation - 1, Description)
    assert isinstance(store._residency, Double)
    gate.adopt(store._residency.adopt(generation, now.identity, before.identity if before else None))


def begin_trial(control: Control, staged: Staged, terms: bytes = b"") -> int:
    """Let workers call staged weights; return the word of the trial, by which they find it.

    The trial ends with `Control.end_trial`, with a commit, and before the next staging. terms: bytes for the workers.
    Raises StageClosed if the weights were committed or discarded, and WeightFileError if their labels are too long.
    """
    with staged._closing:  # excludes a commit, and a staging that would overwrite the weights
        return announce(control, staged._opened().identity, terms)


def announce(control: Control, identity: Identity, terms: bytes = b"") -> int:
    """Begin a trial of the complete set of weights in the idle arena; return its word."""
    generation = control.word  # the generation of the next commit
    control.end_trial()
    describe(control, generation, identity, terms)
    control.begin_trial(generation % 2)
    return control.trial


class OwnerGate(Gate):
    """The gate of the owner's own calls, which also waits for those of workers, and commits in all workers."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control
        control.end_trial()  # the staging of an earlier owner has ended with it

    def wait_idle(self, session: Session, timeout: float | None, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the leases of this process and of workers. Raises WaitTimeout with the workers' process ids."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        super().wait_idle(session, timeout, check)
        self._wait_for_workers(deadline, check)

    def _wait_for_workers(self, deadline: float, check: Callable[[], None]) -> None:
        self._control.end_trial()  # its weights are in the idle arena; no worker begins another call of them
        while holders := self._control.holders(self._idle_parity):
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"the weights that would be overwritten were still held by {plural(len(holders), 'worker')} "
                    f"(process {listed([str(each) for each in holders])}) when the timeout expired. "
                    "Give a longer timeout, or kill a worker that no longer responds: it will be replaced."
                )
            time.sleep(_POLL)
            check()
            self._check_open()

    @property
    def _idle_parity(self) -> int:
        generation = self._control.generation
        return 0 if generation is None else (generation + 1) % 2

    def adopt(self, version: Version) -> None:
        """Serve in this process the version that workers serve already."""
        super().exchange(version)

    def exchange(self, version: Version) -> float:
        """Serve a version in all workers. Calls that begin after this use it."""
        self._control.end_trial()
        describe(self._control, version.generation, version.identity)  # first: whoever sees the word reads it
        seconds = super().exchange(version)
        self._control.commit(version.generation)
        return seconds


class KeptMemory(HostMemory):
    """The arenas of a segment, in their order."""

    def __init__(self, segment: Segment, control: Control) -> None:
        self._left = list(zip(segment.arenas, control.descriptions, strict=True))

    def arena(self, layout: ArenaLayout) -> _KeptArena:
        descriptor, description = self._left.pop(0)
        return _KeptArena(layout, descriptor, description.clear)


class _KeptArena(HostArena):
    """An arena in shared memory. Before it is overwritten, it is allocated, and its description is withdrawn."""

    def __init__(self, layout: ArenaLayout, descriptor: int, withdraw: Callable[[], None]) -> None:
        super().__init__(layout, mmap.mmap(descriptor, 0))
        self._descriptor = os.dup(descriptor)
        self._withdraw = withdraw

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @contextmanager
    def writing(self, urgent: bool = False, join: bool = False) -> Iterator[None]:
        """Prepare the arena for writing within the block. Raises OutOfMemory."""
        if not join:  # with `join`, only engines' own memory is written, while calls run
            _allocate(self._descriptor)
            self._withdraw()
        yield


class Segment(NamedTuple):
    """File descriptors of shared memory. A process that gets them, by inheritance or over a socket, shares it."""

    control: int
    arenas: tuple[int, int]  # by the parity of their generations

    @classmethod
    def create(cls, weights: tuple[NamedTensor, ...], workers: int, name: str = "weightswap") -> Segment:
        """Create room for two sets of weights, and slots for the workers. Memory is allocated as it is written.

        weights: those of a manifest. name: the name of the descriptors in /proc, followed by one of PARTS. `close`
        closes the descriptors. Raises OutOfMemory.
        """
        nbytes = max(ArenaLayout(weights).nbytes, 1)
        description_size = sum(64 + len(weight.name) + 48 * block_count(weight.nbytes) for weight in weights)
        control, first, second = (f"{name}.{part}" for part in PARTS)
        page = memfd(control_size(workers, description_size), control)
        Control(page, workers)
        return cls(page, (memfd(nbytes, first), memfd(nbytes, second)))

    def read_only(self) -> Segment:
        """Return the same memory with read-only descriptors of the arenas. The control page stays writable."""
        return Segment(os.dup(self.control), (_reopened(self.arenas[0]), _reopened(self.arenas[1])))

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return (self.control, *self.arenas)

    def close(self) -> None:
        """Close the descriptors; the memory is freed with the last process that maps it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def memfd(nbytes: int, name: str) -> int:
    """Create shared memory of whole pages, whose size is sealed; return its descriptor. Raises OutOfMemory."""
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, pages)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise OutOfMemory(f"cannot allocate {pages} bytes of shared memory ({error})") from error
    return descriptor


def _allocate(descriptor: int) -> None:
    """Allocate all memory of a memfd now: a later lack of memory would make the system kill a process.

    Raises OutOfMemory.
    """
    status = os.fstat(descriptor)
    needed = status.st_size - status.st_blocks * 512
    if needed <= 0:
        return
    if (free := available()) is not None and needed > free:
        raise OutOfMemory(f"a set of weights needs {needed} bytes of shared memory, but {free} are free. {_ADVICE}")
    try:
        os.posix_fallocate(descriptor, 0, status.st_size)
    except OSError as error:
        raise OutOfMemory(f"cannot allocate {needed} bytes of shared memory ({error}). {_ADVICE}") from error


def _reopened(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_read_only(descriptor: int) -> ctypes.Array[ctypes.c_char]:
    """Map a descriptor read-only, as a buffer that claims to be writable for torch; a write kills the process."""
    mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    memory = (ctypes.c_char * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # keeps the mapping alive as long as a view of it
    return memory
