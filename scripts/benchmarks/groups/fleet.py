"""Fleet of eight replicas on four nodes of one machine, compared with Ray Serve's ways to change weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from peer_network import WIDTH, network
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import close, on_one_thread, quiet
from timing import seconds
from torch import nn

from weightswap_exporter import export, pack

NODES, REPLICAS, SWAPS = 4, 8, 10
SKEW, WHOLE, AHEAD = Goal("p99", "at most", 50.0), Goal("p99", "at most", 500.0), Goal("ratio", "at most", 1.0)
_PEERS = Path(__file__).parent.parent
_PATIENCE = 300.0  # seconds


class Change(NamedTuple):
    """Time of a change of all replicas in ms: for the caller, and from the first replica to the last."""

    whole: float
    skew: float


def rows(settings: Settings) -> Iterator[Row]:
    """Measure the network of the group `serve`, two sets of weights in turn. Each change of a peer is of all replicas.

    A fleet's replicas change with their node's agent, by one word in shared memory. All clocks are the same.
    """
    with on_one_thread(), TemporaryDirectory(prefix="weightswap-bench-") as name, _cluster():
        folder = Path(name)
        models = [_written(folder, number) for number in range(2)]
        fleet, peer = _fleet(folder), _Peer(folder)
        x = torch.randn(1, WIDTH)
        with torch.no_grad():
            expected = [model(x) for model in models]
        changes: dict[str, list[Change]] = {"fleet": [], "told": [], "reconfigure": [], "serve.run": []}
        for turn in range(1, settings.rounds + 1):
            for _ in range(SWAPS):
                changes["fleet"].append(fleet.swap((len(changes["fleet"]) + 1) % 2))
            for _ in range(SWAPS):
                changes["told"].append(peer.tell((len(changes["told"]) + 1) % 2))
            peer.tell(1 - turn % 2)
            changes["reconfigure"].append(peer.configure(turn % 2))
            close(fleet.infer(x), expected[0], "fleet")
            close(peer.infer(x), expected[turn % 2], "peer")
        for turn in range(max(1, settings.rounds // 5)):
            peer.tell(1 - turn % 2)
            changes["serve.run"].append(peer.run(turn % 2))
        yield from _told(changes, fleet.parts)
        yield spread("a question to one more agent", "ms", [fleet.ask_one_more() for _ in range(10 * settings.rounds)])
        yield _given(settings.rounds)


def _given(rounds: int) -> Row:
    """Measure transfers of weights between nodes, compared with two processes of this machine."""
    import ray
    from peer_relay import NBYTES, pair

    giver, taker = pair()
    rates: tuple[list[float], list[float]] = [], []
    for turn in range(rounds + 1):  # the first one is a warm-up
        ray.get(giver.open.remote(f"memory://{turn}"))
        relayed = ray.get(taker.fetch.remote(f"memory://{turn}"))
        whole = ray.get(taker.has_all.remote())
        sent = ray.get(taker.receive.remote(ray.get(giver.listen.remote())))
        if not (whole and ray.get(taker.has_all.remote())):
            raise RuntimeError("the bytes that arrived are not those that were sent")
        for rate, took in zip(rates, (relayed, sent), strict=True):
            rate.append(NBYTES / took / 1e9)
    what = f"{NBYTES >> 20} MiB from a node to another, in chunks"
    return compared(what, "GB/s", rates[0][1:], "a socket", rates[1][1:])


def _told(changes: dict[str, list[Change]], parts: list[tuple[float, float]]) -> Iterator[Row]:
    ours = changes["fleet"]
    yield spread(f"fleet.swap, {REPLICAS} replicas on {NODES} nodes", "ms", [each.whole for each in ours], WHOLE)
    yield spread("of it, until all nodes were ready", "ms", [ready for ready, _ in parts])
    yield spread("of it, from the decision until all served", "ms", [served for _, served in parts])
    yield spread("fleet.swap, from the first commit to the last", "ms", [each.skew for each in ours], SKEW)
    for name, peer, goal in (
        ("told", "each replica told by broadcast, unverified", None),
        ("reconfigure", "user_config of a configuration", AHEAD),
        ("serve.run", "user_config of another serve.run", AHEAD),
    ):
        theirs = changes[name]
        sides = list(zip(ours[-len(theirs) :], theirs, strict=True))
        for part, what in (("whole", "fleet.swap"), ("skew", "fleet.swap, from the first to the last")):
            one, other = ([getattr(side[at], part) for side in sides] for at in (0, 1))
            yield compared(what, "ms", one, peer, other, goal)


@contextmanager
def _cluster() -> Iterator[None]:
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    }
    os.environ["PYTHONPATH"] = f"{_PEERS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with quiet():
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 4, "object_store_memory": 1 << 30}
        cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
        try:
            for _ in range(NODES - 1):
                cluster.add_node(**options)
            ray.init(cluster.address, log_to_driver=False, logging_level="error")
            yield
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


def _written(folder: Path, number: int) -> nn.Module:
    torch.manual_seed(number)
    model = network()
    if not (folder / "net.artifact").exists():
        export(model, (torch.zeros(1, WIDTH),), out=folder / "net.artifact")
    torch.save(model.state_dict(), folder / f"{number}.pt")
    pack(model, folder / "net.artifact", out=folder / f"{number}.safetensors")
    return model


class _Fleet:
    def __init__(self, folder: Path, fleet: Any) -> None:
        self._folder, self._fleet = folder, fleet
        self.parts: list[tuple[float, float]] = []

    def swap(self, number: int) -> Change:
        start = time.perf_counter()
        receipt = self._fleet.swap(self._folder / f"{number}.safetensors")
        whole = time.perf_counter() - start
        if receipt.late or len(receipt.nodes) != NODES:
            raise RuntimeError(f"not all nodes took part: {receipt}")
        self.parts.append((receipt.seconds_staged * 1e3, receipt.seconds_committed * 1e3))
        return Change(whole * 1e3, receipt.skew * 1e3)

    def ask_one_more(self) -> float:
        """Return the milliseconds that each further agent adds to a request that is sent to all at the same time."""
        from weightswap_fleet.coordinator.actors import RayNodes, find_spec
        from weightswap_fleet.documents import NodeMethods

        nodes = RayNodes(find_spec(self._fleet.name))
        all_of_them = nodes.names()
        one, every = (
            seconds(partial(nodes.call, names, 5.0, NodeMethods.renew, "")) for names in (all_of_them[:1], all_of_them)
        )
        return (every - one) * 1e3 / (len(all_of_them) - 1)

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        with self._fleet.client() as client:
            return torch.tensor(client.infer({"input": x.numpy()}).outputs["output"])


def _fleet(folder: Path) -> _Fleet:
    from ray import serve

    from weightswap_fleet import connect, deployment

    application = deployment(
        folder / "net.artifact",
        folder / "0.safetensors",
        name="fleet",
        num_replicas=REPLICAS,
        ray_actor_options={"num_cpus": 1.0},
    )
    serve.run(application, name="fleet", route_prefix="/fleet")
    return _Fleet(folder, connect("fleet"))


class _Peer:
    """Deployment of Ray Serve whose replicas load weights in three ways."""

    def __init__(self, folder: Path) -> None:
        from ray import serve

        self._folder, self._serve = folder, serve
        self._weights = lambda number: str(folder / f"{number}.pt")
        self._configure(0)
        while serve.status().applications["peer"].status != "RUNNING":
            time.sleep(0.2)
        self._handle = serve.get_deployment_handle("Network", "peer")
        self._wait(0)

    def tell(self, number: int) -> Change:
        """Send each replica a request to load them."""
        return self._changed(number, lambda: self._told("load", self._weights(number)))

    def configure(self, number: int) -> Change:
        """Change the application's `user_config` by its configuration; replicas get it one after another, and stay."""
        return self._changed(number, partial(self._configure, number))

    def run(self, number: int) -> Change:
        """Run the application again with another `user_config`; replicas are replaced."""
        import peer_ray_serve

        application = peer_ray_serve.Network.options(
            num_replicas=REPLICAS,
            ray_actor_options={"num_cpus": 0.1},
            user_config={"weights": self._weights(number)},
        ).bind()
        return self._changed(
            number, lambda: self._serve.run(application, name="peer", route_prefix="/peer", blocking=False)
        )

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self._handle.infer.remote(x.numpy()).result(timeout_s=_PATIENCE))

    def _configure(self, number: int) -> None:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        deployment = {"name": "Network", "user_config": {"weights": self._weights(number)}}
        application = {
            "name": "peer",
            "route_prefix": "/peer",
            "import_path": "peer_ray_serve:application",
            "args": {"replicas": str(REPLICAS)},
            "deployments": [deployment],
        }
        _get_global_client().deploy_apps(ServeDeploySchema.parse_obj({"applications": [application]}))

    def _changed(self, number: int, change: Callable[[], object]) -> Change:
        start = time.time()
        change()
        since = self._wait(number)
        return Change((max(since) - start) * 1e3, (max(since) - min(since)) * 1e3)

    def _wait(self, number: int) -> list[float]:
        """Wait until all replicas serve the weights, and return when each began to."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            served = self._told("served")
            if len(served) == REPLICAS and {weights for weights, _ in served} == {self._weights(number)}:
                return [since for _, since in served]
            time.sleep(0.05)
        raise TimeoutError(f"not all replicas serve {number} after {_PATIENCE:g} s: {served}")

    def _told(self, method: str, *arguments: str) -> list[Any]:
        return list(self._handle.broadcast(method, *arguments).results(timeout_s=_PATIENCE, return_exceptions=True))
