"""The ranks of a replica on Ray: the replica's process is the first, and owns an actor for each of the others.

They are placed together, in the replica's placement group, and end with it. If one of them ends, or is lost, the
replica ends, too, and Ray Serve starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weightswap_fleet.documents import DeploymentSpec, NodeMethods
from weightswap_fleet.node.memory import RevisionPage
from weightswap_fleet.node.replica_ranks import Rank, RanksAgent, open_first
from weightswap_runtime.process_groups import free_address
from weightswap_server.service.service import Service

from .actors import NAMESPACE, agent_name, send, this_node

_ANSWER = 60.0  # seconds to wait for other ranks
_SILENT = 120.0  # seconds without an answer after which a rank does not live
_POLL = 0.5  # seconds between two looks whether all ranks live
_log = logging.getLogger("weightswap.fleet")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_Question = tuple[int, str, tuple[Any, ...]]  # its number, the method and its arguments


class RanksAttachment:
    """What a replica serves: the model on all of its ranks, and its part in the fleet's changes."""

    def __init__(self, spec: DeploymentSpec) -> None:
        """Waits until the desired weights are served. Raises what `open_first` and `RanksAgent` raise."""
        address = free_address()
        actors = [_start_rank(spec, address, number) for number in range(1, spec.ranks)]
        others = _Actors(actors)
        self.model = open_first(spec, address, others)
        node = f"{this_node()}.{os.getpid()}"
        mailbox = ray.remote(_Mailbox).options(name=agent_name(spec, node), namespace=NAMESPACE, num_cpus=0).remote()
        self._agent = RanksAgent(spec, node, self.model, others)
        self.revision_page: RevisionPage = self._agent.revision_page
        _in_thread(lambda: _answer(mailbox, self._agent))
        _in_thread(lambda: _watch(actors, self._agent))

    def serve(self, service: Service) -> None:
        """Follow the desired store from now on. service: what answers the replica's requests."""
        self._agent.replica_metrics = lambda: service.metrics.text().decode()
        self._agent.start()

    async def check(self) -> None:
        """Nothing is left to check: a replica whose ranks are not all there has ended."""


def _start_rank(spec: DeploymentSpec, address: str, number: int) -> ActorHandle[Rank]:
    """Start a rank on the same resources as the first has, beside it. It is never started again by itself."""
    group = get_current_placement_group()
    assert group is not None, "`deployment` gives each replica with ranks a placement group"
    bundle = dict(group.bundle_specs[number])
    options = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0)}
    if (memory := bundle.pop("memory", 0)) > 0:
        options["memory"] = memory
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    # one method at a time, in the order in which the replica, its only caller, calls them: that is Ray's promise for an
    # actor whose calls are not retried
    made = ray.remote(Rank).options(scheduling_strategy=strategy, resources=bundle, max_restarts=0, **options)
    actor: ActorHandle[Rank] = made.remote(spec, address, number)
    return actor


class _Actors:
    """The ranks after the first; see `Others`."""

    def __init__(self, actors: Sequence[ActorHandle[Rank]]) -> None:
        self._actors = actors

    def send(self, method: Callable[[Rank, *Ts], R], *arguments: *Ts) -> None:
        for actor in self._actors:
            send(actor, method, *arguments)

    def ask(self, method: Callable[[Rank, *Ts], R], *arguments: *Ts) -> list[R]:
        sent = [send(actor, method, *arguments) for actor in self._actors]
        answers: list[R] = ray.get(sent, timeout=_ANSWER)
        return answers


def _watch(actors: Sequence[ActorHandle[Rank]], agent: RanksAgent) -> None:
    """End this process once a rank has ended or is lost: those that are left cannot answer, and hold their memory."""
    ranks = agent.model.ranks
    assert ranks is not None
    asked: list[Any] = []
    since = time.monotonic()
    while ranks.lost is None:
        if time.monotonic() > since + _SILENT:
            _end(f"{agent.node}: a rank has not answered for {_SILENT:g} s")
        ready, asked = ray.wait(asked, num_returns=len(asked), timeout=_POLL) if asked else ([], [])
        try:
            ray.get(ready)
        except RayError as error:
            _end(f"{agent.node}: a rank has ended ({type(error).__name__})")
        if not asked:
            agent.stopped.wait(_POLL)
            since = time.monotonic()
            asked = [send(actor, Rank.state) for actor in actors]
    _end(f"{agent.node}: {ranks.lost}")


def _end(why: str) -> NoReturn:
    _log.critical("%s; this replica ends, and Ray Serve starts it again", why)
    os._exit(1)  # its other threads may wait for the rank


class _Mailbox:
    """The actor by which others find a replica, whose own actor is Ray Serve's alone. It has the `NodeMethods`,
    and passes them on: the replica takes each question, and brings its answer."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[_Question] = asyncio.Queue()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def _pass_on(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._number += 1
        answer = self._open[self._number] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((self._number, method, arguments))
        return await answer

    async def receive(self) -> _Question:
        """Wait for the next question."""
        return await self._asked.get()

    async def reply(self, number: int, answer: object, error: Exception | None) -> None:
        """Answer a question."""
        waiting = self._open.pop(number)
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(answer)


def _passing(method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def ask(self: _Mailbox, *arguments: Any) -> Any:
        return await self._pass_on(method, arguments)

    return ask


for _name in vars(NodeMethods):
    if not _name.startswith("_"):
        setattr(_Mailbox, _name, _passing(_name))


def _answer(mailbox: ActorHandle[_Mailbox], agent: RanksAgent) -> None:
    """Answer what is asked at the mailbox, each question in a thread: some wait for others."""
    while True:
        try:
            question = ray.get(send(mailbox, _Mailbox.receive))
        except RayError as error:
            _end(f"{agent.node}: the actor by which others find it has ended ({type(error).__name__})")
        _in_thread(partial(_answer_one, mailbox, agent, *question))


def _answer_one(
    mailbox: ActorHandle[_Mailbox], agent: RanksAgent, number: int, method: str, arguments: tuple[Any, ...]
) -> None:
    answer, failure = None, None
    try:
        answer = getattr(agent, method)(*arguments)
    except Exception as error:
        failure = error
    send(mailbox, _Mailbox.reply, number, answer, failure)


def _in_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="weightswap-ranks", daemon=True).start()
