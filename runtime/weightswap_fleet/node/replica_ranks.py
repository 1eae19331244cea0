"""A replica that has its model on several ranks: a node of its own in the fleet's changes.

The first rank is the replica's own process. Whatever it begins there, a call or a change, it tells the others just
before, in one order, which is the order in which they do it. Nobody else tells them anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, TypeVarTuple

from weightswap_fleet.documents import DeploymentSpec
from weightswap_runtime.errors import RanksRefused, StageCancelled, StageClosed, text_of
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_runtime.live.ranks import Ranks
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_runtime.process_groups import process_group
from weightswap_server.signed_weights import requires

from .agent import Agent
from .memory import NodeWeights, RevisionPage, open_artifact

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TOGETHER = 300.0  # seconds within which all processes have started
_TIMEOUT = 30.0  # seconds after which a rank that does not come is lost: busy machines are late, and a restart is slow
_POLL = 0.05  # seconds between two questions whether all ranks have staged
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


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


def open_first(spec: DeploymentSpec, address: str, others: Others) -> Model:
    """Open the model without weights on the first rank, while the others start. Raises what `load` raises."""
    return _open(spec, address, 0, lambda group: LeadingRanks(group, others))


def _open(spec: DeploymentSpec, address: str, number: int, ranks: Callable[[ProcessGroup], Ranks]) -> Model:
    return load(
        open_artifact(spec),
        ranks=ranks(process_group(address, number, spec.ranks, timeout=_TOGETHER)),
        admit=requires(*spec.require_signature) if spec.require_signature else None,
        op_libraries=spec.op_libraries,
    )


class Others(Protocol):
    """The ranks after the first. Each does what it is told, one after another."""

    def send(self, method: Callable[[Rank, *Ts], R], *arguments: *Ts) -> None:
        """Tell all to call a method, and do not wait."""
        ...

    def ask(self, method: Callable[[Rank, *Ts], R], *arguments: *Ts) -> list[R]:
        """Let all call a method, and return what they return."""
        ...


class LeadingRanks(Ranks):
    """The ranks of a model, of which this process is the first, and tells the others what they do together.

    The model may be used from any thread; what is collective waits for its turn.
    """

    def __init__(self, group: ProcessGroup, others: Others, *, timeout: float = _TIMEOUT) -> None:
        # calls need no comparison: one process, this one, has told all of them what their inputs are
        super().__init__(group, timeout=timeout, check_calls=False)
        self._others = others
        self._alone = _Alone()
        self._steps: dict[str, Callable[[Rank], object]] = {
            "trial": Rank.try_staged,
            "commit": Rank.commit,
            "rollback": Rank.rollback,
        }

    @contextmanager
    def turn(self, step: str) -> Iterator[None]:
        with self._alone, super().turn(step):
            yield

    def without_changes(self) -> AbstractContextManager[object]:
        return self._alone

    def agree(self, step: str, prepare: Callable[[], Mapping[str, str] | None], about: str = "") -> None:
        if step in self._steps:
            self._others.send(self._steps[step])
        super().agree(step, prepare, about)

    def call(
        self, name: str, check: Callable[[], list[Any]], weights_id: Callable[[], str], run: Callable[[list[Any]], R]
    ) -> R:
        with self.turn(f"call of {name}"):
            flat = check()  # first: inputs that are refused are nobody else's concern
            self._others.send(Rank.call, name, weights_id(), flat)
            return super().call(name, lambda: flat, weights_id, run)


class _Alone(AbstractContextManager["_Alone"]):
    """A reentrant lock that threads get in turn: one that calls all the time must not keep a change waiting."""

    def __init__(self) -> None:
        self._waiting, self._taken = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> _Alone:
        if self._owner != threading.get_ident():
            with self._waiting:  # whoever has waited is next, as the last owner has to come here again
                self._taken.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._taken.release()


class RankState(NamedTuple):
    """The state of a rank."""

    pid: int
    weights_id: str | None
    previous_weights_id: str | None
    has_staged: bool  # the last staging has ended, successfully or not


class Rank:
    """A rank after the first. Its methods are called one after another, as the first tells."""

    def __init__(self, spec: DeploymentSpec, address: str, number: int) -> None:
        """address: of the group. Waits for the others. Raises what `load` raises."""
        self._model = _open(spec, address, number, lambda group: Ranks(group, timeout=_TIMEOUT, check_calls=False))
        self._staged: Staged | None = None
        self._failure: Exception | None = None

    def state(self) -> RankState:
        model, staged = self._model, self._staged
        return RankState(os.getpid(), model.weights_id, model.previous_weights_id, staged is None or staged.done)

    def stage(self, path: str, onto: Sequence[tuple[str, str]], options: Mapping[str, Any]) -> None:
        """Begin to stage, and discard what was staged before. An error is this rank's vote at the next change."""
        self._discard()
        try:
            self._staged = self._model.stage(path, onto=onto, background=True, **options)
        except Exception as error:
            self._failure = error

    def try_staged(self) -> None:
        """Try what is staged, with all other ranks."""
        if self._staged is not None:
            self._staged.try_on_ranks()
        else:
            self._refuse("trial")

    def commit(self) -> None:
        """Serve what is staged, with all other ranks."""
        if self._staged is not None:
            self._staged.commit()
        else:
            self._refuse("commit")

    def rollback(self) -> None:
        """Serve the previous weights, with all other ranks."""
        self._discard()
        self._model.rollback()

    def call(self, name: str, weights_id: str, flat: list[Any]) -> None:
        """Call a method with all other ranks, of which the first answers. weights_id: of those that it calls."""
        if weights_id != self._model.weights_id:  # no answer, after which all begin again, rather than a mixture
            raise StageClosed(
                f"{name}: the first rank calls {weights_id[:12]}, here {self._model.weights_id} are served"
            )
        self._model.call_flat(name, flat)

    def _refuse(self, step: str) -> None:
        def prepare() -> None:
            raise self._failure or StageClosed("nothing is staged here")

        ranks = self._model.ranks
        assert ranks is not None
        with ranks.turn(step):
            ranks.agree(step, prepare)

    def _discard(self) -> None:
        if self._staged is not None:
            self._staged.discard()
        self._staged = self._failure = None

    def close(self) -> None:
        self._model.close()
