"""Operations of operators on a model, and its status. Every method may be called from any thread.

If the model follows a desired state, a change is verified here, then written there, and then made: a follower would
undo what is not desired, and a desired store must not desire what is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec

from weightswap_runtime.errors import NoWeights, StageClosed, StagingBusy, Unsupported, WeightswapError, with_rule
from weightswap_runtime.following.controller import Change as OpenChange
from weightswap_runtime.following.controller import Controller, Lease
from weightswap_runtime.following.desired_state import DesiredState, DesiredWeights, check_promotable
from weightswap_runtime.following.desired_store import DesiredStore, Known, check_file, files_of
from weightswap_runtime.following.directory import in_use
from weightswap_runtime.live.gate import Version
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.variants import VariantReceipt
from weightswap_runtime.model.model import Model
from weightswap_runtime.sources.location import fixed_text, printable
from weightswap_runtime.staging.given import GivenWeights
from weightswap_server.canary import CanaryPlan, check_plan
from weightswap_server.errors import Conflict
from weightswap_server.service.service import Served

from .access import AllowList
from .documents import (
    AddVariantRequest,
    CanaryRequest,
    CanaryStatus,
    Change,
    CommitRequest,
    FollowRequest,
    History,
    ModelStatus,
    RemoveVariantRequest,
    RollbackRequest,
    StagedWeights,
    StageRequest,
    Staging,
    WatchRequest,
    aborted_canary,
    following,
    served_weights,
    watched,
)
from .journal import Followed, Journal

_STAGED = 1.0  # seconds between two looks whether staged weights are ready
_TURN = 1.0  # seconds to wait for the swap of another thread
_ROLLBACK_TURN = 10.0  # the same for a rollback, which cancels what followers and watchers stage


class ModelOperations:
    """The operations on one model."""

    def __init__(self, served: Served, allowed: AllowList, staged_timeout: float) -> None:
        assert isinstance(served.model, Model)  # workers have no admin plane
        self.served, self.model, self.name = served, served.model, served.name
        self._allowed, self._staged_timeout = allowed, staged_timeout
        self._changes = Controller(self.model._store, self.model._member, interval=_STAGED)
        # called when an operator changes the source, with the new `watch` or `follow` and the `interval`, or nothing
        self.on_source: Callable[..., object] = lambda **_: None
        self.on_change: Callable[[], object] = lambda: None  # called when an operator has changed the weights
        self.followed = Followed(self.model, self.name)
        self.journal = Journal(self.model, self.name, self.followed)

    def close(self) -> None:
        """Discard staged weights."""
        self.journal.close()
        self._changes.close()

    def status(self) -> ModelStatus:
        model, progress = self.model, self.model.progress
        follower, watcher, canary = self.followed.follower, self.followed.watcher, self.served.canary
        return ModelStatus(
            name=self.name,
            methods=list(self.served.methods) or [self.name],
            ready=self.served.ready,
            loaded=not self.served.switch.unloaded,
            failed=model.failed,
            graph_id=model.graph_id,
            engine=model.engine,
            device=model.device,
            residency=model.residency,
            served=served_weights(last[-1], self.journal.why(last[-1])) if (last := model.history) else None,
            staged=_staged_weights(self._change),
            staging=Staging(phase=progress[0], bytes_done=progress[1], bytes_total=progress[2]) if progress else None,
            canary=CanaryStatus(weights_id=canary.weights_id, since=canary.since, **canary.report())
            if canary
            else None,
            following=following(follower) if follower else None,
            watching=watched(watcher) if watcher else None,
            variants={
                group: {name: receipt.weights_id for name, receipt in receipts.items()}
                for group, receipts in model.variants.items()
            },
        )

    def history(self) -> History:
        state = self.followed.desired
        return History(
            receipts=[receipt.as_dict() | {"why": self.journal.why(receipt)} for receipt in self.model.history],
            refusals=list(self.journal.refusals),
            desired=self._earlier(state.history) if state else [],
            withdrawn=self._earlier(state.withdrawn) if state else [],
        )

    def _earlier(self, entries: Sequence[DesiredWeights]) -> list[dict[str, Any]]:
        return [weights.as_dict() | {"refused": self.journal.refused(weights.weights_id)} for weights in entries]

    def stage(self, request: StageRequest, by: str, given: GivenWeights | None = None, change_id: str = "") -> None:
        """Read and verify weights, those at `request.source` if none are given.

        Raises Forbidden, Unsupported, Conflict for given ones where a desired store is followed, and what `Model.stage`
        and `DesiredStore` raise.

        change_id: a new id, by which `commit` and `discard` then mean these weights and no others.
        """
        self._stage(request, by, swapping=False, given=given, change_id=change_id)

    def commit(
        self, request: CommitRequest, by: str, change_id: str = "", *, promotes: bool = False
    ) -> SwapReceipt | None:
        """Commit the staged weights, and write them to a followed desired store.

        change_id: as given to `stage`, or any. promotes: nobody has decided on just these weights, so that a hold
        refuses them, and so does a desired store that has withdrawn them.

        Raises StageClosed if nothing is staged, Conflict for other weights than expected, and what `Staged.commit` and
        `DesiredStore.set` raise. The weights then stay staged. If the desired store was written, and calls or pins hold
        the memory, the follower commits; the receipt is None if it has not yet.
        """
        return self._commit(self._committable(request.expect, change_id), request, by, promotes)

    def swap(
        self, request: StageRequest, by: str, given: GivenWeights | None = None, *, promotes: bool = False
    ) -> SwapReceipt | None:
        """Stage and commit, all or nothing. Raises as `stage` and `commit`."""
        change = self._stage(request, by, swapping=True, given=given)
        try:
            return self._commit(change, request, by, promotes)
        finally:
            self._changes.drop(change)

    def discard(self, request: Change, by: str, change_id: str = "") -> None:
        """Discard weights that are staged, or being staged. change_id: as given to `stage`, or any."""
        if change_id:
            self._changes.discard(change_id)
        else:
            self._changes.close()

    def canary(self, request: CanaryRequest, by: str) -> str:
        """Start a canary with the staged weights, or with those of `source`; again: with another plan, measured anew.

        Returns its weights id. Raises StageClosed, Conflict for other staged weights than expected, what `stage`
        raises, and Unsupported if staged weights cannot be called.
        """
        plan = CanaryPlan(request.share, request.shadow, request.tolerance, request.promote_if, request.abort_if)
        check_plan(plan)
        if request.source is None:
            return self._start_canary(self._committable(request.expect), plan, request.why)
        change = self._stage(request.staging(request.source), by, swapping=False)
        try:
            return self._start_canary(change, plan)
        except BaseException:
            self._changes.drop(change)
            raise

    def rollback(self, request: RollbackRequest, by: str) -> SwapReceipt | None:
        """Serve earlier weights. A followed desired store wants them, and holds if asked to. Staged weights are
        discarded.

        Where a desired store is followed, the weights are first verified here as the follower would; if they are
        refused, the desired store stays as it is. What a follower or watcher stages meanwhile is cancelled, until its
        next poll.

        Raises NothingToRollBack, Conflict, NotServed, and what `DesiredStore.rollback` and `Model.swap` raise. The
        receipt is None if the followed desired store wants the weights, but this process does not serve them yet.
        """
        receipt = self._roll_back(request, by)
        self.on_change()
        return receipt

    def _roll_back(self, request: RollbackRequest, by: str) -> SwapReceipt | None:
        desired_store = self.followed.desired_store
        if desired_store is not None:
            try:
                return self._roll_back_desired_store(desired_store, request, by)
            finally:
                self.followed.poll_now()
        self._changes.close()
        with self._turn(_ROLLBACK_TURN, self.followed.interrupt):
            if request.to is None:
                with self.journal.committing(by, request.why):
                    return self.model.rollback(by=by)
            earlier = self.journal.find_served(request.to)
            source, expect = earlier.source, earlier.weights_id
            begin = partial(self.model.stage, source, expect=expect, by=by, background=True)
            with self._allowed.files.using(source):
                return self._served(self._stage_and_commit(begin, source, by, request.why, None, None))

    def _roll_back_desired_store(
        self, desired_store: DesiredStore, request: RollbackRequest, by: str
    ) -> SwapReceipt | None:
        now = desired_store.read()
        revision = now.revision if request.revision is None else request.revision
        target = desired_store.rollback_target(request.to or self._last_served(now), revision=revision)

        def write() -> DesiredState:
            return desired_store.rollback(
                revision=revision, to=target.weights_id, by=by, why=request.why, hold=request.hold
            )

        if self._has_in_memory(target.weights_id):
            state = write()
            self._changes.close()
            return self.followed.await_served(state)
        self._changes.close()
        with self._turn(_ROLLBACK_TURN, self.followed.interrupt):
            begin, source = partial(self.followed.stage, desired_store, target, by), str(desired_store.locate(target))
            with self._allowed.files.using(source, *map(desired_store.locate, target.bases or ())):
                done = self._stage_and_commit(begin, source, by, request.why, revision, write)
        return self._served(done)

    def _stage_and_commit(
        self,
        begin: Callable[[], Staged],
        source: str,
        by: str,
        why: str,
        revision: int | None,
        write: Callable[[], DesiredState] | None,
    ) -> SwapReceipt | DesiredState | None:
        request = StageRequest(source=source, why=why)
        change = _StagedChange(self.served, request, by, revision, self._staged_timeout, swapping=True)
        with self._changes.prepared(change, begin):
            return self._write_and_commit(change, why, write)

    def _has_in_memory(self, weights_id: str) -> bool:
        """Return whether a follower would serve these weights without reading a file."""
        served = None if self.model.failed else self.model.weights_id
        return weights_id in (served, self.model.previous_weights_id)

    def add_variant(self, request: AddVariantRequest, by: str) -> VariantReceipt:
        """Add a variant that calls can choose. Raises Forbidden, Unsupported, and what `Model.add_variant` raises."""
        self._check_not_shared()
        source: Any  # no public argument, if it is a Url
        with self._allowed.weights(request.source) as source:
            return self.model.add_variant(
                request.group,
                request.name,
                source,
                base=request.base,
                expect=request.expect,
                allow_nonfinite=request.allow_nonfinite,
                by=by,
                rate_limit=request.rate_limit,
            )

    def remove_variant(self, request: RemoveVariantRequest, by: str) -> VariantReceipt:
        """Remove a variant. Raises Unsupported and UnknownName."""
        self._check_not_shared()
        return self.model.remove_variant(request.group, request.name, by=by)

    def hold(self, request: Change, by: str) -> None:
        """Hold promotions. Raises Conflict if no desired store is followed, and what `DesiredStore.hold` raises."""
        desired_store = self.followed.require_desired_store("hold")
        self.followed.await_read(
            desired_store.hold(revision=self.followed.seen(desired_store, request), by=by, why=request.why)
        )

    def release(self, request: Change, by: str) -> None:
        """Allow promotions again. Raises as `hold`."""
        desired_store = self.followed.require_desired_store("release")
        self.followed.await_read(desired_store.release(revision=self.followed.seen(desired_store, request)))

    def follow(self, request: FollowRequest, by: str) -> None:
        """Follow a desired store from now on. Raises Conflict if the model follows or watches something already."""
        desired_store = self._allowed.folder(request.desired_store)
        self.followed.check_free()
        with self._allowed.files.frozen():  # from its first read on, a removal asks it
            self.model.follow(desired_store, request.interval)
        self.on_source(follow=desired_store, interval=request.interval)

    def watch(self, request: WatchRequest, by: str) -> None:
        """Watch a directory for new files from now on. Raises as `follow`."""
        directory = self._allowed.folder(request.directory)
        self.followed.check_free()
        with self._allowed.files.frozen():  # as above
            self.model.watch(directory, request.interval)
        self.on_source(watch=directory, interval=request.interval)

    def unfollow(self, request: Change, by: str) -> None:
        """Stop following and watching. The served weights stay. Raises Conflict if the model does neither."""
        watching = self.model.watching
        if not watching:
            raise Conflict(f"{self.name}: does not follow or watch anything")
        for source in watching:
            source.stop()
        self.on_source()

    def discard_outdated(self) -> None:
        """Discard staged weights that are too old, or if a followed desired store wants others than those served.

        Weights that the desired store already desired before the staging, and that cannot be served, are no reason.
        """
        change, follower = self._change, self.followed.follower
        if change is None or change.swapping:
            return
        status = follower.status if follower else None
        known = status and status.revision == change.revision and status.error
        outdated = status and status.desired and not status.agrees and not known
        if outdated or change.lease.is_over:
            self._changes.drop(change)

    def verdict(self) -> tuple[str, str] | None:
        """Return "abort" or "promote" with the canary's rule that holds, or None."""
        change, canary = self._change, self.served.canary
        is_ready = change is not None and change.phase == "ready"  # else an operator commits it already
        return canary.verdict() if canary is not None and is_ready else None

    def act_on(self, verdict: str, rule: str) -> SwapReceipt | None:
        """Commit a canary or discard it, as its rule says. If the commit is refused, it is discarded.

        Raises what `commit` raises, and StageClosed if the canary has ended or was replaced meanwhile.
        """
        change, canary = self._change, self.served.canary
        if change is None or canary is None or canary.verdict() != (verdict, rule):
            raise StageClosed(f"{self.name}: the canary with the rule {rule!r} has ended")
        try:
            if verdict == "promote":
                self._check_where(change)
                return self._commit(change, Change(why=with_rule(change.request.why, f"canary: {rule}")), change.by)
            with self._changes.ready(change):  # raises StageClosed if it was committed meanwhile
                self.journal.refuse(aborted_canary(printable(change.request.source), change.by, rule, canary.values()))
        finally:
            self._changes.drop(change)
        return None

    def _check_where(self, change: _StagedChange) -> None:
        """Raise Conflict if a promotion would be written elsewhere than where it was decided that a rule may."""
        if (now := self.followed.where) != change.followed:
            raise Conflict(
                f"{self.name}: the canary began while {change.followed or 'no desired store'} was followed, and now "
                f"{now or 'none'} is; start it again"
            )

    @property
    def open_sources(self) -> list[str]:
        """The paths and URLs of what operators have staged, or are staging or committing."""
        return [change.request.source for change in self._changes.open if isinstance(change, _StagedChange)]

    def needed(
        self, keep: int, desired_store: DesiredStore | None, state: DesiredState | None
    ) -> tuple[set[str], list[tuple[str, str, float]]]:
        """Return the ids of weights that may be needed again; and paths and URLs with the id of the weights that were
        served or named there, and when.

        keep: earlier weights of each history. desired_store, state: the followed one, if any, and what it says now.
        """
        served, receipts = self.model.weights_id, self.model.history
        newest_first = dict.fromkeys(each.weights_id for each in reversed(receipts))
        ids = {*list(newest_first)[: keep + 1], *((served,) if served else ())}
        known = [(each.source, each.weights_id, each.committed_at) for each in receipts]
        if desired_store is not None and state is not None:
            named = [(file, each.since) for each in state.known for file in files_of(each)]
            known += [(str(desired_store.locate(file)), file.weights_id, since) for file, since in named]
            # a follower that does not agree may be reading any of them
            agrees = state.weights_id in (None, served)
            ids |= in_use(state, keep) if agrees else {file.weights_id for file, _ in named}
        return ids, known

    @property
    def version(self) -> Version:
        """The version that new calls use. Raises NoWeights."""
        current = self.model._store.gate.current
        if current is None or self.model.failed:
            raise NoWeights(f"{self.name}: serves no weights now; swap some in")
        return current

    @property
    def staged_by(self) -> str:
        """The user who staged the staged weights, or ""."""
        change = self._change
        return change.by if change is not None else ""

    @property
    def _change(self) -> _StagedChange | None:
        """The change that is open."""
        return next((change for change in self._changes.open if isinstance(change, _StagedChange)), None)

    def _stage(
        self,
        request: StageRequest,
        by: str,
        *,
        swapping: bool,
        given: GivenWeights | None = None,
        change_id: str = "",
    ) -> _StagedChange:
        """Stage weights. Raises StagingBusy, and what the staging raises."""
        desired_store = self.followed.desired_store
        if given is not None and desired_store is not None:
            raise self._in_no_file(desired_store)
        if desired_store is not None and request.only:
            raise Unsupported("only: a new process could not start from a part of a set; stage a full set")
        revision = self.followed.seen(desired_store, request) if desired_store is not None else None
        weights: Any  # a Url is no public argument
        with self._allowed.weights(request.source) if given is None else nullcontext(given) as weights:
            begin = partial(
                self.model.stage,
                weights,
                only=request.only or None,
                ignore=request.ignore,
                expect=request.expect,
                allow_other_graph=request.allow_other_graph,
                allow_nonfinite=request.allow_nonfinite,
                verify=request.verify,
                rate_limit=request.rate_limit,
                by=by,
                background=True,
            )
            if given is None:
                request = msgspec.structs.replace(request, source=fixed_text(weights))
            change = _StagedChange(
                self.served, request, by, revision, self._staged_timeout, swapping=swapping, id=change_id
            )
            change.followed = desired_store.where if desired_store is not None else ""
            return self._changes.prepare(change, begin)

    def _in_no_file(self, desired_store: DesiredStore) -> Conflict:
        return Conflict(
            f"{self.name}: follows {desired_store.where}, which says what is served, and nobody else could read these "
            "weights; publish them there, or push a file to a server with --upload-dir"
        )

    def _committable(self, expect: str | None, change_id: str = "") -> _StagedChange:
        change = self._change
        if change is None or change.swapping or change_id not in ("", change.id):
            raise StageClosed(f"{self.name}: nothing is staged; stage weights first")
        if change.phase == "staging":
            phase = change.staged.progress.phase if change.staged is not None else "opening"
            raise StagingBusy(f"{self.name}: still {phase}; wait until it is staged")
        if expect not in (None, change.weights.weights_id):
            raise Conflict(f"{self.name}: {change.weights.weights_id[:12]} is staged now; look again")
        return change

    def _start_canary(self, change: _StagedChange, plan: CanaryPlan, why: str = "") -> str:
        with self._changes.ready(change):
            self.served.end_canary()
            before = change.request
            change.request = msgspec.structs.replace(before, why=why or before.why)  # a rule may promote it at once
            try:
                self.served.start_canary(change.weights, plan)
            except BaseException:
                change.request = before
                raise
            return change.weights.weights_id

    def _commit(self, change: _StagedChange, request: Change, by: str, promotes: bool = False) -> SwapReceipt | None:
        desired_store, why = self.followed.desired_store, request.why or change.request.why
        write = None
        if desired_store is not None:
            if not change.weights.report.reloadable:  # the desired store was not followed yet when they were staged
                raise self._in_no_file(desired_store)
            if change.followed not in ("", desired_store.where):  # its revision says nothing of this desired store
                raise Conflict(
                    f"{self.name}: staged while {change.followed} was followed; discard it and stage it again"
                )
            if promotes:
                check_promotable(desired_store.read(), change.weights.weights_id, printable(change.request.source))
            revision = change.revision if request.revision is None else request.revision
            write = partial(self._desire, desired_store, change, revision, why, by)
        with ExitStack() as stack:
            # A follower that reads the desired store meanwhile waits for this commit. Who keeps the turn for longer, as
            # a watcher or a receiver may, waits himself, until these weights are no longer staged; he comes after them.
            with suppress(StagingBusy):
                stack.enter_context(self._turn(_TURN))
            with self._changes.ready(change):  # else another operator commits them
                pass
            done = self._write_and_commit(change, why, write)
        self.followed.poll_now()
        receipt = self._served(done)
        self.on_change()
        return receipt

    def _turn(self, seconds: float, interrupt: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Return a context manager during which swaps of other threads wait. Raises StagingBusy after the seconds."""
        deadline = time.monotonic() + seconds

        def check() -> None:
            interrupt()
            if time.monotonic() > deadline:
                raise StagingBusy(f"{self.name}: what it follows or watches is about to change the weights; look again")

        return self._changes.turn(check)

    def _write_and_commit(
        self, change: _StagedChange, why: str, write: Callable[[], DesiredState] | None
    ) -> SwapReceipt | DesiredState | None:
        """Write a followed desired store, and commit. Return what was written if the commit then fails: the follower
        makes it.

        The write comes first: the follower would replace weights that are served but not desired.
        """
        written: DesiredState | None = None

        def record() -> None:
            nonlocal written
            written = write() if write is not None else None

        with self.journal.committing(change.by, why):  # the receipt says who has staged
            try:
                return self._changes.commit(change, record)
            except WeightswapError:
                if written is None:
                    raise
                self._changes.drop(change)
                return written

    def _served(self, done: SwapReceipt | DesiredState | None) -> SwapReceipt | None:
        return self.followed.await_served(done) if isinstance(done, DesiredState) else done

    def _desire(
        self, desired_store: DesiredStore, change: _StagedChange, revision: int | None, why: str, by: str
    ) -> DesiredState:
        staged, path = change.weights, change.request.source
        known = Known(staged.weights_id, self.model.graph_id, staged.labels, staged.base)
        check_file(path, staged.weights_id)  # weights may have been staged for long, and others read the file
        seen = desired_store.read().revision if revision is None else revision
        return desired_store.set(path, revision=seen, by=by, why=why, known=known)

    def _last_served(self, state: DesiredState) -> str | None:
        """Return the last desired weights that this process has served; it may have refused later ones."""
        served = {receipt.weights_id for receipt in self.model.history}
        return next((weights.weights_id for weights in reversed(state.history) if weights.weights_id in served), None)

    def _check_not_shared(self) -> None:
        if self.served.is_shared:
            raise Unsupported(
                f"{self.name}: it is served by workers, which would not know of variants. Start the server without "
                "--workers, or start several servers and ask each."
            )


class _StagedChange(OpenChange):
    """Weights that an operator has staged."""

    def __init__(
        self,
        served: Served,
        request: StageRequest,
        by: str,
        revision: int | None,
        timeout: float,
        *,
        swapping: bool,
        id: str = "",  # noqa: A002 - as in `Change`
    ) -> None:
        """request: its source is the path or URL. revision: of the followed desired store, as seen before. swapping: it
        is committed at once. timeout: seconds for which it may stay open."""
        super().__init__(id=id, by=by, lease=Lease(timeout))
        self._served, self.request, self.revision, self.swapping = served, request, revision, swapping
        self.followed = ""  # where the desired store of the revision is
        self.since = time.time()

    @property
    def busy(self) -> str:
        doing = "is staging" if self.phase == "staging" else "has staged"
        return f"{self._served.name}: {self.by or 'an operator'} {doing} weights; commit or discard them first"

    def ended(self) -> None:
        self._served.end_canary()


def _staged_weights(change: _StagedChange | None) -> StagedWeights | None:
    if change is None:
        return None
    source, why = printable(change.request.source), change.request.why
    weights = StagedWeights(source=source, by=change.by, why=why, since=change.since, ready=False)
    if change.phase == "staging":
        return weights
    try:
        staged = change.weights
        weights.weights_id, weights.labels, weights.kind = staged.weights_id, staged.labels, staged.kind
        weights.verified, weights.nonfinite = staged.verified, list(staged.nonfinite)
        weights.ready = not change.swapping
    except Exception:  # it was discarded or cancelled meanwhile
        return None
    return weights
