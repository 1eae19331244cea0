"""Story of `scripts/demo --ranks`: two processes have the model together, and change its weights in one step."""

from __future__ import annotations

from build import export_topology
from story import Story

from weightswap_exporter import Parallel
from weightswap_runtime import Artifact

SIZE = 2
TOLERANCE = 1e-4  # of logits: ranks add in another order than the eager model
PLAN = {"head.2": "colwise", "head.5": "rowwise"}


class Ranks(Story):
    """A run in which the two layers of the head are split over ranks."""

    def _export(self) -> Artifact:
        artifact = export_topology(self._folder / "digits.artifact", Parallel(SIZE, PLAN))
        self._screen.say(f"exported the topology for {SIZE} ranks, before training: graph {artifact.graph_id[:12]}")
        self._checker.tolerance = TOLERANCE
        self._ledger.precision = f"within {TOLERANCE:g}"
        return artifact

    def _start_server(self, *more: str) -> None:
        options = self._options
        arguments = ["digits.artifact", "held-out.npz", "inbox", "shards", *more]
        arguments += [f"--residency={options.residency}", f"--rate={options.rate}"]
        self._children.start("server", "ranked.py", arguments, ranks=SIZE)
