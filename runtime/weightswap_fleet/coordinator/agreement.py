"""The two-phase commit of a fleet's changes, and its trials. No Ray.

All nodes stage and verify first; then the desired store is written, which is the decision; then all nodes commit. The
desired store alone records it: a coordinator that dies leaves nodes that read there how their open change ended.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, TypeVarTuple

from msgspec.structs import replace

from weightswap_fleet.documents import (
    FleetReceipt,
    FleetRefused,
    FleetUndecided,
    NodeMethods,
    NodeReceipt,
    PrepareRequest,
    TrialReport,
    UnknownFleet,
)
from weightswap_runtime.errors import DesiredError, RevisionConflict, StageClosed, Unsupported, check_said, text_of
from weightswap_runtime.following.desired_state import SHOWN, DesiredState, DesiredWeights, check_promotable, find_good
from weightswap_runtime.following.desired_store import DesiredStore, Known, described
from weightswap_runtime.sources.location import printable
from weightswap_server.canary import CanaryAnalysis

_LEAST_LEASE = 10.0  # seconds, as a busy node may take some to answer
_RENEW = _LEAST_LEASE / 4  # seconds between two renewals, so that one that is lost ends no lease
_STATUS = 1.0  # the least seconds for a node's status
_ANSWER = 5.0  # seconds for a node's answer during a trial
_POLL = 0.02  # seconds between two looks whether all nodes have committed
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_Decide = Callable[[int, bool], DesiredState]  # the revision before, and whether all nodes have the weights in memory


class Nodes(Protocol):
    """The agents of a fleet's nodes."""

    def names(self) -> list[str]:
        """Return the names of the present nodes."""
        ...

    def call(
        self, names: Sequence[str], timeout: float, method: Callable[[NodeMethods, *Ts], R], *arguments: *Ts
    ) -> dict[str, R | Exception]:
        """Call a method of these nodes concurrently. Returns the answer, or the exception, of each.

        The exception of a node that does not answer in time is a TimeoutError; of one that has gone, it may be any.
        """
        ...


class Deadlines(NamedTuple):
    """The timeouts of the phases of a change, in seconds."""

    prepare: float = 600.0
    commit: float = 10.0


DEADLINES = Deadlines()


class Agreement:
    """The coordinator of a fleet's changes, one at a time. Of concurrent coordinators, the desired store accepts
    one."""

    def __init__(
        self, desired_store: DesiredStore, nodes: Nodes, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._desired_store, self._nodes, self._clock = desired_store, nodes, clock

    def swap(self, source: str, known: Known, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        """Change the weights of all nodes. known: the identity of the weights at `source`.

        Raises FleetRefused with all reasons, RevisionConflict if the desired store was changed meanwhile,
        FleetUndecided if the desired store did not say whether it was written, and what `DesiredStore.set` raises.
        """
        state = self._desired_store.read()

        def decide(revision: int, _: bool) -> DesiredState:
            return self._desired_store.set(source, revision=revision, by=by, why=why, known=known)

        return self._change("swap", state, described(source, known, by, why, state), source, decide, deadlines)

    def publish(self, source: str, known: Known, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        """Change the weights of all nodes, but never undo an operator's hold or rollback.

        Raises NotPromoted, and what `swap` raises.
        """
        state = self._desired_store.read()
        check_promotable(state, known.weights_id, printable(source))

        def decide(revision: int, _: bool) -> DesiredState:
            unchanged = partial(self._check_unchanged, revision)
            return self._desired_store.promote(source, known=known, by=by, why=why, may=unchanged)

        return self._change("publish", state, described(source, known, by, why, state), source, decide, deadlines)

    def rollback(
        self, to: str | None, by: str, why: str, hold: bool, deadlines: Deadlines, state: DesiredState | None = None
    ) -> FleetReceipt:
        """Serve earlier weights again on all nodes: the previous ones, or those whose id begins with `to`.

        state: what they go back from; None: the present state. Raises what `swap` raises, and what
        `DesiredStore.rollback` raises.
        """
        check_said(by, why)
        state = self._desired_store.read() if state is None else state
        weights = replace(find_good(state, to, self._desired_store.where), by=by, why=why)

        def decide(revision: int, resident: bool) -> DesiredState:
            try:
                return self._desired_store.rollback(
                    revision=revision, to=weights.weights_id, by=by, why=why, hold=hold, known_there=resident
                )
            except RevisionConflict:
                after = self._desired_store.read()
                if not hold or after.hold is not None or after.weights_id != weights.weights_id:
                    raise
                # another rollback was faster, and held nothing
                return self._desired_store.hold(revision=after.revision, by=by, why=why)

        source = str(self._desired_store.locate(weights))
        return self._change("rollback", state, weights, source, decide, deadlines)

    def _check_unchanged(self, revision: int, state: DesiredState) -> None:
        """Raise RevisionConflict if the desired store was written since the nodes were asked."""
        if state.revision != revision:
            raise RevisionConflict(
                f"{self._desired_store.where}: is at revision {state.revision}, but the nodes were asked at "
                f"{revision}. Publish it again."
            )

    def _change(
        self,
        kind: str,
        state: DesiredState,
        weights: DesiredWeights,
        source: str,
        decide: _Decide,
        deadlines: Deadlines,
    ) -> FleetReceipt:
        began = self._clock()
        request = PrepareRequest(
            uuid.uuid4().hex,
            state.revision,
            source,
            self._desired_store.located(weights),
            lease=max(_LEAST_LEASE, 2 * deadlines.commit),
            is_rollback=kind == "rollback",
            reader=reader_of(self._nodes),
        )
        with _renewing(self._nodes, request):
            prepared = _prepare_all(self._nodes, NodeMethods.prepare, request, deadlines.prepare)
            ready = self._clock()
            after = self._decide(request, prepared, decide)
        answers, late = self._commit(request, after, list(prepared), deadlines.commit)
        times = [at for at, _ in answers.values()]
        committed = {
            name: prepared[name]._replace(committed_at=at, generation=generation)
            for name, (at, generation) in answers.items()
        }
        return FleetReceipt(
            kind="none" if state.weights_id == weights.weights_id else kind,
            revision=after.revision,
            weights_id=weights.weights_id,
            previous_weights_id=state.weights_id,
            source=printable(source),
            by=weights.by,
            why=weights.why,
            seconds_staged=ready - began,
            seconds_committed=self._clock() - ready,
            skew=max(times) - min(times) if times else 0.0,
            nodes=prepared | committed,
            late=late,
        )

    def _decide(self, request: PrepareRequest, prepared: Mapping[str, NodeReceipt], decide: _Decide) -> DesiredState:
        """Write the desired store, if all nodes are still ready. If that certainly failed, all nodes discard the
        change."""
        try:
            self._check_open(request, list(prepared))
            return decide(request.revision, bool(prepared) and all(part.resident for part in prepared.values()))
        except DesiredError as error:
            return self._check_written(request, error)
        except BaseException:
            self._discard(request)
            raise

    def _check_open(self, request: PrepareRequest, names: Sequence[str]) -> None:
        """Raise FleetRefused unless every present node says in time, within its lease, that it still has the change.

        A coordinator that was suspended must not decide for nodes that have given up waiting for it, and discarded the
        weights: each would have to stage them again, and might fail.
        """
        began = self._clock()
        # a node that answers within half a lease has renewed it; only if we were suspended may a whole one have passed
        answers = self._nodes.call(names, request.lease / 2, NodeMethods.renew, request.id)
        is_late = self._clock() >= began + request.lease
        present = set(self._nodes.names())
        closed = {
            name: answer if isinstance(answer, Exception) else StageClosed(f"{name}: has discarded the change")
            for name, answer in answers.items()
            if name in present and (is_late or answer is not True)
        }
        if closed:
            raise FleetRefused(printable(request.source), closed)

    def _check_written(self, request: PrepareRequest, error: DesiredError) -> DesiredState:
        """Return the state if a write with an error took effect. Raises the error if not, or FleetUndecided.

        Undecided, the change is not discarded: the write may have taken effect, and then nodes commit what they have.
        """
        try:
            state = self._desired_store.read()
        except DesiredError:
            raise FleetUndecided(
                f"{self._desired_store.where}: did not confirm that it took the weights "
                f"{request.weights.weights_id[:SHOWN]} ({text_of(error)}). All nodes keep reading it until it answers, "
                "and then follow it."
            ) from error
        if state.revision > request.revision and state.weights_id == request.weights.weights_id:
            return state
        self._discard(request)
        raise error

    def _discard(self, request: PrepareRequest) -> None:
        self._nodes.call(self._nodes.names(), _LEAST_LEASE, NodeMethods.discard, request.id)

    def _commit(
        self, request: PrepareRequest, after: DesiredState, names: list[str], timeout: float
    ) -> tuple[dict[str, tuple[float, int]], dict[str, str]]:
        """Let all nodes commit, also new ones. Returns when those have that did, and why others have not."""
        deadline = self._clock() + timeout
        answers = self._nodes.call(names, timeout, NodeMethods.commit, request.id, after.revision)
        committed = {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}
        while True:
            seconds = max(deadline - self._clock(), _POLL)
            behind = self._behind(after, max(seconds, _STATUS))
            if not behind or self._clock() >= deadline:
                return committed, behind
            self._nodes.call(list(behind), seconds, NodeMethods.reconcile_soon)
            time.sleep(_POLL)

    def _behind(self, after: DesiredState, timeout: float) -> dict[str, str]:
        """Return the nodes that do not serve a revision yet, and why."""
        reasons: dict[str, str] = {}
        for name, answer in self._nodes.call(self._nodes.names(), timeout, NodeMethods.status).items():
            if isinstance(answer, Exception):
                reasons[name] = f"{type(answer).__name__}: {text_of(answer)}"
            elif answer.revision < after.revision:
                reasons[name] = answer.error or f"is at revision {answer.revision}"
        return reasons


class FleetTrial:
    """The leader's side of a trial. Not thread-safe."""

    def __init__(self, request: PrepareRequest, nodes: Nodes, now: Callable[[], float] = time.time) -> None:
        """now: returns seconds since the epoch."""
        self.request = request
        self.shares: dict[str, float] = {}  # of the requests of each node that has the trial
        self._nodes, self._now = nodes, now
        self._analysis = CanaryAnalysis(request.plan.canary_plan)

    @classmethod
    def find(cls, nodes: Nodes) -> FleetTrial | None:
        """Return the latest trial of a former leader, with measures begun anew, and end earlier ones.

        What no node has begun, others may have refused; it ends with its leases.
        """
        answers = nodes.call(nodes.names(), _ANSWER, NodeMethods.trial)
        found = {name: answer for name, answer in answers.items() if isinstance(answer, tuple)}
        begun = [request for request, has_begun in found.values() if has_begun]
        if not begun:
            return None
        latest = max(begun, key=lambda request: request.weights.since)
        for name, (request, _) in found.items():
            if request.id != latest.id:
                nodes.call([name], _ANSWER, NodeMethods.discard, request.id)
        trial = cls(latest, nodes)
        trial.shares = {name: 0.0 for name, (request, _) in found.items() if request.id == latest.id}
        return trial

    def begin(self, timeout: float) -> None:
        """Let all nodes stage and verify, and start the trial. Raises FleetRefused, and Unsupported for a share of the
        nodes that would be all of them. Then no node has the trial."""
        self._check_shares(self._nodes.names())
        with _renewing(self._nodes, self.request):
            ready = _prepare_all(self._nodes, NodeMethods.prepare_trial, self.request, timeout)
        self.shares = dict.fromkeys(ready, 0.0)
        if (verdict := self.poll()) is not None and verdict[0] == "ended":
            raise FleetRefused(self.request.source, dict.fromkeys(ready, StageClosed(verdict[1])))

    def _check_shares(self, names: Sequence[str]) -> None:
        plan = self.request.plan
        for share in plan.steps or (plan.share,):
            if plan.of == "nodes" and share < 1 and all(shares(names, share, by_nodes=True).values()):
                raise Unsupported(f"share={share:g} of {len(names)} nodes would be all; give a share of the requests")

    def poll(self) -> tuple[str, str] | None:
        """Renew the trial on all nodes, collect the measures, and judge them. Return "promote", "abort", or "ended" if
        no node has it any more, with the reason in words; None while it goes on.

        Nodes that have lost the trial, or joined later, serve the desired weights alone until the promotion.
        """
        plan, elapsed = self.request.plan, self._now() - self.request.weights.since
        share_of = shares(sorted(self.shares), plan.share_at(elapsed), by_nodes=plan.of == "nodes")
        for share in sorted(set(share_of.values())):
            self._renew([name for name in share_of if share_of[name] == share], share)
        if not self.shares:
            return "ended", "no node has it any more"
        if (verdict := self._analysis.verdict()) is not None:
            return verdict
        if plan.is_through(elapsed):
            return "promote", f"{len(plan.steps)} steps of {plan.step_seconds:g} s"
        return None

    def _renew(self, names: Sequence[str], share: float) -> None:
        answers = self._nodes.call(names, _ANSWER, NodeMethods.continue_trial, self.request.id, share)
        for name, answer in answers.items():
            if not isinstance(answer, Exception):
                self.shares[name] = share
                self._analysis.add(answer)
            elif isinstance(answer, StageClosed) or name not in self._nodes.names():
                del self.shares[name]  # any other node may only be late

    def end(self) -> None:
        """End the trial on all nodes."""
        self._nodes.call(list(self.shares), _ANSWER, NodeMethods.discard, self.request.id)

    def report(self, outcome: str = "", reason: str = "") -> TrialReport:
        """Return the report of the trial. outcome, reason: empty while it goes on."""
        weights = self.request.weights
        canary_plan = self._analysis.report()
        return TrialReport(
            weights_id=weights.weights_id,
            source=weights.source,
            by=weights.by,
            why=weights.why,
            since=weights.since,
            plan=self.request.plan,
            shares=dict(self.shares),
            values=canary_plan["values"],
            promote_held=canary_plan["promote_held"],
            skipped=canary_plan["skipped"],
            outcome=outcome,
            reason=reason,
        )


def shares(names: Sequence[str], share: float, *, by_nodes: bool) -> dict[str, float]:
    """Return each node's share of its requests: the same for all, or `by_nodes`, 1 for the first and 0 for others."""
    if not by_nodes:
        return dict.fromkeys(names, share)
    first = math.ceil(share * len(names) - 1e-9)  # 0.1 + 0.2 is more than 0.3
    return {name: float(index < first) for index, name in enumerate(names)}


def reader_of(nodes: Nodes) -> str:
    """Return the node that reads a URL for all of them; empty if there is only one node."""
    names = nodes.names()
    return min(names) if len(names) > 1 else ""


@contextmanager
def _renewing(nodes: Nodes, request: PrepareRequest) -> Iterator[None]:
    """Renew the leases of a change on all nodes while the block runs: some are ready long before the last."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(_RENEW):
            nodes.call(nodes.names(), _RENEW, NodeMethods.renew, request.id)

    thread = threading.Thread(target=renew, name="weightswap-renewing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _prepare_all(
    nodes: Nodes,
    prepare: Callable[[NodeMethods, PrepareRequest], NodeReceipt],
    request: PrepareRequest,
    timeout: float,
) -> dict[str, NodeReceipt]:
    """Let all nodes stage and verify. If one cannot, all discard the weights, and FleetRefused is raised.

    A node that has gone meanwhile does not count: it will start with what is desired then. Raises UnknownFleet if no
    node is left: what nobody has verified must not become desired.
    """
    names = nodes.names()
    answers = nodes.call(names, timeout, prepare, request)
    present = set(nodes.names())
    problems = {name: error for name, error in answers.items() if isinstance(error, Exception) and name in present}
    if problems:
        nodes.call(names, _LEAST_LEASE, NodeMethods.discard, request.id)
        raise FleetRefused(printable(request.source), problems)
    prepared = {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}
    if not prepared:
        where = printable(request.source)
        raise UnknownFleet(f"{where}: no node is there to verify it, so nothing was written; try again once one is")
    return prepared
