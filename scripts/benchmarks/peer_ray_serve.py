"""Ray Serve as people write it: a deployment whose `user_config` names the weights that its replicas load."""

import time
from typing import Any

import torch
from numpy.typing import NDArray
from peer_network import loaded
from ray import serve


@serve.deployment
class Network:
    def reconfigure(self, user_config: dict[str, str]) -> None:
        self.load(user_config["weights"])

    def load(self, weights: str) -> None:
        self.model = loaded(weights)
        self.weights, self.since = weights, time.time()

    def served(self) -> tuple[str, float]:
        """Return the served weights, and since when."""
        return self.weights, self.since

    def infer(self, rows: NDArray[Any]) -> NDArray[Any]:
        with torch.no_grad():
            return self.model(torch.from_numpy(rows)).numpy()


def application(arguments: dict[str, str]) -> serve.Application:
    """Return the application for a declarative configuration with `replicas` and `user_config`."""
    return Network.options(num_replicas=int(arguments["replicas"]), ray_actor_options={"num_cpus": 0.1}).bind()
