"""What operators do to a model, and what is to be known of it. Every method may be called from any thread.

Where the model follows a desired state, a change is written there first: a change of this process alone would be
undone by its next look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from weightswap_runtime.desired.document import DesiredState
from weightswap_runtime.desired.place import DesiredPlace, Known
from weightswap_runtime.errors import StageClosed, StagingBusy, Unsupported
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.variants.resident import VariantReceipt
from weightswap_server.canary.canary import Canary
from weightswap_server.canary.judging import CanaryPlan, check_plan
from weightswap_server.service.served import Served

from .allowing import Allowed
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
    StageRequest,
    Staging,
    WatchRequest,
)
from .errors import Conflict
from .followed import Followed
from .journal import Journal
from .model_documents import Entry, aborted, following, served_weights, staged_weights, watched

_TURN = 1.0  # seconds for the swap of another thread


class Taking(NamedTuple):
    """Where a model's weights come from: a directory that is watched, a place that is followed, or nothing."""

    watch: str | None = None
    follow: str | None = None
    interval: float = 5.0


class ModelOperations:
    """Those on one model."""

    def __init__(self, served: Served, allowed: Allowed, staged_timeout: float) -> None:
        self.served, self.model, self.name = served, served.model, served.name
        self._allowed, self._staged_timeout = allowed, staged_timeout
        self._entry: Entry | None = None
        self._lock = Lock()
        self.on_source: Callable[[Taking], object] = lambda _: None  # what an operator has it take from now on
        self._ending = Lock()  # what is staged is committed or given up, one after another
        self.followed = Followed(self.model, self.name)
        self.journal = Journal(self.model, self.name, self.followed)

    def close(self) -> None:
        """Give up what is staged."""
        self.journal.close()
        self._discard()

    def status(self) -> ModelStatus:
        model, progress = self.model, self.model.progress
        follower, watcher = self.followed.follower, self.followed.watcher
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
            staged=staged_weights(self._entry),
            staging=Staging(phase=progress[0], bytes_done=progress[1], bytes_total=progress[2]) if progress else None,
            canary=_canary_status(canary) if (canary := self.served.canary) is not None else None,
            following=following(follower) if follower else None,
            watching=watched(watcher) if watcher else None,
            variants={
                group: {name: receipt.weights_id for name, receipt in found.items()}
                for group, found in model.variants.items()
            },
        )

    def history(self) -> History:
        state = self.followed.desired
        return History(
            receipts=[receipt.as_dict() | {"why": self.journal.why(receipt)} for receipt in self.model.history],
            refusals=list(self.journal.refusals),
            desired=[weights.as_dict() for weights in state.history] if state else [],
            withdrawn=[weights.as_dict() for weights in state.withdrawn] if state else [],
        )

    def stage(self, request: StageRequest, by: str) -> None:
        """Read and verify weights. Raises Forbidden, Unsupported, and what `Model.stage` and `DesiredPlace` raise."""
        self._stage(request, by, swapping=False)

    def commit(self, request: CommitRequest, by: str) -> SwapReceipt:
        """Serve what is staged, and have it desired where a place is followed.

        Raises StageClosed where nothing is, Conflict where it is not what was expected, and what `Staged.commit` and
        `DesiredPlace.set` raise: it stays staged.
        """
        entry = self._committable()
        if request.expect not in (None, entry.staged.weights_id):
            raise Conflict(f"{self.name}: {entry.staged.weights_id[:12]} is staged by now; look again")
        return self._commit(entry, request, by)

    def swap(self, request: StageRequest, by: str) -> SwapReceipt:
        """Stage and commit: all or nothing. Raises what they raise."""
        entry = self._stage(request, by, swapping=True)
        try:
            return self._commit(entry, request, by)
        except BaseException:
            self._give_up(entry)
            raise

    def discard(self, request: Change, by: str) -> None:
        """Give up what is staged, or is being staged."""
        self._discard()

    def canary(self, request: CanaryRequest, by: str) -> None:
        """Let what is staged, or `source` first, answer some requests; again, with another share.

        Raises StageClosed, what `stage` raises, and Unsupported where staged weights cannot be called.
        """
        plan = CanaryPlan(request.share, request.shadow, request.tolerance, request.promote_if, request.abort_if)
        check_plan(plan)
        if request.source is None:
            self._try_out(self._committable(), plan)
            return
        entry = self._stage(request.staging(request.source), by, swapping=False)
        try:
            self._try_out(entry, plan)
        except BaseException:
            self._give_up(entry)
            raise

    def rollback(self, request: RollbackRequest, by: str) -> SwapReceipt | None:
        """Serve earlier weights. Where a place is followed it desires them, and holds.

        What is staged is given up. Raises NothingToRollBack, Conflict, NotServed, and what `DesiredPlace.rollback` and
        `Model.swap` raise. The receipt is None where the place says so, and this process does not serve it yet.
        """
        place = self.followed.place
        if place is not None:
            now = place.read()
            seen = now.revision if request.revision is None else request.revision
            to = request.to or self._last_served(now)
            state = place.rollback(revision=seen, to=to, by=by, why=request.why, hold=request.hold)
            self._discard()
            return self.followed.await_served(state)
        self._discard()
        with self.journal.saying(by, request.why):
            if request.to is None:
                return self.model.rollback(by=by)
            earlier = self.journal.find_served(request.to)
            return self.model.swap(earlier.source, expect=earlier.weights_id, by=by)

    def add_variant(self, request: AddVariantRequest, by: str) -> VariantReceipt:
        """Give calls another variant to choose. Raises Forbidden, Unsupported, and what `Model.add_variant` raises."""
        self._check_alone()
        return self.model.add_variant(
            request.group,
            request.name,
            self._allowed.weights(request.source),
            base=request.base,
            expect=request.expect,
            allow_nonfinite=request.allow_nonfinite,
            by=by,
            rate_limit=request.rate_limit,
        )

    def remove_variant(self, request: RemoveVariantRequest, by: str) -> VariantReceipt:
        """Take one away. Raises Unsupported and UnknownVariant."""
        self._check_alone()
        return self.model.remove_variant(request.group, request.name, by=by)

    def hold(self, request: Change, by: str) -> None:
        """Let nothing be promoted. Raises Conflict where no place is followed, and what `DesiredPlace.hold` raises."""
        place = self.followed.needed_place("hold")
        self.followed.await_read(place.hold(revision=self.followed.seen(place, request), by=by, why=request.why))

    def release(self, request: Change, by: str) -> None:
        """Let promotions through again. Raises as `hold`."""
        place = self.followed.needed_place("release")
        self.followed.await_read(place.release(revision=self.followed.seen(place, request)))

    def follow(self, request: FollowRequest, by: str) -> None:
        """Serve what a place says from now on. Raises Conflict where the model follows or watches something."""
        place = self._allowed.folder(request.place)
        self.followed.check_free()
        self.model.follow(place, request.interval)
        self.on_source(Taking(None, place, request.interval))

    def watch(self, request: WatchRequest, by: str) -> None:
        """Take each new file of a directory from now on. Raises as `follow`."""
        directory = self._allowed.folder(request.directory)
        self.followed.check_free()
        self.model.watch(directory, request.interval)
        self.on_source(Taking(directory, None, request.interval))

    def unfollow(self, request: Change, by: str) -> None:
        """Follow and watch nothing. What is served stays. Raises Conflict where there is nothing to end."""
        watching = self.model.watching
        if not watching:
            raise Conflict(f"{self.name}: follows and watches nothing")
        for each in watching:
            each.stop()
        self.on_source(Taking())

    def look_after(self) -> None:
        """Give up what is staged where a followed place desires something else than is served, or it grew too old.

        What a place desired before it was staged, and cannot be served, is no reason.
        """
        entry, follower = self._entry, self.followed.follower
        if entry is None or entry.swapping:
            return
        status = follower.status if follower else None
        known = status and status.revision == entry.revision and status.error
        outdated = status and status.desired and not status.agrees and not known
        if outdated or time.time() > entry.since + self._staged_timeout:
            self._give_up(entry)

    def verdict(self) -> tuple[str, str] | None:
        """What the rules of a canary say: "abort" or "promote", and the rule."""
        canary = self.served.canary
        return canary.verdict() if canary is not None else None

    def obey(self, verdict: str, rule: str) -> SwapReceipt | None:
        """Commit a canary, or give it up, as its rule says. A commit that is refused gives it up, too.

        Raises what `commit` raises, and StageClosed where the canary has given way to another meanwhile.
        """
        entry, canary = self._entry, self.served.canary
        if entry is None or canary is None or canary.verdict() != (verdict, rule):
            raise StageClosed(f"{self.name}: the canary of the rule {rule!r} has ended")
        try:
            if verdict == "promote":
                return self._commit(entry, Change(why=f"canary: {rule}"), entry.by)
            self.journal.refuse(aborted(entry, rule, canary.values()))
        finally:
            self._give_up(entry)
        return None

    @property
    def staged_by(self) -> str:
        """Who has staged what is staged."""
        return self._entry.by if self._entry is not None else ""

    def _stage(self, request: StageRequest, by: str, *, swapping: bool) -> Entry:
        path, place = self._allowed.weights(request.source), self.followed.place
        if place is not None and request.only:
            raise Unsupported("only: a part of a set is nothing that a new process could start from; stage a full set")
        revision = self.followed.seen(place, request) if place is not None else None
        with self._lock:
            if self._entry is not None:
                raise StagingBusy(f"{self.name}: an operator has staged weights already; commit or discard them first")
            staged = self.model.stage(
                path,
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
            self._entry = entry = Entry(staged, path, request, by, revision, swapping)
        try:
            staged.wait()
        except BaseException:
            self._give_up(entry)
            raise
        return entry

    def _committable(self) -> Entry:
        entry = self._entry
        if entry is None or entry.swapping:
            raise StageClosed(f"{self.name}: nothing is staged; stage weights first")
        if not entry.staged.done:
            raise StagingBusy(f"{self.name}: still {entry.staged.progress.phase}; wait until it is staged")
        return entry

    def _try_out(self, entry: Entry, plan: CanaryPlan) -> None:
        with self._lock:
            if self._entry is not entry:
                raise StageClosed(f"{self.name}: what was staged was given up meanwhile")
            self.served.end_canary()
            self.served.start_canary(entry.staged, plan)

    def _commit(self, entry: Entry, request: Change, by: str) -> SwapReceipt:
        place, deadline = self.followed.place, time.monotonic() + _TURN

        def check() -> None:
            if time.monotonic() > deadline:
                raise StagingBusy(f"{self.name}: what it follows or watches is about to change the weights; look again")

        why = request.why or entry.request.why
        # a follower that looks in between waits, and finds what it wants
        with self.model.turn(check), self.journal.saying(by, why), self._ending:
            if self._entry is not entry:
                raise StageClosed(f"{self.name}: what was staged was committed or given up meanwhile")
            if place is not None:
                revision = entry.revision if request.revision is None else request.revision
                self._desire(place, entry, revision, why, by)
            receipt = entry.staged.commit()
            self._forget(entry)
        self.followed.look()
        return receipt

    def _desire(self, place: DesiredPlace, entry: Entry, revision: int | None, why: str, by: str) -> None:
        staged = entry.staged
        known = Known(staged.weights_id, self.model.graph_id, staged.labels, staged.base)
        seen = place.read().revision if revision is None else revision
        # before the commit: what serves, and is not desired, would give way at the next look
        state = place.set(entry.path, revision=seen, by=by, why=why, known=known)
        entry.revision = state.revision

    def _last_served(self, state: DesiredState) -> str | None:
        """The last of the history that this process has served: what was desired, and refused, is not meant."""
        served = {receipt.weights_id for receipt in self.model.history}
        return next((each.weights_id for each in reversed(state.history) if each.weights_id in served), None)

    def _check_alone(self) -> None:
        if self.served.is_shared:
            raise Unsupported(
                f"{self.name}: workers serve it, and would know nothing of variants. Start the server without "
                "--workers, or several of them, and ask each."
            )

    def _discard(self) -> None:
        if self._entry is not None:
            self._give_up(self._entry)

    def _give_up(self, entry: Entry) -> None:
        with self._ending:
            self._forget(entry)
            entry.staged.discard()

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            if self._entry is entry:
                self._entry = None
                self.served.end_canary()


def _canary_status(canary: Canary) -> CanaryStatus:
    return CanaryStatus(weights_id=canary.weights_id, since=canary.since, **canary.report())
