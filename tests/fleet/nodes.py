"""Agents of several nodes in one process, and messages to them that get lost."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import pytest

from tests.support.damage import damaged
from tests.support.tiny import TinyArtifact
from weightswap_fleet import Deadlines, FleetPlan, FleetReceipt, FleetRefused
from weightswap_fleet.coordinator.agreement import Agreement, FleetTrial
from weightswap_fleet.documents import DeploymentSpec, NodeMethods, PrepareRequest
from weightswap_fleet.node.agent import NodeAgent
from weightswap_fleet.node.memory import NodeMemory
from weightswap_fleet.node.relay import Relay, RelayMethods
from weightswap_runtime import DesiredState, DesiredStore, DesiredWeights, Event, write_delta
from weightswap_runtime.following.desired_store import known_weights

__all__ = [
    "SOON",
    "Changes",
    "Died",
    "Fleet",
    "FleetTrial",
    "NodeAgent",
    "RemoteRelay",
    "kinds",
    "known_weights",
    "serving_zero",
]


class Died(BaseException):
    """The death of the coordinator."""


R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Fate = Callable[[str, str], str]  # of a message, by method and node: "", "lost", "answer lost", "slow"
SLOW = 4.0  # seconds until a slow answer is there
SOON = Deadlines(prepare=5.0, commit=0.2)


class MortalDesiredStore(DesiredStore):
    """A desired store whose writer may die just before or just after its write."""

    dies = ""

    def _write(self, *args: Any, **options: Any) -> DesiredState:
        if self.dies == "before":
            raise Died
        written = super()._write(*args, **options)
        if self.dies == "after":
            raise Died
        return written


class RemoteRelay:
    """The relay of another node. before: called with the method's name before each message reaches it."""

    def __init__(self, relay: RelayMethods, before: Callable[[str], None]) -> None:
        self._relay, self._before = relay, before

    def describe(self, url: str) -> tuple[int, str] | None:
        self._before("describe")
        return self._relay.describe(url)

    def chunk(self, url: str, tag: str, number: int) -> Any:
        self._before("chunk")
        return self._relay.chunk(url, tag, number)

    def settle(self, url: str, tag: str) -> None:
        self._before("settle")
        self._relay.settle(url, tag)


class Handed:
    """A `relay.Transfer` within the process."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def relay_of(self, node: str) -> RelayMethods:
        def check(method: str) -> None:
            if node in self._fleet.gone or self._fleet.fate(method, node):
                raise TimeoutError(f"{node}: did not answer {method}")

        return RemoteRelay(self._fleet.relays[node], check)

    def put(self, content: bytearray) -> bytes:
        return bytes(content)

    def get(self, put: bytes) -> memoryview:
        return memoryview(put)


class Changes(ABC):
    """Nodes that a coordinator changes, and weight files by their numbers."""

    desired_store: DesiredStore
    deadlines = SOON

    @abstractmethod
    def file(self, number: int) -> Path: ...

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def call(
        self, names: Sequence[str], timeout: float, method: Callable[[NodeMethods, *Ts], R], *arguments: *Ts
    ) -> dict[str, R | Exception]: ...

    def damaged(self, number: int) -> Path:
        whole = self.file(number)
        return damaged(whole, whole.with_name(f"damaged{number}.safetensors"))

    def weights_id(self, number: int) -> str:
        return known_weights(self.file(number)).weights_id

    @property
    def agreement(self) -> Agreement:
        return Agreement(self.desired_store, self)

    def swap(self, what: int | str | Path, by: str = "ana", reason: str = "") -> FleetReceipt:
        """Swap the weights of all nodes: those of a number, a file, or a URL."""
        where = str(self.file(what) if isinstance(what, int) else what)
        return self.agreement.swap(where, known_weights(where), by, reason, self.deadlines)

    def publish(self, number: int, reason: str = "newest") -> FleetReceipt:
        path = self.file(number)
        return self.agreement.publish(str(path), known_weights(path), "run 7", reason, self.deadlines)

    def rollback(self, to: str | None = None, reason: str = "", hold: bool = False) -> FleetReceipt:
        return self.agreement.rollback(to, "bo", reason, hold, self.deadlines)


class Fleet(Changes):
    """Several nodes, their desired store, and files by their numbers. A coordinator may be made to die."""

    def __init__(self, folder: Path, nodes: int, patch: pytest.MonkeyPatch) -> None:
        self.tiny = TinyArtifact(folder / "tiny.artifact")
        self.where = folder / "desired_store"
        self.where.mkdir()
        self.desired_store = MortalDesiredStore(self.where)
        self._folder = folder
        self.now = 0.0
        self.spec = DeploymentSpec(
            "fleet", str(self.tiny.path), self.tiny.manifest.graph_id, str(self.where), "tiny", 0.0
        )
        self.agents: dict[str, NodeAgent] = {}
        self.relays: dict[str, Relay] = {}
        self._held: dict[str, NodeMemory] = {}  # by replicas, which outlive agents
        patch.setattr(NodeMemory, "adopt", lambda name: self._adopted(name.rpartition(".")[2]))
        self.commits: list[tuple[int, str]] = []  # the revision that replicas read just then, and the weights
        self.asked: list[str] = []  # of the nodes, method by method
        self.fate: Fate = lambda method, node: ""
        self.dies_at = -1  # how many times the nodes are asked before the coordinator ends
        self.gone: set[str] = set()
        for number in range(nodes):
            self.start(f"n{number}")

    def start(self, node: str, deployed: bool = True) -> None:
        """Start an agent, the first of a node or the next. deployed: a replica has sent it the deployment."""
        relay = self.relays[node] = Relay(node, Handed(self))
        agent = self.agents[node] = NodeAgent(self.spec, node, lambda: self.now, relay)
        agent.model.listen(lambda event: self._note_commit(agent, event))
        if node not in self._held:
            self._held[node] = NodeMemory.from_process("self", agent._memory.descriptors, read_only=True)
        elif deployed:
            agent.deploy(self.spec)
            agent.reconcile()

    def _note_commit(self, agent: NodeAgent, event: Event) -> None:
        if event.receipt is not None:
            self.commits.append(
                (agent._memory.revision_page.revision(event.receipt.generation), event.receipt.weights_id)
            )

    def _adopted(self, node: str) -> NodeMemory | None:
        held = self._held.get(node)
        return NodeMemory.from_process("self", held.descriptors) if held else None

    def file(self, number: int) -> Path:
        path = self._folder / f"v{number}.safetensors"
        return path if path.exists() else self.tiny.write(path, self.tiny.values(number))

    def delta(self, base: int, new: int) -> Path:
        return write_delta(self.file(base), self.file(new), self.where / f"d{base}-{new}.safetensors").path

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        for memory in self._held.values():
            memory.close()

    def served(self) -> dict[str, str | None]:
        return {node: agent.model.weights_id for node, agent in self.agents.items()}

    def all_serve(self, number: int) -> bool:
        return set(self.served().values()) == {self.weights_id(number)}

    def preparing(self) -> set[str]:
        """The weights of open changes, on all nodes."""
        return {agent.status().preparing for agent in self.agents.values()}

    def trying(self) -> set[str]:
        """The weights on trial, on all nodes."""
        return {agent.status().trying for agent in self.agents.values()}

    def reconcile(self) -> None:
        """Let all nodes look at the desired store."""
        for agent in self.agents.values():
            agent.reconcile()

    def lose(self, *methods: str, node: str = "", how: str = "lost") -> None:
        """Lose these messages from now on, and no others. node: to this one alone; without methods: all messages."""
        self.fate = lambda method, to: how if method in (methods or method) and to in (node or to) else ""

    def before(self, method: str, do: Callable[[], object], node: str = "") -> None:
        """From now on call a function before each message of a method reaches its node, or reaches this node."""

        def fate(sent: str, to: str) -> str:
            if sent == method and to in (node or to):
                do()
            return ""

        self.fate = fate

    def attach(self, node: str = "n0", **changes: Any) -> None:
        """Attach this process to a node's agent, as a replica of a deployment with these changes."""
        self.agents[node].attach(os.getpid(), self.spec._replace(**changes))

    def trial_words(self) -> dict[str, int]:
        """What replicas read of a trial, by node; 0: there is none."""
        return {node: agent._control.trial for node, agent in self.agents.items()}

    def desired_weights(self, number: int, path: Path | None = None) -> DesiredWeights:
        source = str(path or self.file(number))
        return DesiredWeights(source=source, weights_id=self.weights_id(number), since=100.0, by="ana")

    def request(self, number: int, is_rollback: bool = False) -> PrepareRequest:
        """Return a change for the weights of a number."""
        weights = self.desired_weights(number)
        return PrepareRequest(
            f"change {number}", self.desired_store.read().revision, weights.source, weights, 10.0, is_rollback
        )

    def trial(self, number: int, path: Path | None = None, **plan: Any) -> PrepareRequest:
        """Return the change of a trial of the weights of a number."""
        weights = self.desired_weights(number, path)
        return PrepareRequest(f"trial {number}", 0, weights.source, weights, 10.0, plan=FleetPlan(**plan))

    # as `agreement.Nodes`

    def names(self) -> list[str]:
        return [node for node in self.agents if node not in self.gone]

    def call(
        self, names: Sequence[str], timeout: float, method: Callable[[NodeMethods, *Ts], R], *arguments: *Ts
    ) -> dict[str, R | Exception]:
        if len(self.asked) == self.dies_at:
            raise Died
        self.asked.append(method.__name__)
        return {name: self._deliver(name, timeout, method.__name__, *arguments) for name in names}

    def _deliver(self, node: str, timeout: float, method: str, *arguments: Any) -> Any:
        fate = self.fate(method, node)
        if fate == "lost" or node in self.gone:
            return TimeoutError(f"{node}: did not answer")
        agent: NodeMethods = self.agents[node]
        try:
            answer = getattr(agent, method)(*arguments)
        except Exception as error:
            answer = error
        if method == "reconcile_soon":
            self.agents[node].reconcile()
        is_late = timeout < SLOW if fate == "slow" else bool(fate)
        return TimeoutError(f"{node}: did not answer") if is_late else answer


def kinds(refused: pytest.ExceptionInfo[FleetRefused]) -> dict[str, type[Exception]]:
    """Return the classes of a refusal's reasons, by node."""
    return {name: type(error) for name, error in refused.value.reasons.items()}


@contextmanager
def serving_zero(folder: Path, nodes: int, patch: pytest.MonkeyPatch, **said: str) -> Iterator[Fleet]:
    """Nodes that serve number 0, at revision 1. said: more of what the desired store says."""
    made = Fleet(folder, nodes, patch)
    made.desired_store.set(made.file(0), revision=0, **said)
    made.reconcile()
    made.asked.clear()
    made.commits.clear()
    yield made
    made.close()
