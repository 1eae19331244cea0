"""Opening of an artifact's graph, in a process of its own because caches are per process. Prints seconds.

Arguments: `ours` or `torch`, and the artifact. `import torch` is not timed.
"""

from __future__ import annotations

import sys
import time

import torch

from weightswap_runtime import Artifact
from weightswap_runtime.engines.graph import open_graph

GRAPH = "graphs/forward.pt2"


def ours(artifact: Artifact) -> object:
    """Read the graph, check its digest, and compile it."""
    return open_graph(artifact, GRAPH, torch.device("cpu"))


def theirs(artifact: Artifact) -> object:
    """Open the graph with torch alone."""
    return torch.export.load(artifact.path / GRAPH).module()


if __name__ == "__main__":
    way, path = sys.argv[1:]
    opened = Artifact.open(path)
    start = time.perf_counter()
    (ours if way == "ours" else theirs)(opened)
    print(time.perf_counter() - start)
