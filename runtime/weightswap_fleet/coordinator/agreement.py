"""How a fleet changes its weights: all nodes, or none.

1. All nodes stage and verify. If one cannot, all give up, and the reasons come back together.
2. The place of the desired state is written, if it is still at the revision that was read: that is the decision.
3. All nodes commit. Who does not hear of it reads it in the place.

This is a two-phase commit whose coordinator remembers nothing (Gray, Notes on Data Base Operating Systems, 1978): what
was decided is in the place alone. A coordinator that dies before the decision leaves orders that run out; one that dies
after it leaves nodes that read it. Nodes that come in between read the place, and are asked again until all agree.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from weightswap_fleet.documents import Committed, FleetReceipt, NodeReceipt, NodeStatus, Order, Prepared, TrialOrder
from weightswap_fleet.errors import FleetRefused, FleetUndecided
from weightswap_runtime.desired.document import SHOWN, DesiredState, DesiredWeights, check_promotable, find_good
from weightswap_runtime.desired.place import DesiredPlace, Known, described
from weightswap_runtime.errors import DesiredError, RevisionConflict, StageClosed, text_of
from weightswap_runtime.options import check_said
from weightswap_runtime.sources.location import printable

LEAST_LEASE = 10.0  # seconds
_STATUS = 1.0  # seconds for how a node stands, whatever time is left
_POLL = 0.02
_RENEW = LEAST_LEASE / 4
_Decide = Callable[[int, bool], DesiredState]  # by the revision that it follows on, and whether all have them in memory


class Nodes(Protocol):
    """The keepers of a fleet's nodes, wherever they are."""

    def names(self) -> list[str]:
        """Of the nodes that are there now."""
        ...

    def ask(self, names: Sequence[str], method: str, *arguments: Any, timeout: float) -> dict[str, Any]:
        """Call `NodeKeeper.ask` on all of these at once: what each returns, or the exception that it raises.

        One that has not answered in time gives a TimeoutError; one that is not there, whatever tells that.
        """
        ...


class Deadlines(NamedTuple):
    """Seconds for each phase of a change."""

    prepare: float = 600.0
    commit: float = 10.0


DEADLINES = Deadlines()


class Agreement:
    """Changes a fleet, one change at a time. Other coordinators may be at work: the place takes one of them."""

    def __init__(self, place: DesiredPlace, nodes: Nodes, clock: Callable[[], float] = time.perf_counter) -> None:
        self._place, self._nodes, self._clock = place, nodes, clock

    def swap(self, source: str, known: Known, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        """Let all nodes serve other weights, which are `known` to be these.

        Raises FleetRefused with all reasons, RevisionConflict where somebody else has decided something meanwhile,
        FleetUndecided where the place does not say whether it was written, and what `DesiredPlace.set` raises.
        """
        state = self._place.read()

        def decide(revision: int, _: bool) -> DesiredState:
            return self._place.set(source, revision=revision, by=by, why=why, known=known)

        return self._change("swap", state, described(source, known, by, why, state), source, decide, deadlines)

    def publish(self, source: str, known: Known, by: str, why: str, deadlines: Deadlines) -> FleetReceipt:
        """Let all nodes serve new weights, unless that would undo what an operator has done.

        Raises Held, Superseded, and what `swap` raises.
        """
        state = self._place.read()
        check_promotable(state, known.weights_id, printable(source))

        def decide(revision: int, _: bool) -> DesiredState:
            follows = partial(_check_follows, revision, self._place.where)
            return self._place.promote(source, known=known, by=by, why=why, may=follows)

        return self._change("publish", state, described(source, known, by, why, state), source, decide, deadlines)

    def rollback(self, to: str | None, by: str, why: str, hold: bool, deadlines: Deadlines) -> FleetReceipt:
        """Let all nodes serve earlier weights again: those before, or those whose id begins with `to`.

        Raises what `swap` raises, and what `DesiredPlace.rollback` raises.
        """
        check_said(by, why)
        state = self._place.read()
        wanted = replace(find_good(state, to, self._place.where), by=by, why=why)

        def decide(revision: int, resident: bool) -> DesiredState:
            return self._place.rollback(
                revision=revision, to=wanted.weights_id, by=by, why=why, hold=hold, known_there=resident
            )

        source = str(self._place.locate(wanted))
        return self._change("rollback", state, wanted, source, decide, deadlines)

    def _change(
        self,
        kind: str,
        state: DesiredState,
        wanted: DesiredWeights,
        source: str,
        decide: _Decide,
        deadlines: Deadlines,
    ) -> FleetReceipt:
        began = self._clock()
        lease = max(LEAST_LEASE, 2 * deadlines.commit)
        proven, reader = kind == "rollback", reader_of(self._nodes)
        order = Order(uuid.uuid4().hex, state.revision, source, self._place.located(wanted), lease, proven, reader)
        with renewing(self._nodes, order):
            prepared = prepare_all(self._nodes, "prepare", order, "discard", deadlines.prepare)
            ready = self._clock()
            after = self._decide(order, prepared, decide)
        committed, late = self._settle(order, after, list(prepared), deadlines.commit)
        nodes = {name: _receipt(said, committed.get(name)) for name, said in prepared.items()}
        times = [found.at for found in committed.values()]
        return FleetReceipt(
            kind="none" if state.weights_id == wanted.weights_id else kind,
            revision=after.revision,
            weights_id=wanted.weights_id,
            previous_weights_id=state.weights_id,
            source=printable(source),
            by=wanted.by,
            why=wanted.why,
            seconds_staged=ready - began,
            seconds_committed=self._clock() - ready,
            skew=max(times) - min(times) if times else 0.0,
            nodes=nodes,
            late=late,
        )

    def _give_up(self, order: Order) -> None:
        self._nodes.ask(self._nodes.names(), "discard", order.id, timeout=LEAST_LEASE)

    def _check_open(self, order: Order, names: Sequence[str]) -> None:
        """Raise FleetRefused where a node has given the order up: nothing was heard of it for longer than its lease."""
        asked = self._clock()
        answers = self._nodes.ask(names, "renew", order.id, timeout=order.lease / 2)
        is_late = self._clock() >= asked + order.lease
        there = set(self._nodes.names())
        closed = {
            name: each if isinstance(each, BaseException) else StageClosed(f"{name}: has given the order up")
            for name, each in answers.items()
            if name in there and (is_late or each is not True)
        }
        if closed:
            raise FleetRefused(printable(order.source), closed)

    def _decide(self, order: Order, prepared: Mapping[str, Prepared], decide: _Decide) -> DesiredState:
        """Write the place, if all nodes are still ready. Where that fails, and is known to have, all give up."""
        try:
            self._check_open(order, list(prepared))
            return decide(order.revision, bool(prepared) and all(each.resident for each in prepared.values()))
        except DesiredError as error:
            return self._find_out(order, error)
        except BaseException:
            self._give_up(order)
            raise

    def _find_out(self, order: Order, error: DesiredError) -> DesiredState:
        """Whether a write that has failed was done all the same."""
        try:
            state = self._place.read()
        except DesiredError:
            raise FleetUndecided(
                f"{self._place.where}: did not say whether it has taken the weights {order.weights.weights_id[:SHOWN]} "
                f"({text_of(error)}). All nodes look there until it answers, and then do what it says."
            ) from error
        if state.revision > order.revision and state.weights_id == order.weights.weights_id:
            return state
        self._give_up(order)
        raise error

    def _settle(
        self, order: Order, after: DesiredState, names: list[str], timeout: float
    ) -> tuple[dict[str, Committed], dict[str, str]]:
        """Have all nodes commit, also those that have come meanwhile. Which have, and why others have not yet."""
        deadline = self._clock() + timeout
        answers = self._nodes.ask(names, "commit", order.id, after.revision, timeout=timeout)
        committed = {name: each for name, each in answers.items() if isinstance(each, Committed)}
        while True:
            left = max(deadline - self._clock(), _POLL)
            behind = self._behind(after, max(left, _STATUS))
            if not behind or self._clock() >= deadline:
                return committed, behind
            self._nodes.ask(list(behind), "look_soon", timeout=left)
            time.sleep(_POLL)

    def _behind(self, after: DesiredState, timeout: float) -> dict[str, str]:
        """Nodes that do not serve a revision yet, and why."""
        found: Mapping[str, Any] = self._nodes.ask(self._nodes.names(), "status", timeout=timeout)
        reasons: dict[str, str] = {}
        for name, each in found.items():
            if isinstance(each, BaseException):
                reasons[name] = f"{type(each).__name__}: {text_of(each)}"
            elif isinstance(each, NodeStatus) and each.revision < after.revision:
                reasons[name] = each.error or f"is at revision {each.revision}"
        return reasons


def reader_of(nodes: Nodes) -> str:
    """Which node reads a URL for all of them; empty where there is but one."""
    names = nodes.names()
    return min(names) if len(names) > 1 else ""


@contextmanager
def renewing(nodes: Nodes, order: Order | TrialOrder) -> Iterator[None]:
    """A block in which nodes are told that the order is still meant: those that are ready, and those that stage."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(_RENEW):
            nodes.ask(nodes.names(), "renew", order.id, timeout=_RENEW)

    thread = threading.Thread(target=renew, name="weightswap-renewing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def prepare_all(nodes: Nodes, method: str, order: Order | TrialOrder, undo: str, timeout: float) -> dict[str, Prepared]:
    """Have all nodes stage and verify. Raises FleetRefused, once all have given it up again."""
    names = nodes.names()
    answers = nodes.ask(names, method, order, timeout=timeout)
    there = set(nodes.names())
    problems = {name: each for name, each in answers.items() if isinstance(each, BaseException) and name in there}
    if problems:
        nodes.ask(names, undo, order.id, timeout=LEAST_LEASE)
        raise FleetRefused(printable(order.source), problems)
    return {name: each for name, each in answers.items() if isinstance(each, Prepared)}


def _check_follows(revision: int, where: str, state: DesiredState) -> None:
    """Raise RevisionConflict where others have written since all nodes were asked."""
    if state.revision != revision:
        raise RevisionConflict(
            f"{where}: is at revision {state.revision}, and the nodes were asked at {revision}. Publish it again."
        )


def _receipt(said: Prepared, found: Committed | None) -> NodeReceipt:
    at, generation = (found.at, found.generation) if found is not None else (None, None)
    return NodeReceipt(said.seconds, said.resident, said.verified, at, generation)
