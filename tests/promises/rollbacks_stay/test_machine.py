"""Writers, holds, rollbacks, restarts and outages in any order, compared with a plain model of the desired state."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.machines import run_in_any_order
from tests.support.refusals import because
from tests.support.services import weights_id_of
from tests.support.tiny import TinyArtifact
from weightswap_fleet.documents import DeploymentSpec
from weightswap_fleet.node.agent import NodeAgent
from weightswap_runtime import (
    DesiredError,
    DesiredStore,
    Event,
    NothingToRollBack,
    NotPromoted,
    RevisionConflict,
    WeightFileError,
)
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_runtime.following.reconciler import Reconciler
from weightswap_runtime.live.staged import Staged

SETS, FOLLOWERS = 6, 3
sets = st.integers(0, SETS - 1)
followers = st.integers(0, FOLLOWERS - 1)
stale = st.integers(0, 2)  # revisions by which a writer is behind


class Process:
    """Follower without threads: it serves a weights id, and refuses broken files."""

    def __init__(self, _: TinyArtifact, desired_store: DesiredStore, broken: set[str]) -> None:
        self.served: str | None = None
        self.log: list[str] = []
        self.reconciler = Reconciler(desired_store, 1.0, lambda: self.now)
        self.now = 0.0
        self._broken = broken

    @property
    def serves_nothing(self) -> bool:
        return self.served is None

    def poll(self) -> None:
        self.now += 1000.0
        self.reconciler.poll(self)

    def close(self) -> None: ...

    def check(self) -> None: ...

    def notify(self, kind: str, source: str, error: BaseException) -> None: ...

    def serves(self, weights_id: str) -> bool:
        return self.served == weights_id

    def apply(self, path: str | Path, weights: Any, is_wanted: Any) -> None:
        if weights.weights_id in self._broken or not Path(path).exists():
            raise WeightFileError("cannot be read")
        if is_wanted():
            self.served = weights.weights_id
            self.log.append(weights.weights_id)


class Node:
    """Follower of a fleet: a node's owner."""

    def __init__(self, tiny: TinyArtifact, desired_store: DesiredStore, broken: set[str]) -> None:
        self.now = 0.0
        spec = DeploymentSpec("fleet", str(tiny.path), tiny.manifest.graph_id, desired_store.where, "tiny", 0.0)
        self._owner_process = owner = NodeAgent(spec, uuid4().hex, lambda: self.now)
        self.log = [owner.model.weights_id] if owner.model.weights_id else []
        owner.model.listen(self._note)
        stage = owner._weights.stage

        def unless_broken(path: str | Path, weights: DesiredWeights, reader: str = "") -> Staged:
            if weights.weights_id in broken:
                raise WeightFileError("cannot be read")
            return stage(path, weights, reader)

        owner._weights.stage = unless_broken  # type: ignore[method-assign]

    def _note(self, event: Event) -> None:
        if event.receipt is not None:
            self.log.append(event.receipt.weights_id)

    @property
    def served(self) -> str | None:
        return self._owner_process.model.weights_id

    def poll(self) -> None:
        self.now += 1000.0
        self._owner_process.reconcile()

    def close(self) -> None:
        self._owner_process.close()


class Machine(RuleBasedStateMachine):
    """Machine whose `desired`, `history` and `withdrawn` are what the document should say; lists of ids."""

    tiny: TinyArtifact
    follower: type[Process] | type[Node]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=self.tiny.path.parent))
        self.folder = self.root / "service"
        self.folder.mkdir()
        self.desired_store = DesiredStore(self.folder)
        self.paths = [
            self.tiny.write(self.folder / f"v{seed}.safetensors", self.tiny.values(seed)) for seed in range(SETS)
        ]
        self.ids = [weights_id_of(path) for path in self.paths]
        self.broken: set[str] = set()
        self.processes = [self._start() for _ in range(FOLLOWERS)]
        self.away = False
        self.revision = 0
        self.desired: str | None = None
        self.history: list[str] = []
        self.withdrawn: list[str] = []
        self.held = False

    def _start(self) -> Process | Node:
        return self.follower(self.tiny, self.desired_store, self.broken)

    def teardown(self) -> None:
        for process in self.processes:
            process.close()
        shutil.rmtree(self.root)

    def _wrote(self, desired: str | None) -> None:
        self.revision += 1
        self.desired = desired
        for process in self.processes:
            process.log.clear()

    def _others(self, ids: list[str], gone: str) -> list[str]:
        return [each for each in ids if each != gone]

    def _desire(self, new: str) -> None:
        if self.desired is not None:
            self.history.append(self.desired)
        self.history, self.withdrawn = self._others(self.history, new), self._others(self.withdrawn, new)
        self._wrote(new)

    @precondition(lambda self: not self.away)
    @rule(which=sets, behind=stale)
    def set_by_hand(self, which: int, behind: int) -> None:
        if behind:
            with pytest.raises(RevisionConflict):
                self.desired_store.set(self.paths[which], revision=self.revision - behind)
            return
        self.desired_store.set(self.paths[which], revision=self.revision)
        self._desire(self.ids[which])

    @precondition(lambda self: not self.away)
    @rule(which=sets)
    def promote(self, which: int) -> None:
        new = self.ids[which]
        if new == self.desired:
            assert self.desired_store.promote(self.paths[which]).revision == self.revision
        elif new in self.withdrawn:
            with pytest.raises(NotPromoted, check=because("superseded")):
                self.desired_store.promote(self.paths[which])
        elif self.held:
            with pytest.raises(NotPromoted, check=because("held")):
                self.desired_store.promote(self.paths[which])
        else:
            self.desired_store.promote(self.paths[which])
            self._desire(new)

    @precondition(lambda self: not self.away)
    @rule(which=st.none() | sets, hold=st.booleans(), behind=stale)
    def rollback(self, which: int | None, hold: bool, behind: int) -> None:
        to = None if which is None else self.ids[which]
        if behind:
            with pytest.raises(RevisionConflict):
                self.desired_store.rollback(to=to, revision=self.revision - behind, hold=hold)
            return
        target = to if to is not None else (self.history[-1] if self.history else None)
        if target is None or target not in (*self.history, *self.withdrawn):
            with pytest.raises(NothingToRollBack):
                self.desired_store.rollback(to=to, revision=self.revision, hold=hold)
            return
        self.desired_store.rollback(to=to, revision=self.revision, hold=hold)
        self.held = self.held or hold
        if target in self.history:
            desired_store = self.history.index(target)
            later = [*self.history[desired_store + 1 :], *([self.desired] if self.desired else [])]
            self.withdrawn = [each for each in self.withdrawn if each not in later] + later
            self.history = self.history[:desired_store]
            self._wrote(target)
        else:
            self._desire(target)

    @precondition(lambda self: not self.away)
    @rule(hold=st.booleans())
    def hold_or_release(self, hold: bool) -> None:
        if hold:
            self.desired_store.hold(revision=self.revision)
        else:
            self.desired_store.release(revision=self.revision)
        self.held = hold
        self.revision += 1

    @rule(which=followers)
    def poll(self, which: int) -> None:
        self.processes[which].poll()

    @rule(which=followers)
    def restart(self, which: int) -> None:
        self.processes[which].close()
        self.processes[which] = self._start()

    @rule(which=sets)
    def break_or_mend(self, which: int) -> None:
        self.broken ^= {self.ids[which]}

    @rule()
    def go_away_or_come_back(self) -> None:
        here, there = (self.folder, self.root / "away") if not self.away else (self.root / "away", self.folder)
        here.rename(there)
        self.away = not self.away

    @precondition(lambda self: self.away)
    @rule(which=sets)
    def write_to_a_desired_store_that_is_away(self, which: int) -> None:
        for write in (
            lambda: self.desired_store.hold(revision=self.revision),
            lambda: self.desired_store.promote(self.root / "away" / f"v{which}.safetensors"),
        ):
            with pytest.raises(DesiredError):
                write()
        assert not self.folder.exists()

    @precondition(lambda self: not self.away)
    @invariant()
    def the_document_says_so(self) -> None:
        state = self.desired_store.read()
        assert state.revision == self.revision
        assert (state.weights.weights_id if state.weights else None) == self.desired
        assert [each.weights_id for each in state.history] == self.history
        assert [each.weights_id for each in state.withdrawn] == self.withdrawn
        assert (state.hold is not None) == self.held

    @invariant()
    def since_the_last_write_nobody_has_begun_to_serve_anything_else(self) -> None:
        allowed = {self.desired, *self.history}  # earlier weights count where later ones are broken
        for process in self.processes:
            assert set(process.log) <= allowed
            assert not set(process.log) & set(self.withdrawn)

    @precondition(lambda self: not self.away and self.desired is not None)
    @invariant()
    def after_a_poll_all_agree(self) -> None:
        if self.desired in self.broken:
            return
        for process in self.processes:
            process.poll()
        assert {process.served for process in self.processes} == {self.desired}


both = pytest.mark.parametrize("follower", [Process, Node], ids=["a model", "a node of a fleet"])


@both
def test_the_desired_state_is_the_last_one_written(tiny: TinyArtifact, follower: type[Process] | type[Node]) -> None:
    run_in_any_order(Machine, 15 if follower is Process else 5, 25, tiny=tiny, follower=follower)


@both
@pytest.mark.slow
def test_what_is_desired_in_a_long_run(tiny: TinyArtifact, follower: type[Process] | type[Node]) -> None:
    run_in_any_order(Machine, 250 if follower is Process else 25, 50, tiny=tiny, follower=follower)
