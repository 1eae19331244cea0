"""The weights that one or several models serve from: who may change them, and what was done to them."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Lock, RLock, get_ident
from typing import TYPE_CHECKING

import msgspec

from .arena import Arena, ArenaLayout
from .artifact import Artifact
from .candidates import Candidate, Committed
from .deltafile import DeltaStamp, delta_stamp
from .engines import Engine
from .errors import BaseMismatch, DeviceError, ModelFailed, OutOfMemory, StagingBusy, Unsupported, is_of_device
from .events import Event, EventKind, Events
from .forks import renew_in_children
from .gate import POLL_SECONDS, Claim, ClaimReference, Gate, Version
from .incremental import stage_delta, stage_part
from .job import Job
from .manifest import NamedTensor
from .memory import Memory
from .nonfinite import newly_nonfinite
from .places import printable
from .receipts import SwapReceipt
from .residency import Ended, Residency, open_residency
from .session import Session, bind, prepare
from .sources import Check
from .staging import Contents, Kind, Request, plan, stage_full
from .trials import Member, find_trials, new_member, try_out
from .weightfile import Stamp
from .weightset import WeightSet, open_weights
from .workers import Workers

if TYPE_CHECKING:
    from .transforms import Transforms

HISTORY = 100


def check_same_weights(weights: tuple[NamedTensor, ...], artifact: Artifact) -> None:
    """Raise Unsupported unless an artifact has exactly these weights, laid out in the same way."""
    ours = {weight.name: msgspec.structs.replace(weight, requires_grad=False) for weight in weights}
    theirs = {weight.name: msgspec.structs.replace(weight, requires_grad=False) for weight in artifact.manifest.weights}
    odd = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if odd:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise Unsupported(
            f"{artifact.path}: cannot share weights with a model of another table of weights; they differ in "
            f"{', '.join(odd[:5])}{more}"
        )


@contextmanager
def _memory_errors(where: str) -> Iterator[None]:
    """A block whose MemoryErrors have a name."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"{where}: no memory for it ({error})") from error


class Store:
    """Arenas, their sessions, and the gate before them. Several models may share one."""

    def __init__(
        self, weights: tuple[NamedTensor, ...], residency: str, keep_previous: str | None, memory: Memory
    ) -> None:
        self.gate: Gate[Session] = Gate()
        self.events = Events()
        self.history: deque[SwapReceipt] = deque(maxlen=HISTORY)
        self._renew()
        renew_in_children(self)
        self._weights = weights
        self._workers = Workers()
        self._members: dict[int, Member] = {}
        self._places = count()
        self._transforms: dict[int, Transforms] = {}
        self._staging: ClaimReference | None = None
        self.stages_on_host = memory.stages_on_host and residency == "single"
        layout = ArenaLayout(weights)
        self._open: set[int] = set()  # the places of models that were not closed
        self._residency: Residency = open_residency(
            residency, keep_previous, self._new_session, memory, layout, self.gate, self._workers
        )

    def _renew(self) -> None:
        """What other threads were doing to the weights, a forked child does not do."""
        self.swapping = Lock()
        self._opening = RLock()  # for signal handlers
        self._swapper: int | None = None
        self.job: Job | None = None  # of the staging that is under way

    def _new_session(self, arena: Arena) -> Session:
        return Session(arena, {place: member.engine for place, member in list(self._members.items())})

    @property
    def residency(self) -> str:
        return self._residency.name

    @property
    def leases(self) -> int:
        """How many calls and pins are held, on any version."""
        return sum(map(self.gate.leases, self._residency.sessions))

    def join(self, artifact: Artifact, engine: Engine) -> Member:
        """Let an artifact's graphs run on the weights, too. Raises Unsupported if they have others."""
        check_same_weights(self._weights, artifact)
        with self.claimed(wait=None):
            member = new_member(artifact, engine, next(self._places))
            sessions = self._residency.sessions
            bound = [bind(engine, each.arena) for each in sessions]
            live = self.gate.current.session if self.gate.current else None
            for session, each in zip(sessions, bound, strict=True):
                if session is live:
                    with session.arena.writing(join=True), session.arena.stream():
                        prepare(each, "the weights that are served")
            for session, each in zip(sessions, bound, strict=True):
                session.add(member.place, each, prepared=session is live)
            self._members[member.place] = member
            self._open.add(member.place)
        return member

    def close(self, place: int) -> None:
        """A model has closed. With the last one all memory is let go, as soon as no lease holds it."""
        with self._opening:
            self._open.discard(place)
            if not self._open:
                self.gate.close()
                self._residency = Ended(self._residency.name)

    def leave(self, place: int) -> None:
        """What no model, pin or staging can call any more goes: its graphs, its state, its goldens."""
        self._open.discard(place)
        self._members.pop(place, None)
        self._transforms.pop(place, None)
        for session in self._residency.sessions:
            session.bound.pop(place, None)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Wait for the swaps of other threads. Raises StagingBusy within a swap of this thread."""
        if self._swapper == get_ident():
            raise StagingBusy(
                "a listener is told of a swap that has not ended, and cannot swap itself: let another thread do it "
                "when the listener has returned"
            )
        with self.swapping:
            try:
                self._swapper = get_ident()
                yield
            finally:
                self._swapper = None

    @contextmanager
    def turn(self, check: Check) -> Iterator[None]:
        """As `queue`, for a thread in which no signal handler runs. `check` is called meanwhile."""
        while not self.swapping.acquire(timeout=POLL_SECONDS):
            check()
        try:
            self._swapper = get_ident()
            yield
        finally:
            self._swapper = None
            self.swapping.release()

    @contextmanager
    def claimed(self, wait: float | None) -> Iterator[Claim]:
        """Keep others from staging and committing for the length of a block."""
        ticket = Claim()
        try:
            self.claim(ticket, wait, None)
            yield ticket
        finally:
            ticket.end()

    def claim(self, ticket: Claim, wait: float | None, job: Job | None) -> None:
        """Keep others from staging until `ticket` ends. `wait`: for at most so many seconds; None: not at all.

        Raises StagingBusy, and StageCancelled.
        """
        deadline = time.monotonic() + (wait or 0.0)
        while not self._take(ticket):
            if job is not None:
                job.check()
            if time.monotonic() >= deadline:
                raise StagingBusy(
                    "another staging of this model is open; commit or discard it first"
                    + (f" (waited {wait} s)" if wait else ', or say busy="wait"')
                )
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _take(self, ticket: Claim) -> bool:
        with self._opening:
            other = self._staging() if self._staging else None
            if other is not None and other is not ticket and other.holds:
                return False
            self._staging = weakref.ref(ticket)
            return True

    def stage(self, member: Member, request: Request, timeout: float | None, job: Job) -> Candidate:
        """Read and verify what is requested, beside the weights that serve. The caller has a claim."""
        self.job = job
        try:
            with _memory_errors(printable(request.path)), open_weights(request.path, job.check) as weights:
                return self._stage(member, weights, request, timeout, job)
        except RuntimeError as error:
            if not is_of_device(error):
                raise
            raise DeviceError(f"{printable(request.path)}: {error}") from error
        finally:
            self.job = None

    def _stage(
        self, member: Member, weights: WeightSet, request: Request, timeout: float | None, job: Job
    ) -> Candidate:
        delta = delta_stamp(weights)
        owner = self._owner(delta or weights.stamp, member)
        trials = find_trials(weights.place, owner, list(self._members.values()), request, job.check)
        candidate = self._filled(owner, weights, delta, request, timeout, job)
        if candidate.opened is not None:  # a patch's is computed in the commit, or when it is tried
            candidate.opened.prepare(weights.where)
            candidate.opened.settle(weights.where)
        verified, seconds = try_out(candidate, trials, request, job)
        candidate.contents = candidate.contents.proven(verified, seconds)
        return candidate

    def _owner(self, stamp: Stamp | DeltaStamp | None, asked: Member) -> Member:
        """The artifact that a file was packed for, if it is one of those that share the weights."""
        members = list(self._members.values())
        packed_for = [member for member in members if stamp and member.artifact.graph_id == stamp.graph_id]
        return asked if asked in packed_for or not packed_for else packed_for[0]

    def _filled(
        self,
        member: Member,
        weights: WeightSet,
        delta: DeltaStamp | None,
        request: Request,
        timeout: float | None,
        job: Job,
    ) -> Candidate:
        manifest = member.artifact.manifest
        transforms = partial(self._open_transforms, member)
        if delta:
            live = self._live(weights.where)
            change = stage_delta(weights, delta, live, manifest, self._workers, job, request)
            return self._residency.stage_patch(change.patch, change.contents, timeout, job)
        opened = plan(weights, manifest, request)
        if request.only:
            live = self._live(weights.where)
            change = stage_part(opened, live, manifest, self._workers, job, transforms, request)
            return self._residency.stage_patch(change.patch, change.contents, timeout, job)
        served = self.gate.current.identity if self.gate.current else None
        return self._residency.stage(
            lambda arena: stage_full(opened, arena, self._workers, job, transforms, request, served), timeout, job
        )

    def _live(self, where: str) -> Version[Session]:
        """The weights that are served, for a staging that builds on them. Raises BaseMismatch."""
        if self.gate.current is None or self.gate.failure is not None:
            why = "no weights are served yet" if self.gate.current is None else "the model has failed"
            raise BaseMismatch(
                f"{where}: changes a part of the weights that are served, but {why}. Swap a full weight file first."
            )
        return self.gate.current

    def _open_transforms(self, member: Member) -> Transforms:
        if member.place not in self._transforms:
            from .transforms import Transforms  # needs torch

            self._transforms[member.place] = Transforms(member.artifact)
        return self._transforms[member.place]

    def commit(self, member: Member, candidate: Candidate, by: str, timeout: float | None) -> SwapReceipt:
        contents = candidate.contents
        with self._refusals(member, by, contents.kind, contents.source):
            if (session := candidate.opened) is not None:
                self.gate.wait_idle(
                    session, timeout, candidate.check
                )  # trial calls may still run, and would leave traces in the state
            before = self._current_id
            committed = self._residency.commit(candidate, timeout)
        return self._receipt(member, committed, before, contents, by)

    def rollback(self, member: Member, by: str, wait: float | None, timeout: float | None) -> SwapReceipt:
        with self._refusals(member, by, "rollback", "rollback"), self.claimed(wait):
            before, old = self._current_id, self.gate.current
            committed = self._residency.rollback(timeout)
            identity, left = committed.version.identity, old.identity.nonfinite if old else None
            found = newly_nonfinite(self._weights, identity.nonfinite, left)
            contents = Contents(identity, "rollback", "rollback", nonfinite=found)
            return self._receipt(member, committed, before, contents, by)

    @property
    def _current_id(self) -> str | None:
        return self.gate.current.weights_id if self.gate.current else None

    @contextmanager
    def _refusals(self, member: Member, by: str, operation: Kind, source: str) -> Iterator[None]:
        """Tell of what ends a commit or a rollback."""
        start = time.perf_counter()
        try:
            with _memory_errors(source):
                yield
        except Exception as error:
            kind: EventKind = "failed" if isinstance(error, ModelFailed) else "refused"
            tell = partial(Event, kind, source, by, member.artifact.graph_id, operation=operation, phase="committing")
            # no variable refers to the error, or it and this frame would keep each other, and the staging, alive
            self.events.emit(tell(error=error, seconds=time.perf_counter() - start))
            raise

    def _receipt(
        self, member: Member, committed: Committed, before: str | None, contents: Contents, by: str
    ) -> SwapReceipt:
        version = committed.version
        receipt = SwapReceipt(
            generation=version.generation,
            weights_id=version.weights_id,
            previous_weights_id=before,
            graph_id=member.artifact.graph_id,
            kind=contents.kind,
            source=contents.source,
            by=by,
            labels=version.labels,
            only=contents.only,
            ignored=contents.ignored,
            residency=self.residency,
            staged_in=contents.staged_in,
            bytes_read=contents.bytes_read,
            bytes_copied=committed.bytes_copied,
            verified=contents.verified,
            seconds_staged=contents.seconds_staged,
            seconds_verified=contents.seconds_verified,
            seconds_paused=committed.seconds_paused,
            committed_at=time.time(),
            nonfinite=dict(contents.nonfinite),
        )
        self.history.append(receipt)
        kind: EventKind = "rolled back" if contents.kind == "rollback" else "committed"
        tell = partial(Event, kind, receipt.source, by, receipt.graph_id, receipt.weights_id, receipt=receipt)
        self.events.emit(tell(operation=receipt.kind, labels=receipt.labels, nonfinite=receipt.nonfinite))
        if committed.interrupt is not None:
            raise committed.interrupt
        return receipt
