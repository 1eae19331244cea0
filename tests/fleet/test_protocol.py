"""The protocol of a fleet: messages that are lost, coordinators and agents that die, operators, outages, trials.

What was decided is what the desired store says; a revision stands for one set of weights, on each node, at each time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.machines import run_in_any_order
from weightswap_fleet import Deadlines, FleetRefused, FleetUndecided
from weightswap_fleet.documents import FleetReceipt, PrepareRequest
from weightswap_runtime import DesiredError, NothingToRollBack, NotPromoted

from .nodes import Died, Fleet, FleetTrial, known_weights

NODES, SETS = 3, 4
SOON = Deadlines(prepare=5.0, commit=0.05)
nodes = st.sampled_from([f"n{number}" for number in range(NODES)])
sets = st.integers(0, SETS - 1)
_METHODS = ["prepare", "renew", "commit", "discard", "status", "prepare_trial", "continue_trial"]
fates = st.dictionaries(
    st.tuples(st.sampled_from(_METHODS), nodes), st.sampled_from(["lost", "answer lost"]), max_size=3
)
deaths = st.sampled_from([-1, 0, 1, 2, 3, "before", "after"])  # before which question, or the decision


class Protocol(RuleBasedStateMachine):
    """Three nodes, two coordinators that take turns, operators, and clients that remember a revision."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._folder = tempfile.TemporaryDirectory()
        self.fleet = Fleet(Path(self._folder.name), NODES, self._patch)
        self.said: dict[int, str | None] = {0: None}  # by revision, which weights are desired
        self.seen = self.newest = 0  # what the client asks for, and the newest that has answered it
        self.trial: FleetTrial | None = None  # as its leader knows it
        self.fleet.desired_store.set(self.fleet.file(0), revision=0)
        self._note()

    def _note(self) -> None:
        state = self.fleet.desired_store.read()
        self.said.setdefault(state.revision, state.weights.weights_id if state.weights else None)

    @property
    def _is_there(self) -> bool:
        return self.fleet.where.exists()

    @rule(method=st.sampled_from(["swap", "publish"]), number=sets, faults=fates, death=deaths, damaged=st.booleans())
    def swap(
        self, method: str, number: int, faults: dict[tuple[str, str], str], death: int | str, damaged: bool
    ) -> None:
        path = self.fleet.damaged(number) if damaged else self.fleet.file(number)
        where, known = str(path), known_weights(path)
        self._change(lambda changes: getattr(changes, method)(where, known, "ana", "", SOON), faults, death, damaged)

    @rule(faults=fates, death=deaths, hold=st.booleans())
    def rollback(self, faults: dict[tuple[str, str], str], death: int | str, hold: bool) -> None:
        self._change(lambda agreement: agreement.rollback(None, "bo", "", hold, SOON), faults, death)

    def _change(self, change, faults, death, damaged=False) -> None:  # type: ignore[no-untyped-def]
        fleet = self.fleet
        fleet.fate = lambda method, node: faults.get((method, node), "")
        fleet.asked.clear()
        if isinstance(death, str):
            fleet.desired_store.dies = death
        else:
            fleet.dies_at = death
        self.open = fleet.preparing()
        served, desired = fleet.served(), fleet.desired_store.read() if self._is_there else None
        try:
            receipt = change(fleet.agreement)
        except FleetRefused:
            assert fleet.desired_store.read() == desired
            wanted = desired.weights_id if desired else None  # which a node may have seen only now
            assert all(weights_id in (served[node], wanted) for node, weights_id in fleet.served().items())
            if not faults:
                assert fleet.preparing() == self.open
        except (Died, NothingToRollBack, NotPromoted):
            pass
        except (DesiredError, FleetUndecided):
            assert not self._is_there
        else:
            assert not damaged
            self._check(receipt, everybody=not faults)
        finally:
            fleet.fate, fleet.dies_at, fleet.desired_store.dies = lambda method, node: "", -1, ""
            if self._is_there:
                self._note()

    def _check(self, receipt: FleetReceipt, everybody: bool) -> None:
        served = self.fleet.served()
        assert set(receipt.nodes) == set(served)
        assert {weights for node, weights in served.items() if node not in receipt.late} <= {receipt.weights_id}
        assert not (everybody and receipt.late)

    @rule(number=sets, faults=fates, dies_at=st.sampled_from([-1, 0, 1]), damaged=st.booleans())
    def a_trial_begins(self, number: int, faults: dict[tuple[str, str], str], dies_at: int, damaged: bool) -> None:
        fleet = self.fleet
        request = fleet.trial(number, fleet.damaged(number) if damaged else None, share=0.5)
        trial = FleetTrial(request._replace(id=uuid4().hex), fleet)
        fleet.fate, fleet.dies_at = (lambda method, node: faults.get((method, node), "")), dies_at
        fleet.asked.clear()
        others = fleet.trying()
        try:
            trial.begin(5.0)
        except FleetRefused:
            assert faults or fleet.trying() == others
        except Died:
            pass
        else:
            assert not damaged
            self.trial = trial
        finally:
            fleet.fate, fleet.dies_at = lambda method, node: "", -1

    @rule(faults=fates)
    def the_trials_leader_polls(self, faults: dict[tuple[str, str], str]) -> None:
        self.fleet.fate = lambda method, node: faults.get((method, node), "")
        if self.trial is not None and (verdict := self.trial.poll()) is not None:
            assert verdict[0] == "ended"
            self.trial = None
        self.fleet.fate = lambda method, node: ""

    @rule()
    def another_leads_the_trial(self) -> None:
        """At most one trial remains; of those that no node has begun, none is begun."""
        self.trial = FleetTrial.find(self.fleet)
        if self.trial is not None:
            assert {request.id for request, _ in self._trials} == {self.trial.request.id}
        assert any(has_begun for _, has_begun in self._trials) == (self.trial is not None)

    @property
    def _trials(self) -> list[tuple[PrepareRequest, bool]]:
        return [trial for agent in self.fleet.agents.values() if (trial := agent.trial()) is not None]

    @rule(faults=fates, death=deaths)
    def a_trial_is_promoted(self, faults: dict[tuple[str, str], str], death: int | str) -> None:
        if self.trial is not None:
            path = self.trial.request.source
            self._change(lambda changes: changes.swap(path, known_weights(path), "ana", "", SOON), faults, death)

    @rule()
    def a_trial_is_aborted(self) -> None:
        if self.trial is not None:
            self.trial.end()
            assert all(request.id != self.trial.request.id for request, _ in self._trials)
            self.trial = None

    @rule(number=sets)
    def an_operator_sets(self, number: int) -> None:
        if self._is_there:
            self.fleet.desired_store.set(self.fleet.file(number), revision=self.fleet.desired_store.read().revision)
            self._note()

    @rule()
    def an_operator_holds(self) -> None:
        if self._is_there:
            self.fleet.desired_store.hold(revision=self.fleet.desired_store.read().revision)
            self._note()

    @rule()
    def an_operator_releases(self) -> None:
        if self._is_there:
            self.fleet.desired_store.release(revision=self.fleet.desired_store.read().revision)
            self._note()

    @rule(node=nodes)
    def poll(self, node: str) -> None:
        self.fleet.agents[node].reconcile()

    @rule(node=nodes)
    def a_agent_is_killed(self, node: str) -> None:
        """Its replicas go on serving, and the next agent finds the memory."""
        del self.fleet.agents[node]
        self.fleet.start(node)

    @rule()
    def time_passes(self) -> None:
        self.fleet.now += 1000.0

    @rule()
    def an_outage(self) -> None:
        """The desired store becomes unreachable, or reachable again."""
        away = self.fleet.where.with_name("away")
        before, after = (self.fleet.where, away) if self._is_there else (away, self.fleet.where)
        before.rename(after)

    @rule(node=nodes)
    def a_client_asks(self, node: str) -> None:
        """A replica answers unless the client would go back; the revision of an answer is that of its weights."""
        agent = self.fleet.agents[node]
        revision, weights_id = agent.status().revision, agent.model.weights_id
        if weights_id is not None and self.may_answer(revision):
            assert max(each for each, said in self.said.items() if said == weights_id) >= self.newest
            self.seen, self.newest = revision, max(self.newest, revision)

    def may_answer(self, revision: int) -> bool:
        """Return True where `Freshness.wait` would not raise."""
        return revision >= self.seen

    @invariant()
    def a_revision_stands_for_one_set_of_weights(self) -> None:
        for agent in self.fleet.agents.values():
            status = agent.status()
            assert self.said[status.revision] == status.weights_id
            assert status.revision <= max(self.said)
            assert status.trying != status.weights_id
            assert status.trying or not self.fleet.trial_words()[status.node]
        for revision, weights_id in self.fleet.commits:
            assert self.said[revision] == weights_id
        self.fleet.commits.clear()

    def teardown(self) -> None:
        """Once messages arrive again, all nodes serve the desired weights, and no change is open."""
        if not self._is_there:
            self.an_outage()
        for _ in range(3):
            self.fleet.now += 1000.0
            for agent in self.fleet.agents.values():
                agent.reconcile()
        state = self.fleet.desired_store.read()
        assert state.weights is not None
        assert set(self.fleet.served().values()) == {state.weights.weights_id}
        assert {agent.status().preparing + agent.status().trying for agent in self.fleet.agents.values()} == {""}
        assert {agent.status().revision for agent in self.fleet.agents.values()} == {state.revision}
        self.fleet.close()
        self._patch.undo()
        self._folder.cleanup()


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_any_order(examples: int) -> None:
    run_in_any_order(Protocol, examples, 25)


def test_a_client_that_goes_back_is_found() -> None:
    machine = Protocol()
    for node in ("n0", "n1"):
        machine.poll(node)
    machine.an_operator_sets(1)
    machine.poll("n0")
    for node in ("n0", "n1"):  # n1 is behind, and does not answer
        machine.a_client_asks(node)
    assert (machine.seen, machine.newest) == (2, 2)
    machine.may_answer = lambda revision: True  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        machine.a_client_asks("n1")
    machine.teardown()
