"""Replicas of two ranks in one process: each rank after the first is a thread, which does what it is told in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from tests.support.ports import free_port
from tests.support.ranks import split_artifact, write_goldens, write_set
from weightswap_fleet import Deadlines
from weightswap_fleet.documents import DeploymentSpec, NodeMethods
from weightswap_fleet.node.replica_ranks import Rank, RanksAgent, open_first
from weightswap_runtime import DesiredStore
from weightswap_runtime.format.manifest import decode_manifest

from .nodes import Changes

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class ThreadOthers:
    """The second rank of a replica, as a thread."""

    def __init__(self, spec: DeploymentSpec, address: str) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.rank = self._pool.submit(Rank, spec, address, 1)
        self.told: list[str] = []
        self.before: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] = lambda method, arguments: arguments

    def _send(self, method: Callable[..., R], *arguments: Any) -> Future[R]:
        self.told.append(method.__name__)
        arguments = self.before(method.__name__, arguments)
        return self._pool.submit(lambda: method(self.rank.result(), *arguments))

    def send(self, method: Callable[[Rank, *Ts], R], *arguments: *Ts) -> None:
        self._send(method, *arguments)

    def ask(self, method: Callable[[Rank, *Ts], R], *arguments: *Ts) -> list[R]:
        return [self._send(method, *arguments).result()]

    def close(self) -> None:
        self._send(Rank.close).result()
        self._pool.shutdown()


class Replicas(Changes):
    """Replicas of two ranks, which are its `agreement.Nodes`; their desired store, and files by their seeds."""

    deadlines = Deadlines(prepare=60.0, commit=10.0)

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder, self.where = folder, folder / "desired_store"
        self.where.mkdir()
        artifact = split_artifact(folder / "two.artifact")
        manifest = decode_manifest((artifact / "manifest.json").read_bytes(), "two")
        self.spec = DeploymentSpec("fleet", str(artifact), manifest.graph_id, str(self.where), "two", 0.0, ranks=2)
        self.desired_store = DesiredStore(self.where)
        self.desired_store.set(self.file(0), revision=0)
        self.agents: dict[str, RanksAgent] = {}
        self.others: dict[str, ThreadOthers] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> RanksAgent:
        address = f"tcp://127.0.0.1:{free_port()}"
        others = self.others[name] = ThreadOthers(self.spec, address)
        model = open_first(self.spec, address, others)
        agent = self.agents[name] = RanksAgent(self.spec, name, model, others)
        return agent

    def file(self, seed: int) -> Path:
        path = self.folder / f"{seed}.safetensors"
        return path if path.exists() else write_set(path, seed)

    def with_goldens(self, seed: int, outputs_of: int) -> Path:
        write_goldens(self.file(seed), seed, outputs_of)
        return self.file(seed)

    def served(self) -> set[str | None]:
        """The weights of all ranks of all replicas."""
        first = {agent.model.weights_id for agent in self.agents.values()}
        return first | {state.weights_id for others in self.others.values() for state in others.ask(Rank.state)}

    # as `agreement.Nodes`

    def names(self) -> list[str]:
        return list(self.agents)

    def call(
        self, names: Any, timeout: float, method: Callable[[NodeMethods, *Ts], R], *arguments: *Ts
    ) -> dict[str, R | Exception]:
        answers: dict[str, R | Exception] = {}
        for name in names:
            try:
                answers[name] = getattr(self.agents[name], method.__name__)(*arguments)
            except Exception as error:
                answers[name] = error
            if method.__name__ == "reconcile_soon":
                self.agents[name].reconcile()
        return answers

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        for others in self.others.values():
            with suppress(Exception):
                others.close()


@contextmanager
def replicas_of_two(folder: Path, *names: str) -> Iterator[Replicas]:
    """Replicas that serve seed 0, at revision 1."""
    made = Replicas(folder, names)
    try:
        yield made
    finally:
        made.close()
