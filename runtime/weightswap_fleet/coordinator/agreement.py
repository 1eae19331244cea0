"""The two-phase commit of a fleet's changes, and its trials. No Ray.

All nodes stage and verify first; then the place is written, which is the decision; then all nodes commit. The place
alone records it: a coordinator that dies leaves nodes that read there how their open order ended.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from msgspec.structs import replace

from weightswap_fleet.documents import (
    Committed,
    FleetReceipt,
    NodeMethods,
    NodeReceipt,
    Order,
    Prepared,
    TrialOrder,
    TrialReport,
)
from weightswap_fleet.errors import FleetRefused, FleetUndecided, UnknownFleet
from weightswap_runtime.errors import DesiredError, RevisionConflict, StageClosed, Unsupported, check_said, text_of
from weightswap_runtime.following.desired_state import SHOWN, DesiredState, DesiredWeights, check_promotable, find_good
from weightswap_runtime.following.place import DesiredPlace, Known, described
from weightswap_runtime.sources.location import printable
from weightswap_server.canary import Judgement

_LEAST_LEASE = 10.0  # seconds, as a busy node may take some to answer
_RENEW = _LEAST_LEASE / 4  # seconds between two renewals, so that one that is lost ends no lease
_STATUS = 1.0  # the least seconds for a node's status
_ANSWER = 5.0  # seconds for a node's answer during a trial
_POLL = 0.02
P = ParamSpec("P")
R = TypeVar("R")
AnyOrder = TypeVar("AnyOrder", Order, TrialOrder)
_Decide = Callable[[int, bool], DesiredState]  # the revision before, and whether all nodes have the weights in memory


class Nodes(Protocol):
    """The keepers of a fleet's nodes."""

    def names(self) -> list[str]:
        """Return the names of the present nodes."""
        ...

    def call(
        self,
        names: Sequence[str],
        timeout: float,
        method: Callable[Concatenate[NodeMethods, P], R],
        *arguments: P.args,
        **options: P.kwargs,
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
    """The coordinator of a fleet's changes, one at a time. Of concurrent coordinators, the place accepts one."""

    def __init__(self, place: DesiredPlace, nodes: Nodes, clock: Callable[[], float] = time.perf_counter) -> None:
        self._place, self._nodes, self._clock = place, nodes, clock

    def swap(self, source: str, known: Known, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        """Change the weights of all nodes. known: the identity of the weights at `source`.

        Raises FleetRefused with all reasons, RevisionConflict if the place was changed meanwhile, FleetUndecided if the
        place did not say whether it was written, and what `DesiredPlace.set` raises.
        """
        state = self._place.read()

        def decide(revision: int, _: bool) -> DesiredState:
            return self._place.set(source, revision=revision, by=by, why=why, known=known)

        return self._change("swap", state, described(source, known, by, why, state), source, decide, deadlines)

    def publish(self, source: str, known: Known, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        """Change the weights of all nodes, but never undo an operator's hold or rollback.

        Raises NotPromoted, and what `swap` raises.
        """
        state = self._place.read()
        check_promotable(state, known.weights_id, printable(source))

        def decide(revision: int, _: bool) -> DesiredState:
            unchanged = partial(self._check_unchanged, revision)
            return self._place.promote(source, known=known, by=by, why=why, may=unchanged)

        return self._change("publish", state, described(source, known, by, why, state), source, decide, deadlines)

    def rollback(self, to: str | None, by: str, why: str, hold: bool, deadlines: Deadlines) -> FleetReceipt:
        """Serve earlier weights again on all nodes: the previous ones, or those whose id begins with `to`.

        Raises what `swap` raises, and what `DesiredPlace.rollback` raises.
        """
        check_said(by, why)
        state = self._place.read()
        weights = replace(find_good(state, to, self._place.where), by=by, why=why)

        def decide(revision: int, resident: bool) -> DesiredState:
            return self._place.rollback(
                revision=revision, to=weights.weights_id, by=by, why=why, hold=hold, known_there=resident
            )

        source = str(self._place.locate(weights))
        return self._change("rollback", state, weights, source, decide, deadlines)

    def _check_unchanged(self, revision: int, state: DesiredState) -> None:
        """Raise RevisionConflict if the place was written since the nodes were asked."""
        if state.revision != revision:
            raise RevisionConflict(
                f"{self._place.where}: is at revision {state.revision}, but the nodes were asked at {revision}. "
                "Publish it again."
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
        order = Order(
            uuid.uuid4().hex,
            state.revision,
            source,
            self._place.located(weights),
            lease=max(_LEAST_LEASE, 2 * deadlines.commit),
            is_rollback=kind == "rollback",
            reader=reader_of(self._nodes),
        )
        with _renewing(self._nodes, order):
            prepared = _prepare_all(self._nodes, NodeMethods.prepare, order, NodeMethods.discard, deadlines.prepare)
            ready = self._clock()
            after = self._decide(order, prepared, decide)
        committed, late = self._commit(order, after, list(prepared), deadlines.commit)
        times = [commit.at for commit in committed.values()]
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
            nodes={name: _receipt(part, committed.get(name)) for name, part in prepared.items()},
            late=late,
        )

    def _decide(self, order: Order, prepared: Mapping[str, Prepared], decide: _Decide) -> DesiredState:
        """Write the place, if all nodes are still ready. If that certainly failed, all nodes discard the order."""
        try:
            self._check_open(order, list(prepared))
            return decide(order.revision, bool(prepared) and all(part.resident for part in prepared.values()))
        except DesiredError as error:
            return self._check_written(order, error)
        except BaseException:
            self._discard(order)
            raise

    def _check_open(self, order: Order, names: Sequence[str]) -> None:
        """Raise FleetRefused unless every present node says in time, within its lease, that it still has the order.

        A coordinator that was suspended must not decide for nodes that have given up waiting for it, and discarded the
        weights: each would have to stage them again, and might fail.
        """
        began = self._clock()
        answers = self._nodes.call(names, order.lease / 2, NodeMethods.renew, order.id)
        is_late = self._clock() >= began + order.lease
        present = set(self._nodes.names())
        closed = {
            name: answer if isinstance(answer, Exception) else StageClosed(f"{name}: has discarded the order")
            for name, answer in answers.items()
            if name in present and (is_late or answer is not True)
        }
        if closed:
            raise FleetRefused(printable(order.source), closed)

    def _check_written(self, order: Order, error: DesiredError) -> DesiredState:
        """Return the state if a write with an error took effect. Raises the error if not, or FleetUndecided.

        Undecided, the order is not discarded: the write may have taken effect, and then nodes commit what they have.
        """
        try:
            state = self._place.read()
        except DesiredError:
            raise FleetUndecided(
                f"{self._place.where}: did not confirm that it took the weights {order.weights.weights_id[:SHOWN]} "
                f"({text_of(error)}). All nodes keep reading it until it answers, and then follow it."
            ) from error
        if state.revision > order.revision and state.weights_id == order.weights.weights_id:
            return state
        self._discard(order)
        raise error

    def _discard(self, order: Order) -> None:
        self._nodes.call(self._nodes.names(), _LEAST_LEASE, NodeMethods.discard, order.id)

    def _commit(
        self, order: Order, after: DesiredState, names: list[str], timeout: float
    ) -> tuple[dict[str, Committed], dict[str, str]]:
        """Let all nodes commit, also new ones. Returns those that have, and why the others have not yet."""
        deadline = self._clock() + timeout
        answers = self._nodes.call(names, timeout, NodeMethods.commit, order.id, after.revision)
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


def _receipt(prepared: Prepared, committed: Committed | None) -> NodeReceipt:
    at, generation = committed or (None, None)
    return NodeReceipt(prepared.seconds, prepared.resident, prepared.verified, at, generation)


class Verdict(NamedTuple):
    """A verdict on a trial."""

    what: str  # "promote", "abort", or "ended" if no node has it any more
    why: str  # in words


class FleetTrial:
    """The leader's side of a trial. Not thread-safe."""

    def __init__(self, order: TrialOrder, nodes: Nodes, now: Callable[[], float] = time.time) -> None:
        """now: returns seconds since the epoch."""
        self.order = order
        self.shares: dict[str, float] = {}  # of the requests of each node that has the trial
        self._nodes, self._now = nodes, now
        self._judgement = Judgement(order.plan.judged)

    @classmethod
    def find(cls, nodes: Nodes) -> FleetTrial | None:
        """Return the latest trial of a former leader, with measures begun anew, and end earlier ones."""
        answers = nodes.call(nodes.names(), _ANSWER, NodeMethods.trial)
        orders = {name: order for name, order in answers.items() if isinstance(order, TrialOrder)}
        if not orders:
            return None
        latest = max(orders.values(), key=lambda order: order.weights.since)
        for name, order in orders.items():
            if order.id != latest.id:
                nodes.call([name], _ANSWER, NodeMethods.end_trial, order.id)
        trial = cls(latest, nodes)
        trial.shares = {name: 0.0 for name, order in orders.items() if order.id == latest.id}
        return trial

    def begin(self, timeout: float) -> None:
        """Let all nodes stage and verify, and start the trial. Raises FleetRefused, and Unsupported for a share of the
        nodes that would be all of them. Then no node has the trial."""
        self._check_shares(self._nodes.names())
        with _renewing(self._nodes, self.order):
            ready = _prepare_all(self._nodes, NodeMethods.prepare_trial, self.order, NodeMethods.end_trial, timeout)
        self.shares = dict.fromkeys(ready, 0.0)
        if (verdict := self.look()) is not None and verdict.what == "ended":
            raise FleetRefused(self.order.source, dict.fromkeys(ready, StageClosed(verdict.why)))

    def _check_shares(self, names: Sequence[str]) -> None:
        plan = self.order.plan
        for share in plan.steps or (plan.share,):
            if plan.of == "nodes" and share < 1 and all(shares(names, share, by_nodes=True).values()):
                raise Unsupported(f"share={share:g} of {len(names)} nodes would be all; give a share of the requests")

    def look(self) -> Verdict | None:
        """Renew the trial on all nodes, collect the measures, and judge them.

        Nodes that have lost the trial, or joined later, serve the desired weights alone until the promotion.
        """
        plan, elapsed = self.order.plan, self._now() - self.order.weights.since
        share_of = shares(sorted(self.shares), plan.share_at(elapsed), by_nodes=plan.of == "nodes")
        for share in sorted(set(share_of.values())):
            self._renew([name for name in share_of if share_of[name] == share], share)
        if not self.shares:
            return Verdict("ended", "no node has it any more")
        if (verdict := self._judgement.verdict()) is not None:
            return Verdict(*verdict)
        if plan.is_through(elapsed):
            return Verdict("promote", f"{len(plan.steps)} steps of {plan.step_seconds:g} s")
        return None

    def _renew(self, names: Sequence[str], share: float) -> None:
        answers = self._nodes.call(names, _ANSWER, NodeMethods.continue_trial, self.order.id, share)
        for name, answer in answers.items():
            if not isinstance(answer, Exception):
                self.shares[name] = share
                self._judgement.add(answer)
            elif isinstance(answer, StageClosed) or name not in self._nodes.names():
                del self.shares[name]  # any other node may only be late

    def end(self) -> None:
        """End the trial on all nodes."""
        self._nodes.call(list(self.shares), _ANSWER, NodeMethods.end_trial, self.order.id)

    def report(self, outcome: str = "", reason: str = "") -> TrialReport:
        """Return the report of the trial. outcome, reason: empty while it goes on."""
        weights = self.order.weights
        judged = self._judgement.report()
        return TrialReport(
            weights_id=weights.weights_id,
            source=weights.source,
            by=weights.by,
            why=weights.why,
            since=weights.since,
            plan=self.order.plan,
            shares=dict(self.shares),
            values=judged["values"],
            promote_held=judged["promote_held"],
            skipped=judged["skipped"],
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
def _renewing(nodes: Nodes, order: Order | TrialOrder) -> Iterator[None]:
    """Renew the leases of an order on all nodes while the block runs: some are ready long before the last."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(_RENEW):
            nodes.call(nodes.names(), _RENEW, NodeMethods.renew, order.id)

    thread = threading.Thread(target=renew, name="weightswap-renewing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _prepare_all(
    nodes: Nodes,
    prepare: Callable[[NodeMethods, AnyOrder], Prepared],
    order: AnyOrder,
    undo: Callable[[NodeMethods, str], None],
    timeout: float,
) -> dict[str, Prepared]:
    """Let all nodes stage and verify. If one cannot, all discard the weights, and FleetRefused is raised.

    A node that has gone meanwhile does not count: it will start with what is desired then. Raises UnknownFleet if no
    node is left: what nobody has verified must not become desired.
    """
    names = nodes.names()
    answers = nodes.call(names, timeout, prepare, order)
    present = set(nodes.names())
    problems = {name: error for name, error in answers.items() if isinstance(error, Exception) and name in present}
    if problems:
        nodes.call(names, _LEAST_LEASE, undo, order.id)
        raise FleetRefused(printable(order.source), problems)
    prepared = {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}
    if not prepared:
        where = printable(order.source)
        raise UnknownFleet(f"{where}: no node is there to verify it, so nothing was written; try again once one is")
    return prepared
