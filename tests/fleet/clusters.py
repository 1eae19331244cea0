"""A local Ray cluster of several nodes, and a fleet on it whose outputs identify its weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.support.ray_turns import ray_turn
from weightswap_exporter import export, pack
from weightswap_fleet import FleetError

INPUT: NDArray[Any] = np.ones((1, 8), np.float32)
NUMBERS = 8
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}


class Numbered(nn.Module):
    """A model whose weights all are one number, of which every output is a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class Files:
    """An artifact, and packed weights by their numbers."""

    def __init__(self, folder: Path, numbers: int) -> None:
        self.folder = folder
        self.artifact = folder / "numbered.artifact"
        self._model = Numbered()
        export(self._model, (torch.ones(1, 8),), out=self.artifact)
        self._numbers: dict[str, float] = {}
        self.weights = {number: self.write(number) for number in range(numbers)}

    def write(self, number: float) -> Path:
        """Write the weights of a number."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(number)
        packed = pack(self._model.state_dict(), self.artifact, out=self.folder / f"{number}.safetensors")
        self._numbers[packed.weights_id] = number
        return packed.path

    def number(self, weights_id: str) -> float:
        return self._numbers[weights_id]

    def is_right(self, outputs: Any, weights_id: str) -> bool:
        return self.is_whole(outputs["output"], weights_id)

    def is_whole(self, output: NDArray[Any], weights_id: str) -> bool:
        """Return True if an output is of the weights that its answer names."""
        with np.errstate(over="ignore"):
            return bool((output == np.float32(8 * 64 * self.number(weights_id) ** 2)).all())


@contextmanager
def cluster(nodes: int, cpus: int = NODE["num_cpus"]) -> Iterator[Any]:
    """Start several Ray nodes, each with so many CPUs. Only one cluster can run at a time."""
    with ray_turn(), _cluster(nodes, cpus) as made:
        yield made


@contextmanager
def _cluster(nodes: int, cpus: int) -> Iterator[Any]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    options = NODE | {"num_cpus": cpus}
    made = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            made.add_node(**options)
        ray.init(made.address, log_to_driver=False, logging_level="error")
        yield made
        serve.shutdown()
    finally:
        ray.shutdown()
        made.shutdown()


class Checker(Protocol):
    """Who knows which weights give which outputs."""

    def number(self, weights_id: str) -> float: ...

    def is_right(self, outputs: Any, weights_id: str) -> bool: ...


class Deployed(NamedTuple):
    fleet: Any
    files: Files
    cluster: Any


@contextmanager
def deployed_on(folder: Path, nodes: int) -> Iterator[Deployed]:
    """Four replicas on several nodes."""
    from ray import serve

    from weightswap_fleet import connect, deployment

    files = Files(folder, NUMBERS)
    with cluster(nodes) as made:
        application = deployment(
            files.artifact,
            files.weights[0],
            name="numbered",
            num_replicas=4,
            ray_actor_options={"num_cpus": 1},
            interval=0.5,
        )
        serve.run(application, name="numbered")
        yield Deployed(connect("numbered"), files, made)


class Client(threading.Thread):
    """A client that calls all the time, and checks each answer."""

    def __init__(self, fleet: Any, checker: Checker, x: NDArray[Any]) -> None:
        super().__init__(daemon=True)
        self._client, self._checker, self._x = fleet.client(), checker, x
        self.answers: list[tuple[float, float, int]] = []  # when it was asked for, its number, its revision
        self.served: list[tuple[float, int]] = []  # the same, without what was on trial: number, revision
        self.wrong: list[str] = []
        self.failures: list[BaseException] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            asked = time.time()
            try:
                answer = self._client.infer({"x": self._x})
            except Exception as error:
                self.failures.append(error)
                continue
            if not self._checker.is_right(answer.outputs, answer.weights_id):
                self.wrong.append(f"{answer.outputs} of {answer.weights_id}")
            number = self._checker.number(answer.weights_id)
            self.answers.append((asked, number, answer.revision))
            if answer.generation is not None:
                self.served.append((number, answer.revision))

    def has_seen(self, revision: int) -> bool:
        """Return True if its last answer was of that revision or a later one."""
        return bool(self.answers) and self.answers[-1][2] >= revision

    def end(self) -> None:
        self._stopped.set()
        self.join(120)
        self._client.close()
        assert not self.is_alive()


@contextmanager
def calling(deployed: Deployed, clients: int = 2) -> Iterator[list[Client]]:
    """Run clients while the block runs. Afterwards no answer may be wrong, or older than one before."""
    with checked([Client(deployed.fleet, deployed.files, INPUT) for _ in range(clients)]) as found:
        yield found


@contextmanager
def checked(found: list[Client]) -> Iterator[list[Client]]:
    for client in found:
        client.start()
    try:
        yield found
    finally:
        for client in found:
            client.end()
    for client in found:
        assert client.wrong == []
        revisions = [revision for _, _, revision in client.answers]
        assert revisions == sorted(revisions)
        assert client.answers
    assert all(len(numbers) == 1 for numbers in seen_again([client.served for client in found]).values())


def seen_again(answers: list[list[tuple[float, int]]]) -> dict[int, set[float]]:
    """Return the numbers of each revision in answers to clients that had seen it. Two mean that one went back."""
    found: dict[int, set[float]] = {}
    for each in answers:
        for (_, seen), (number, revision) in pairwise(each):
            if revision == seen:
                found.setdefault(revision, set()).add(number)
    return found


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(true: Callable[[], Any], timeout: float = 120.0) -> Any:
    """Call a function until its result is true, and return it."""
    deadline = time.monotonic() + timeout
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def served(fleet: Any) -> set[str]:
    """Return the ids of the weights that the nodes serve, once all have answered, which takes a busy one some time."""

    def ask() -> Any:
        found = {each.weights_id for each in fleet.nodes.values()}
        return None not in found and found

    return set(until(ask))


def soon(work: Callable[[], Any]) -> Any:
    """Return the result of a change; retry it while a change is open whose end a node has not heard of."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return work()
        except FleetError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
