"""The weights of a node: the model in the memory that its replicas share, the revision page, and the replicas' slots.

Each process that has it keeps it alive. So replicas go on without an agent, and the next agent finds the memory in
them, by its name in /proc. Weights are staged here, from sources that another node may read; when they are committed,
`changes` says.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll
from threading import Lock
from typing import Any, Self

from weightswap_fleet.documents import DeploymentSpec
from weightswap_runtime.errors import ArtifactError, Unsupported, text_of
from weightswap_runtime.following.desired_state import SHOWN, DesiredWeights
from weightswap_runtime.following.file_queue import refused_weights
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.live.receipt import Event
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.model.model import Model
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import PARTS, Segment, memfd
from weightswap_server.signed_weights import requires

from .relay import Relay

_MOST_REFUSED = 20  # ids of refused weights that are remembered, with why
_REVISION_PAGE = "revision_page"
_REVISIONS = (0, 8)  # their offsets, in words of 8 bytes


def open_artifact(spec: DeploymentSpec) -> Artifact:
    """Open the artifact of a deployment.

    Raises ArtifactError, also for another graph, which may have come to its path: a node that starts later must not
    answer otherwise than those that are there.
    """
    artifact = Artifact.open(spec.artifact)
    if artifact.graph_id != spec.graph_id:
        raise ArtifactError(
            f"{spec.artifact}: has the graph {artifact.graph_id[:SHOWN]} now, but {spec.fleet} was deployed with "
            f"{spec.graph_id[:SHOWN]}. Put that artifact back, or deploy this one."
        )
    return artifact


class NodeWeights:
    """The model of a node, and the revision page of its revisions. One commit at a time."""

    def __init__(
        self, spec: DeploymentSpec, node: str, model: Model, revision_page: RevisionPage, relay: Relay | None = None
    ) -> None:
        self.node = node
        self.model = model
        self.revision_page = revision_page
        self._relay = relay
        self.refused: dict[str, str] = {}  # why weights were refused and not served since, by id, the latest last
        self.model.listen(self._note)
        self.deploy(spec)

    def deploy(self, spec: DeploymentSpec) -> None:
        """Verify later weights as a deployment says. The served ones stay."""
        keys = spec.require_signature
        self.model._store.admit = requires(*keys) if keys else None
        self.spec = spec

    def _note(self, event: Event) -> None:
        """Remember weights that are refused. The dict is replaced, as other threads read it."""
        if weights_id := refused_weights(event):
            self._refuse(weights_id, text_of(event.error) if event.error else "")
        elif event.receipt is not None:
            self.refused = self._others_refused(event.weights_id)

    def _refuse(self, weights_id: str, why: str) -> None:
        refused = self._others_refused(weights_id) | {weights_id: why}
        self.refused = dict(list(refused.items())[-_MOST_REFUSED:])

    def _others_refused(self, weights_id: str | None) -> dict[str, str]:
        return {each: why for each, why in self.refused.items() if each != weights_id}

    def stage(self, path: str | Path, weights: DesiredWeights, reader: str = "") -> Staged:
        """Start to stage. reader: the node that reads a URL for all. Raises what `Model.stage` raises."""
        onto = [(self._routed(base.source, reader), base.weights_id) for base in weights.bases or ()]
        return self.model.stage(self._routed(path, reader), onto=onto, background=True, **self._options(weights))

    def _options(self, weights: DesiredWeights) -> dict[str, Any]:
        """Return the options of `Model.stage`."""
        return {
            "expect": weights.weights_id,
            "allow_other_graph": weights.graph_id not in ("", self.model.artifact.manifest.packed_for),
            "verify": self.spec.verify,
            "allow_nonfinite": self.spec.allow_nonfinite,
            "by": weights.by,
        }

    def complete(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        """Do what is left to do once weights are staged here. Raises what refuses them."""

    def keeps(self, weights_id: str) -> bool:
        """Return whether a rollback would serve exactly these weights."""
        return self.model.previous_weights_id == weights_id

    def _routed(self, path: str | Path, reader: str) -> Any:
        if self._relay is not None and self.spec.relay and isinstance(path, str):
            return self._relay.route(path, reader)
        return path  # all that `open_source` takes

    def mark_next(self, revision: int) -> None:
        """Write the next revision before its commit, so that no replica answers with new weights and an older one.

        A client could then go back: to a node that still serves the older weights, at the revision that it has seen.
        """
        generation = self.model.generation
        self.revision_page.set_revision(0 if generation is None else generation + 1, revision)

    def mark(self, revision: int) -> None:
        """Raise the revision of the served weights."""
        generation = self.model.generation
        if generation is not None and self.revision_page.revision(generation) < revision:
            self.revision_page.set_revision(generation, revision)

    @property
    def revision(self) -> int:
        """The served revision; 0 before the first."""
        return self.revision_page.revision(self.model.generation)


class NodeMemory:
    """The file descriptors of a node's memory, until `close`. `from_process` takes those of `descriptors`."""

    def __init__(self, segment: Segment, revision_page: int) -> None:
        self.segment, self._revision_page = segment, revision_page
        self.revision_page = RevisionPage(revision_page)

    @classmethod
    def create(cls, weights: tuple[NamedTensor, ...], replicas: int, name: str) -> Self:
        """Create memory for two sets of weights and so many replicas. Raises OutOfMemory."""
        return cls(Segment.create(weights, replicas, name), memfd(mmap.PAGESIZE, f"{name}.{_REVISION_PAGE}"))

    @classmethod
    def adopt(cls, name: str) -> Self | None:
        """Open the memory of a name that another process has, or return None if no other has all of it."""
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and int(process.name) != os.getpid():
                with suppress(OSError):  # the process has ended, or belongs to another user
                    if descriptors := _descriptors(process, name):
                        return cls.from_process(int(process.name), descriptors)
        return None

    @classmethod
    def from_process(cls, pid: int | str, descriptors: tuple[int, ...], read_only: bool = False) -> Self:
        """Open another process's memory. read_only: its arenas cannot be written. Raises OSError if it has ended."""
        opened: list[int] = []
        try:
            for number, descriptor in enumerate(descriptors):
                is_arena = number in (1, 2)
                flags = os.O_RDONLY if read_only and is_arena else os.O_RDWR
                opened.append(os.open(f"/proc/{pid}/fd/{descriptor}", flags | os.O_CLOEXEC))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        control, first, second, revision_page = opened
        return cls(Segment(control, (first, second)), revision_page)

    @staticmethod
    def is_held_by(pid: int, name: str) -> bool:
        """Return True if a process has the memory of a name."""
        try:
            return _descriptors(Path(f"/proc/{pid}"), name) is not None
        except OSError:
            return False

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.segment.descriptors, self._revision_page)

    def close(self) -> None:
        """Close the file descriptors."""
        self.segment.close()
        os.close(self._revision_page)


def _descriptors(process: Path, name: str) -> tuple[int, ...] | None:
    indexes = {f"/memfd:{name}.{part} (deleted)": index for index, part in enumerate((*PARTS, _REVISION_PAGE))}
    descriptors: dict[int, int] = {}
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            if (index := indexes.get(str(descriptor.readlink()))) is not None:
                descriptors[index] = int(descriptor.name)
    return tuple(descriptors[index] for index in range(len(indexes))) if len(descriptors) == len(indexes) else None


class RevisionPage:
    """The desired store's revision of each arena. The agent writes it before a commit, and replicas read it.

    Of two arenas, one is served, and only the other is written. So a revision by the parity of its generation stays
    right as long as its weights are served.
    """

    def __init__(self, descriptor: int = -1) -> None:
        """descriptor: of shared memory; -1: this process alone has the revision page."""
        self._words = memoryview(mmap.mmap(descriptor, 0 if descriptor >= 0 else mmap.PAGESIZE)).cast("Q")

    def revision(self, generation: int | None) -> int:
        """Return the revision of a generation, or of the later one in its arena; 0 before the first."""
        return int(self._words[_REVISIONS[generation % 2]]) if generation is not None else 0

    def set_revision(self, generation: int, revision: int) -> None:
        self._words[_REVISIONS[generation % 2]] = revision


class Slots:
    """Slots of replicas, with pidfds that show their ends, whoever has a pid next. Thread-safe."""

    def __init__(self, control: Control, belongs: Callable[[int], bool]) -> None:
        """Takes over the slots of living replicas, and empties those of dead ones, whose pid may be in use again.

        belongs: returns True if a process has this memory.
        """
        self._control = control
        self._lock = Lock()
        self._taken: dict[int, tuple[int, int]] = {}  # slot -> process, pidfd
        for slot, pid in enumerate(control.processes):
            if pid and not (belongs(pid) and self._watch(slot, pid)):
                control.empty_slot(slot)

    def assign(self, pid: int) -> int:
        """Give a process a slot. Raises Unsupported if all are taken."""
        self.sweep()
        with self._lock:
            free = next((slot for slot in range(self._control.workers) if slot not in self._taken), None)
            if free is None:
                raise Unsupported(f"at most {self._control.workers} replicas on one node can share weights")
            if not self._watch(free, pid):
                raise Unsupported(f"no process {pid} here; a replica and its node's agent must see each other")
            return free

    def _watch(self, slot: int, pid: int) -> bool:
        try:
            self._taken[slot] = pid, os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        return True

    def sweep(self) -> None:
        """Empty the slots of replicas that have ended."""
        with self._lock:
            for slot, (_, descriptor) in list(self._taken.items()):
                if _has_ended(descriptor):
                    self._control.empty_slot(slot)
                    del self._taken[slot]
                    os.close(descriptor)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of replicas, in the order of their slots."""
        with self._lock:
            return tuple(pid for _, (pid, _) in sorted(self._taken.items()))

    def close(self) -> None:
        with self._lock:
            for _, descriptor in self._taken.values():
                os.close(descriptor)
            self._taken.clear()


def _has_ended(descriptor: int) -> bool:
    watched = poll()
    watched.register(descriptor, POLLIN)
    return bool(watched.poll(0))
