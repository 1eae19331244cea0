"""A replica that has its model on several ranks, as a node of its own in the fleet's changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weightswap_fleet.documents import DeploymentSpec
from weightswap_runtime.errors import RanksRefused, StageCancelled, text_of
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.model.model import Model

from .agent import Agent
from .memory import RevisionPage
from .ranks import Others, Rank, RankState
from .weights import NodeWeights

_POLL = 0.05  # seconds between two questions whether all ranks have staged


class RanksAgent(Agent):
    """The agent of the ranks of one replica, in its process, which is the first rank.

    To the fleet it is a node. What it does with the weights, all ranks do together, or none.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        node: str,
        model: Model,
        others: Others,
        clock: Callable[[], float] = time.monotonic,
        metrics: Callable[[], str] = str,
    ) -> None:
        """Serves the desired weights at once; `start` makes it follow the desired store.

        node: the replica's unique name. model: of `open_first`. metrics: returns those of the replica.
        Raises NoWeights if the desired weights, and those before, cannot be served.
        """
        self._others, self.replica_metrics = others, metrics
        self._pids = tuple(state.pid for state in others.ask(Rank.state))
        self._ranks_weights = RanksWeights(spec, node, model, others)
        super().__init__(self._ranks_weights, None, clock, is_deployed=True)
        self.reconcile()
        self._check_serves()

    @property
    def revision_page(self) -> RevisionPage:
        """The revisions that the replica serves."""
        return self._weights.revision_page

    @property
    def replicas(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (os.getpid(), *self._pids)

    def metrics(self) -> str:
        self._metrics.update(os.getpid(), self.replica_metrics())
        return super().metrics()


class RanksWeights(NodeWeights):
    """The weights of a model on several ranks. Each reads its part from the source itself."""

    def __init__(self, spec: DeploymentSpec, node: str, model: Model, others: Others) -> None:
        super().__init__(spec, node, model, RevisionPage())
        self._others = others

    def stage(self, path: str | Path, weights: DesiredWeights, reader: str = "") -> Staged:
        staged = super().stage(path, weights)
        onto = [(base.source, base.weights_id) for base in weights.bases or ()]
        self._others.send(Rank.stage, str(path), onto, self._options(weights))
        return staged

    def complete(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        """Wait for the other ranks, and then try the weights together: what one of them refuses nobody has prepared."""
        while not all(state.has_staged for state in self._states()):
            if not is_wanted():
                raise StageCancelled("these weights are not wanted any more")
            time.sleep(_POLL)
        try:
            staged.try_on_ranks()
        except RanksRefused as error:
            self._refuse(staged.weights_id, text_of(error))
            raise

    def keeps(self, weights_id: str) -> bool:
        """A rank that has begun to stage others, which were refused, may have no previous weights any more."""
        before = {state.previous_weights_id for state in self._states()}
        return super().keeps(weights_id) and before == {weights_id}

    def _states(self) -> Sequence[RankState]:
        return self._others.ask(Rank.state)
