"""The weights that models serve from: stagings beside them, commits, rollbacks, and the history of these.

A `WeightStore` has the memory of a set of weights, the sessions in it and the gate that calls pass. Several models may
share one store; each artifact on it is a member.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from threading import RLock
from typing import Literal

from blake3 import blake3
from msgspec.structs import asdict, replace

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import (
    RESTART,
    BaseMismatch,
    DeviceError,
    ModelFailed,
    NothingToRollBack,
    NotPromoted,
    RanksRefused,
    UnexpectedWeights,
    Unsupported,
    WaitTimeout,
    is_of_device,
    listed,
)
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.cuts import Rank, digests_together
from weightswap_runtime.format.delta import DeltaStamp, delta_stamp
from weightswap_runtime.format.goldens import Goldens, artifact_goldens, goldens_beside
from weightswap_runtime.format.identity import Identity, identify, newly_nonfinite
from weightswap_runtime.format.manifest import Manifest, NamedTensor, Split
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.jobs import (
    Claim,
    Job,
    Uninterrupted,
    fork_safe,
    renew_in_children,
)
from weightswap_runtime.memory.arena import Arena, ArenaLayout
from weightswap_runtime.memory.device_memory import Memory
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Location
from weightswap_runtime.staging.delta import check_result, files_after, stage_chain, stage_delta
from weightswap_runtime.staging.given import GivenRows, check_constants
from weightswap_runtime.staging.given_rows import check_tables, stage_rows
from weightswap_runtime.staging.golden_check import verify
from weightswap_runtime.staging.request import Admit, Kind, Staging, StagingReport, SwapRequest
from weightswap_runtime.staging.sets import plan, stage_full, stage_part
from weightswap_runtime.threads import WorkerThreads

from .context import Contexts
from .gate import Gate, Turns
from .ranks import Ranks
from .receipt import Event, EventKind, Events, SwapReceipt
from .residency import Commit, Ended, StagedWeights, residency_of
from .session import Member, Session, bind, check_same_weights, memory_errors, run_prologue
from .variants import VariantReceipt, Variants

HISTORY = 100  # receipts that are kept
Verified = Literal["goldens", "finite", "none"]
_IN_NO_FILE = (
    "these weights are in no file, which somebody could have signed or listed, as required here; pack them, and swap "
    "the file"
)


class WeightStore:
    """The arenas, their sessions and their gate. Several models may share one store."""

    def __init__(
        self,
        weights: tuple[NamedTensor, ...],
        residency: str,
        keep_previous: str | None,
        memory: Memory,
        gate: Gate | None = None,
        max_hash_trees: int | None = None,
        ranks: Ranks | None = None,
        split: Split | None = None,
    ) -> None:
        """gate: the gate of a shared segment; None: this process alone serves the weights. ranks: that have the weights
        together, as `split` says; None: this process has the whole."""
        if keep_previous not in (None, "host"):
            raise Unsupported(f'keep_previous={keep_previous!r}: expected None or "host"')
        if not (max_hash_trees is None or (type(max_hash_trees) is int and max_hash_trees >= 0)):
            raise Unsupported(f"max_hash_trees={max_hash_trees!r}: expected bytes, 0 or more, or None")
        self.gate: Gate = gate or Gate()
        self.turns = Turns()
        self.memory = memory
        self.stages_on_host = memory.stages_on_host and residency == "single"
        self.workers = WorkerThreads()
        self._yielding = WorkerThreads(yields=True)
        self.trees = HashTrees(max_hash_trees)
        self.contexts = Contexts()
        self.variants: weakref.WeakSet[Variants] = weakref.WeakSet()  # of the models that share the weights
        self.events = Events()
        self.history: deque[SwapReceipt] = deque(maxlen=HISTORY)
        self.inherited = False  # True if the history began in a process that this one has replaced
        self.admit: Admit | None = None  # asked before each staging; a fleet sets another while it serves
        self.job: Job | None = None  # of the staging that is under way
        self.closing = fork_safe(RLock())  # of changes to which models and watchers there are; for signal handlers, too
        self._weights = weights
        self.ranks = ranks
        self.layout = ArenaLayout(weights, Rank(split, ranks.rank) if ranks and split else None)
        self._members: dict[int, Member] = {}
        self._numbers = count()
        self._open: set[int] = set()  # ids of the members whose models are not closed
        keep = keep_previous == "host"
        self._residency = residency_of(residency)(self._new_session, memory, self.layout, self.gate, self.workers, keep)
        renew_in_children(self)

    def _renew(self) -> None:
        self.job = None  # a forked child does not have its thread

    def _new_session(self, arena: Arena) -> Session:
        return Session(arena, {number: member.engine for number, member in list(self._members.items())})

    @property
    def residency(self) -> str:
        return self._residency.name

    @property
    def leases(self) -> int:
        """The number of calls and pins that hold a lease, on any version."""
        return sum(map(self.gate.leases, self._residency.sessions))

    def join(self, artifact: Artifact, engine: Engine) -> Member:
        """Bind an artifact's graphs to the weights. Raises Unsupported if the artifact has other weights."""
        check_same_weights(self._weights, artifact)
        with self.turns.claimed():
            member = Member(artifact, engine, next(self._numbers), artifact_goldens(artifact))
            sessions = self._residency.sessions
            engines = [bind(engine, session.arena) for session in sessions]
            live = self.gate.current.session if self.gate.current else None
            for session, bound in zip(sessions, engines, strict=True):
                if session is live:
                    with session.arena.writing(join=True), session.arena.stream():
                        run_prologue(bound, "the weights that are served")
            for session, bound in zip(sessions, engines, strict=True):
                session.add(member.id, bound, prepared=session is live)
            self._members[member.id] = member
            self._open.add(member.id)
        return member

    def close(self, member: Member) -> None:
        """Note that a model was closed. With the last one, all memory is freed as soon as no lease holds it."""
        with self.closing:
            self._open.discard(member.id)
            if not self._open:
                self.gate.close()
                self._residency = Ended(self._residency.name)
                self.trees.clear()
                if self.ranks is not None:
                    self.ranks.leave(self)

    def leave(self, member_id: int) -> None:
        """Free the graphs, state and goldens of a member that no model, pin or staging can call any more."""
        self._open.discard(member_id)
        self._members.pop(member_id, None)
        for session in self._residency.sessions:
            session.bound.pop(member_id, None)

    def stage(self, member: Member, request: SwapRequest, job: Job) -> StagedWeights:
        """Read and verify the requested weights, beside the served ones. The caller has a claim."""
        self.job = job
        where = request.where
        try:
            most = max(each.artifact.manifest.most_header for each in list(self._members.values()))
            with memory_errors(f"{where}: no memory for it"), request.open(job.check, most) as weights:
                return self._stage(member, weights, request, job)
        except RuntimeError as error:
            if not is_of_device(error):
                raise
            raise DeviceError(f"{where}: {error}. {RESTART}") from error
        finally:
            self.job = None

    def _stage(self, member: Member, weights: WeightSet, request: SwapRequest, job: Job) -> StagedWeights:
        delta, admitted_by = delta_stamp(weights), fingerprint_of(self.admit)  # before it is asked
        if self.admit is not None:
            request = admitted(self.admit, weights, delta, request)
        if self.ranks is not None and weights.comes_once:
            raise Unsupported(f"{weights.where}: a file that arrives, which ranks do not take; give them a path")
        owner = self._owner(delta or weights.stamp, member)
        served = self.gate.current.identity if self.gate.current else None
        for each in list(self._members.values()):
            check_constants(request.source, each.artifact)
        is_update = delta is not None or isinstance(weights, GivenRows)  # which is short
        workers = self._yielding if job.yields and not is_update else self.workers
        staging = Staging(request, owner.artifact.manifest, served, owner.open_transforms, self.trees, workers, job)
        goldens = self._goldens(weights.location, owner, staging)  # before large files are read
        staged = self._staged(weights, delta, staging)
        staged.admitted_by = admitted_by
        staged.admit_again = partial(self._admit_again, weights.where, weights.location, staged.identity.weights_id)
        if staged.session is not None:  # a patch computes this in its commit, or when it is tried
            staged.session.run_prologues(staged.report.source)
            staged.session.synchronize(staged.report.source)  # so that an error of the device refuses this staging
        if self.ranks is None:
            self._verify(staged, goldens, staging)
        elif goldens:  # a trial of one rank alone would wait for the others
            staged.try_on_ranks = lambda: self._verify(staged, goldens, staging)
            staged.trials = _described(goldens)
        return staged

    def _owner(self, stamp: Stamp | DeltaStamp | None, requester: Member) -> Member:
        """Return the requester if a file is for its graph or for that of no member, else the member that it is for.

        A swap through one model changes all that share the weights, whichever of their graphs the file was packed for.
        """
        members = list(self._members.values())
        packed_for = [member for member in members if stamp and member.artifact.manifest.packed_for == stamp.graph_id]
        return requester if requester in packed_for or not packed_for else packed_for[0]

    def _goldens(self, location: Location | None, owner: Member, staging: Staging) -> list[tuple[Member, Goldens]]:
        """Return the goldens in every artifact, and those beside a weight file, which are for `owner`'s graph.

        Raises WeightFileError for damaged ones, and for goldens of another graph.
        """
        request = staging.request
        if request.verify == "off":
            return []
        members = list(self._members.values())
        goldens = [(member, member.goldens) for member in members if member.goldens is not None]
        beside = location and goldens_beside(
            location, staging.manifest, allow_other_graph=request.allow_other_graph, check=staging.job.check
        )
        if beside:
            # a part of a file results in other weights than those that the goldens were recorded for, so that outputs
            # only have to be finite, as with the goldens that an artifact has for any weights
            goldens.append((owner, beside._replace(bundled=bool(request.only))))
        return goldens

    def _staged(self, weights: WeightSet, delta: DeltaStamp | None, staging: Staging) -> StagedWeights:
        """Stage a file as a set of its own, or as a patch of the weights that are served."""
        request = staging.request
        if delta:
            served = self._current_id if self.gate.failure is None else None
            through = files_after(served, weights, delta, staging)
            if through is not None:
                arena, identity = self._base(weights.where)
                identity, report, patch = stage_delta(weights, delta, arena, identity, staging, through)
                return self._residency.stage_patch(identity, report, patch, request.timeout, staging.job)
            with self._residency.target(request.timeout, staging.job) as (session, staged_in):
                identity, report = stage_chain(weights, delta, session.arena, staging)
        elif isinstance(weights, GivenRows) and weights.start_from(self._current_id):
            identity, report, patch, _ = stage_rows(weights, *self._base(weights.where), staging)
            return self._residency.stage_patch(identity, report, patch, request.timeout, staging.job)
        else:
            planned = plan(weights, staging.manifest, request, self.layout.shares)
            check_tables(planned, staging)
            if request.only:
                identity, report, patch = stage_part(planned, *self._base(weights.where), staging)
                return self._residency.stage_patch(identity, report, patch, request.timeout, staging.job)
            with self._residency.target(request.timeout, staging.job) as (session, staged_in):
                identity, report = stage_full(planned, session.arena, staging)
        session.content = identity.digests
        return StagedWeights(identity, replace(report, staged_in=staged_in), session)

    def _base(self, where: str) -> tuple[Arena, Identity]:
        """Return the served weights, for a staging that builds on them. Raises BaseMismatch if there are none."""
        if self.gate.current is None or self.gate.failure is not None:
            why = "no weights are served yet" if self.gate.current is None else "the model has failed"
            raise BaseMismatch(
                f"{where}: changes a part of the weights that are served, but {why}. Swap a full weight file first."
            )
        return self.gate.current.session.arena, self.gate.current.identity

    def _verify(self, staged: StagedWeights, all_goldens: list[tuple[Member, Goldens]], staging: Staging) -> None:
        """Run all goldens on the staged weights, and report the comparison that was done.

        Raises GoldenMismatch, WeightFileError and StageCancelled.
        """
        start = time.perf_counter()
        modes: set[str] = set()
        if all_goldens:
            session = staged.trial_session(staging.job)
            staging.job.begin("verifying")
            for member, goldens in all_goldens:
                bound = session.bound.get(member.id)
                if bound is None:  # its model was dropped meanwhile
                    continue
                mode = verify(
                    goldens._replace(where=f"{staged.report.source}: tried with {goldens.where}"),
                    bound,
                    member.engine,
                    member.artifact.manifest,
                    staged.identity.weights_id,
                    mode=staging.request.verify,
                    check=staging.job.check,
                )
                modes.add(mode)
        verified: Verified = "goldens" if "goldens" in modes else "finite" if modes else "none"
        seconds = staged.report.seconds_verified + time.perf_counter() - start
        staged.report = replace(staged.report, verified=verified, seconds_verified=seconds)

    def check_admitted(self, staged: StagedWeights) -> None:
        """Raise what `admit` raises if staged weights were admitted by other keys than those that count now."""
        if staged.admitted_by != fingerprint_of(self.admit):
            staged.admit_again()

    def _admit_again(self, where: str, location: Location | None, weights_id: str) -> None:
        if self.admit is None:
            return
        if location is None:
            raise UnexpectedWeights(f"{where}: {_IN_NO_FILE}")
        self.admit(location, weights_id)

    def commit(
        self, member: Member, staged: StagedWeights, by: str, timeout: float | None, check: Check
    ) -> SwapReceipt:
        """Serve staged weights. `check` is called during the wait for calls and pins."""
        with Uninterrupted(check) as caller:
            with self._refusal_events(member, by, staged.report.kind, staged.report.source):
                before = self._current_id
                if self.ranks is None:  # else all of them have asked together: none may refuse alone
                    self.check_admitted(staged)
                self.try_on_ranks(staged)
                committed = self._commit("commit", caller, lambda: self._residency.commit(staged, timeout, caller))
            return self._committed(member, staged.report, committed, before, by)

    def try_on_ranks(self, staged: StagedWeights) -> None:
        """Try staged weights on all ranks, unless that was done. Raises RanksRefused and RanksLost."""
        if self.ranks is None:
            return
        if staged.identity.unproven:
            self._prove_on_ranks(self.ranks, staged)
        if staged.try_on_ranks is not None:
            self.ranks.agree("goldens", partial(_done, staged.try_on_ranks))
            staged.try_on_ranks = None

    def _prove_on_ranks(self, ranks: Ranks, staged: StagedWeights) -> None:
        """Prove that a delta of weights that ranks share leads to the id that it claims. Raises as `try_on_ranks`."""
        identity = staged.identity
        found = ranks.exchange(partial(digests_together, identity.unproven))
        digests = {
            name: tuple(blocks.get(index, each) for index, each in enumerate(identity.digests[name]))
            for name, blocks in found.items()
        }

        def check() -> dict[str, str]:
            proven = identify(self._weights, {**identity.digests, **digests}, {})
            check_result(proven, identity.weights_id, staged.report.source)
            return {"weights": proven.weights_id}

        ranks.agree("changes", check)
        identity.digests.update(digests)
        identity.unproven.clear()

    @property
    def first_generation(self) -> int:
        """The generation up to which rollbacks do not bind a watcher or receiver that begins now: they were before."""
        return -1 if self.gate.current is None or self.inherited else self.gate.current.generation

    def check_not_rolled_back(self, weights_id: str, since: int, where: str) -> None:
        """Raise NotPromoted if these weights were rolled back after a generation, and not committed again."""
        for receipt in reversed(tuple(self.history)):
            if receipt.generation <= since or receipt.weights_id == weights_id:
                return
            if receipt.kind == "rollback" and receipt.previous_weights_id == weights_id:
                by = f" by {receipt.by}" if receipt.by else ""
                raise NotPromoted(
                    f"{where}: its weights {weights_id[:12]} were served, then rolled back{by} (generation "
                    f"{receipt.generation}). Write other weights, or swap these in by hand.",
                    reason="superseded",
                )

    @property
    def previous_id(self) -> str | None:
        """The id of the weights that a rollback would serve."""
        previous = self._residency.previous
        return previous.weights_id if previous else None

    def rollback(
        self, member: Member, by: str, wait: float | None, timeout: float | None, expect: str | None = None
    ) -> SwapReceipt:
        """Serve the previous weights. Raises NothingToRollBack, also if their id is not `expect`."""
        ticket = Claim()
        try:
            with Uninterrupted() as caller, nullcontext() if self.ranks is None else self.ranks.turn("rollback"):
                with self._refusal_events(member, by, "rollback", "rollback"):
                    if self.ranks is None:
                        self.turns.claim(ticket, wait, None)
                        self._check_previous(expect)
                    else:
                        self._agree_on_rollback(self.ranks, ticket, expect, timeout)
                    old = self.gate.current
                    committed = self._commit("rollback", caller, lambda: self._residency.rollback(timeout, caller))
                identity = committed[0].identity
                served = old.identity.nonfinite if old else None
                report = StagingReport(
                    weights_id=identity.weights_id,
                    labels=dict(identity.labels),
                    kind="rollback",
                    source="rollback",
                    reloadable=False,
                    nonfinite=newly_nonfinite(self._weights, identity.nonfinite, served),
                )
                return self._committed(member, report, committed, old.weights_id if old else None, by)
        finally:
            ticket.end()

    def _check_previous(self, expect: str | None) -> None:
        previous = self.previous_id
        if expect not in (None, previous):
            raise NothingToRollBack(f"the weights {str(expect)[:12]} are not those that were served before")
        if previous is None:
            self._residency.rollback(None, Uninterrupted())  # says why there is nothing

    def is_free(self, patience: float, deadline: float) -> bool:
        """Wait until no pin holds memory that a commit in place needs, for `patience` seconds; return whether it is so.

        deadline: of `time.monotonic()`, after which this raises WaitTimeout.
        """
        if self.residency == "double" or self.gate.current is None:
            return True
        try:
            self.gate.wait_idle(self.gate.current.session, min(patience, max(0.0, deadline - time.monotonic())))
        except WaitTimeout:
            if time.monotonic() >= deadline:
                raise
            return False
        return True

    def _commit(self, what: str, caller: Uninterrupted, commit: Callable[[], Commit]) -> Commit:
        """Do what all ranks have agreed to do. Where it can still fail, which is in place, all say how it went.

        Raises ModelFailed if it has failed on any rank: all then refuse calls.
        """
        if self.residency == "double":
            return commit()  # one reference is exchanged
        self.gate.check_not_pinned_here()  # here: a signal handler may call the model while another thread commits
        if self.ranks is None:
            return caller.run(commit)
        made: list[Commit] = []
        end = partial(self.ranks.agree_after, f"end of the {what}", partial(_done, lambda: made.append(commit())))
        try:
            caller.run(end)  # which waits for what other ranks still copy, as long as they say that they do
        except RanksRefused as error:
            reasons = [f"rank {rank}: {reason}" for rank, reason in error.reasons.items()]
            self.gate.fail(f"of the ranks of this model; {listed(reasons, between='; ')}")
            raise ModelFailed(
                f"the {what} failed on some ranks, and all refuse calls until a swap or a rollback succeeds:",
                *(f"  - {reason}" for reason in reasons),
            ) from error
        return made[0]

    def _agree_on_rollback(self, ranks: Ranks, ticket: Claim, expect: str | None, timeout: float | None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout

        def ready() -> dict[str, str] | None:
            self.turns.claim(ticket, None, None)  # no wait: no other thread of this rank could end a staging meanwhile
            self._check_previous(expect)
            return {"weights": str(self.previous_id)} if self.is_free(ranks.patience, deadline) else None

        ranks.agree("rollback", ready)

    @property
    def _current_id(self) -> str | None:
        return self.gate.current.weights_id if self.gate.current else None

    @contextmanager
    def _refusal_events(self, member: Member, by: str, operation: Kind, source: str) -> Iterator[None]:
        """Emit an event for an error that ends a commit or a rollback."""
        start = time.perf_counter()
        try:
            with memory_errors(f"{source}: no memory for it"):
                yield
        except Exception as error:
            kind: EventKind = "failed" if isinstance(error, ModelFailed) else "refused"
            graph_id, seconds = member.artifact.graph_id, time.perf_counter() - start
            # no local refers to the error: the cycle with its traceback would keep this frame and the staging alive
            self.events.emit(
                Event(kind, source, by, graph_id, error=error, operation=operation, phase="committing", seconds=seconds)
            )
            raise

    def _committed(
        self, member: Member, report: StagingReport, committed: Commit, before: str | None, by: str
    ) -> SwapReceipt:
        """Do what follows from a commit: drop variants of other weights, and tell of it. Returns its receipt."""
        version, seconds_paused, bytes_copied = committed
        contexts, variants = self.contexts.outdated_by(version.weights_id), self._variants_kept(version.weights_id, by)
        receipt = SwapReceipt(
            **asdict(report),
            generation=version.generation,
            previous_weights_id=before,
            graph_id=member.artifact.graph_id,
            by=by,
            residency=self.residency,
            bytes_copied=bytes_copied,
            seconds_paused=seconds_paused,
            committed_at=time.time(),
            contexts=contexts,
            variants=variants,
        )
        self.history.append(receipt)
        kind: EventKind = "rolled back" if receipt.kind == "rollback" else "committed"
        self.events.emit(
            Event(
                kind,
                receipt.source,
                by,
                receipt.graph_id,
                receipt.weights_id,
                receipt=receipt,
                operation=receipt.kind,
                labels=receipt.labels,
                nonfinite=receipt.nonfinite,
            )
        )
        return receipt

    def _variants_kept(self, weights_id: str, by: str) -> dict[str, tuple[str, ...]]:
        """Drop the variants that do not belong to these weights; return the names of those kept and dropped."""
        names: dict[str, tuple[str, ...]] = {}
        for variants in list(self.variants) if self.variants else ():
            names |= {what: names.get(what, ()) + more for what, more in variants.keep_for(weights_id, by).items()}
        return names


def _done(work: Callable[[], object]) -> dict[str, str]:
    """Do some work; return what ranks have to compare of it: nothing."""
    work()
    return {}


def _described(goldens: Sequence[tuple[Member, Goldens]]) -> str:
    """Return the number of recorded calls and a digest of them, by which ranks know that they try the same: what one of
    them calls with other inputs, they would compute together on both, and gloo ends a process if the shapes differ."""
    calls = [call for _, each in goldens for call in each.calls()]
    return f"{len(calls)} ({blake3(''.join(calls).encode()).hexdigest()[:16]})"


def admitted(admit: Admit, weights: WeightSet, delta: DeltaStamp | None, request: SwapRequest) -> SwapRequest:
    """Return the request with the admitted weights id as its `expect`, so a file with other bytes is refused later.

    Raises what `admit` raises, Unsupported for a part of a set, and UnexpectedWeights.
    """
    stamp = delta or weights.stamp
    if weights.location is None:
        raise UnexpectedWeights(f"{weights.where}: {_IN_NO_FILE}")
    if stamp is None:
        raise UnexpectedWeights(f"{weights.where}: does not say which weights it holds, as required here; pack it")
    if request.only:
        raise Unsupported("only: no file claims the id of a part of a set; swap a full set")
    if request.expect not in (None, stamp.weights_id):
        raise UnexpectedWeights(f"{weights.where}: claims {stamp.weights_id[:12]}, expected {str(request.expect)[:12]}")
    admit(weights.location, stamp.weights_id)
    return request._replace(expect=stamp.weights_id)


def fingerprint_of(admit: Admit | None) -> Hashable:
    """Return what `admit.fingerprint()` returns; None if there is no such method, or if it fails."""
    try:
        value: Hashable = admit.fingerprint()  # type: ignore[union-attr]
    except Exception:  # such as AttributeError, for a function
        return None
    return value


def open_variants(manifest: Manifest, engine: Engine, store: WeightStore, most: int) -> Variants | None:
    """Return a model's variants, none of them resident yet; None for an artifact that declares none."""
    if not manifest.variants:
        return None

    def emit(receipt: VariantReceipt) -> None:
        event = Event(
            f"variant {receipt.kind}",  # type: ignore[arg-type]
            receipt.source,
            receipt.by,
            receipt.graph_id,
            receipt.weights_id,
            nbytes=receipt.bytes_read,
            nonfinite=receipt.nonfinite,
            variant=f"{receipt.group}/{receipt.name}",
        )
        store.events.emit(event)

    variants = Variants(manifest, engine, store.memory, store.workers, most, emit)
    store.variants.add(variants)
    return variants
