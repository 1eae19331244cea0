"""The server's side: load an artifact, call it, put new weights behind it."""

from __future__ import annotations

import os
import weakref
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from .adapter import Keys
from .arena import ArenaLayout
from .artifact import Artifact
from .engines import open_engine
from .errors import StagingBusy
from .gate import Claim, ClaimReference, Gate
from .pinned import Pinned
from .residency import Committed, open_residency
from .session import Caller, Methods, Session
from .staged import LEASE_TIMEOUT, Staged, SwapReceipt
from .staging import Contents, fill, plan
from .workers import Workers

if TYPE_CHECKING:
    from .transforms import Transforms

Path = str | os.PathLike[str]


def load(
    artifact: Path | Artifact,
    weights: Path | None = None,
    *,
    keys: Keys | None = None,
    device: str = "cpu",
    engine: Literal["torch"] = "torch",
    residency: Literal["double", "single"] = "double",
    keep_previous: Literal["host"] | None = None,
) -> Model:
    """Open an artifact and, if `weights` names a file or a checkpoint, put it behind the graph as generation 0.

    residency="double" holds two sets of weights: commits and rollbacks take constant time, and a staging takes the
    place of the previous weights. "single" holds one: a commit copies in place while calls are held, staging needs a
    second set's memory only meanwhile, and nothing is kept for a rollback. keep_previous="host" keeps one set more: a
    rollback is then possible in single residency, and in double residency also after a staging that was refused.
    `weights` and `keys` are those of `Model.stage`.

    Raises ArtifactError, Unsupported, MissingExtra, OutOfMemory, and whatever `Model.swap` raises.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    model = Model(opened, device=device, engine=engine, residency=residency, keep_previous=keep_previous)
    if weights is not None:
        model.swap(weights, keys=keys)
    return model


class Model(Caller):
    """A graph with replaceable weights. Every method may be called from any thread. Made by `load()`."""

    def __init__(
        self, artifact: Artifact, *, device: str, engine: str, residency: str, keep_previous: str | None
    ) -> None:
        self.artifact = artifact
        self.device = device
        self._manifest = artifact.manifest
        self._workers = Workers()
        self._transforms: Transforms | None = None
        self._gate: Gate[Session] = Gate()
        opened = open_engine(engine, artifact, device)
        self.engine = opened.name
        super().__init__(Methods(self._manifest, opened))
        layout = ArenaLayout(self._manifest.weights)
        self._residency = open_residency(residency, keep_previous, opened, layout, self._gate, self._workers)
        self._staging: ClaimReference | None = None
        self._opening = Lock()
        self._swapping = Lock()

    @property
    def graph_id(self) -> str:
        return self._manifest.graph_id

    @property
    def weights_id(self) -> str | None:
        """The id of the weights that new calls get; None before the first swap."""
        return self._gate.current.weights_id if self._gate.current else None

    @property
    def generation(self) -> int | None:
        """0 for the first weights, one more for each commit; None before the first swap."""
        return self._gate.current.generation if self._gate.current else None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the weights that new calls get."""
        return dict(self._gate.current.labels) if self._gate.current else {}

    @property
    def residency(self) -> str:
        return self._residency.name

    @property
    def failed(self) -> bool:
        """Whether an in-place commit broke off, so that calls are refused until a swap or rollback succeeds."""
        return self._gate.failure is not None

    def stage(
        self,
        path: Path,
        *,
        keys: Keys | None = None,
        allow_other_graph: bool = False,
        timeout: float | None = LEASE_TIMEOUT,
    ) -> Staged:
        """Read and verify a weight file or a checkpoint beside the weights that serve. Nothing that serves is touched.

        path: a .safetensors file, a .safetensors.index.json with its shards, or a Hugging Face directory. Names are
        runtime FQNs or the checkpoint's keys; weights that the adapter computes need torch. keys: "checkpoint" or "fqn"
        says which they are where a file that weightswap has not written would fit both ways, with different results.
        A file packed for another graph is refused, unless its tensors fit and `allow_other_graph` is set. In double
        residency the previous weights give way; `timeout` seconds are waited for calls and pins that still use them.

        Raises WeightFileError, WeightsMismatch, GraphMismatch, DigestMismatch, OutOfMemory, StagingBusy, LeaseTimeout,
        and ArtifactError or MissingExtra where the adapter's graph cannot be opened.
        """
        ticket = Claim()
        try:
            self._open_staging(ticket)
            with plan(path, self._manifest, allow_other_graph=allow_other_graph, keys=keys) as opened:
                session = self._residency.target(timeout)
                self._residency.overwriting(session)
                contents = fill(opened, self._manifest, session.arena, self._workers, self._open_transforms)
            session.bound.reset_state()
            return Staged(self._methods, self._gate, session, contents, self._commit, ticket)
        except BaseException:
            ticket.end()
            raise

    def swap(
        self,
        path: Path,
        *,
        keys: Keys | None = None,
        allow_other_graph: bool = False,
        timeout: float | None = LEASE_TIMEOUT,
    ) -> SwapReceipt:
        """Replace every weight: stage, verify, commit; `path` and `keys` as in `stage`. Several threads' swaps queue.

        Whatever is raised before the commit leaves weights, addresses and outputs as they were. State starts again
        from its initial values, as in a model loaded with these weights.

        Raises what `stage` raises, and ModelFailed if an in-place commit breaks off.
        """
        with (
            self._swapping,
            self.stage(path, keys=keys, allow_other_graph=allow_other_graph, timeout=timeout) as staged,
        ):
            return staged.commit(timeout=timeout)

    def rollback(self, *, timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve the previous weights again; a second rollback undoes the first. It is a commit of its own.

        Raises NothingToRollBack, StagingBusy, LeaseTimeout, ModelFailed.
        """
        ticket = Claim()
        with self._swapping:
            try:
                self._open_staging(ticket)
                before = self.weights_id
                return self._receipt(self._residency.rollback(timeout), before, None)
            finally:
                ticket.end()

    def pin(self) -> Pinned:
        """`with model.pin() as session:` makes several calls on one version, whatever is committed meanwhile.

        In single residency a commit waits until the block ends; in double residency the next staging does.
        """
        return Pinned(self._methods, self._gate)

    def _open_staging(self, ticket: Claim) -> None:
        with self._opening:
            other = self._staging() if self._staging else None
            if other is not None and other.holds:
                raise StagingBusy("another staging of this model is open; commit or discard it first")
            self._staging = weakref.ref(ticket)

    def _open_transforms(self) -> Transforms:
        if self._transforms is None:
            from .transforms import Transforms  # needs torch

            self._transforms = Transforms(self.artifact)
        return self._transforms

    def _run(self, name: str, flat: list[Any]) -> list[Any]:
        lease = Claim()
        session = None
        try:
            session = self._gate.acquire(lease).session
            return session.bound.run(name, flat)
        finally:
            lease.end()
            if session is not None:
                self._gate.release(session, lease)

    def _commit(self, session: Session, contents: Contents, timeout: float | None) -> SwapReceipt:
        before = self.weights_id
        committed = self._residency.commit(session, contents.weights_id, contents.labels, timeout)
        return self._receipt(committed, before, contents)

    def _receipt(self, committed: Committed, before: str | None, contents: Contents | None) -> SwapReceipt:
        version = committed.version
        return SwapReceipt(
            generation=version.generation,
            weights_id=version.weights_id,
            previous_weights_id=before,
            graph_id=self.graph_id,
            source=contents.source if contents else "rollback",
            labels=dict(version.labels),
            ignored=contents.ignored if contents else (),
            residency=self.residency,
            bytes_read=contents.bytes_read if contents else 0,
            bytes_copied=committed.bytes_copied,
            seconds_staged=contents.seconds_staged if contents else 0.0,
            seconds_verified=contents.seconds_verified if contents else 0.0,
            seconds_paused=committed.seconds_paused,
        )

    def __repr__(self) -> str:
        return (
            f"Model({str(self.artifact.path)!r}, graph_id={self.graph_id[:12]!r}, "
            f"weights_id={self.weights_id and self.weights_id[:12]!r}, generation={self.generation}, "
            f"residency={self.residency!r})"
        )
