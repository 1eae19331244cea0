"""A node's keeper: it has the memory that the node's replicas serve, and takes part in the fleet's changes.

What a fleet has decided is in its place, and nowhere else; so whoever has given an order may die at any moment.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from weightswap_fleet.documents import NodeStatus, Seat, Spec
from weightswap_fleet.metrics import NodeMetrics
from weightswap_runtime.errors import NoWeights, text_of
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.shared.control import Control

from .node_changes import NodeChanges
from .node_memory import NodeMemory
from .node_place import NodePlace
from .node_weights import NodeWeights
from .relay import Relay, Transfer
from .seats import Seats

MOST_REPLICAS = 64  # of one node
_log = logging.getLogger("weightswap.fleet")


class NodeKeeper:
    """The keeper of a node. Every method may be called from any thread; `close` ends it."""

    def __init__(
        self,
        spec: Spec,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        transfer: Transfer | None = None,
        again: bool = False,
    ) -> None:
        """Serves what the place says before anybody can take a seat, if that can be served; `start` keeps it so.

        node: its name, which no other has. transfer: how weights go from node to node; None: each reads for
        itself. again: `spec` is what an earlier keeper of the name was made with, and may be that of a deployment long
        ago, as where replicas still have its memory: that is served on, and nothing changes until a replica has said
        which deployment it is of.
        Raises ArtifactError, MissingExtra, OutOfMemory and Unsupported.
        """
        self.node = node
        artifact = Artifact.open(spec.artifact)
        name = f"weightswap.{spec.fleet}.{spec.key}.{node}"  # by which its memory is found again
        adopted = NodeMemory.adopt(name)
        self._memory = adopted or NodeMemory.create(artifact.manifest.weights, MOST_REPLICAS, name)
        self._relay = Relay(node, transfer) if transfer is not None else None
        self._weights = NodeWeights(spec, node, artifact, self._memory, self._relay)
        self.model = self._weights.model
        control = Control(self._memory.segment.control)
        self._place = NodePlace(spec.place, clock)
        self.changes = changes = NodeChanges(self._weights, self._place, control, clock)
        changes.is_deployed = adopted is None and not again
        self._seats = Seats(control, lambda pid: NodeMemory.is_held_by(pid, name))
        self._metrics = NodeMetrics(spec.model, self.model)
        self._metrics.show("weightswap_fleet_revision", "That is served.", lambda: self._weights.revision)
        self._metrics.show(
            "weightswap_fleet_unread_seconds", "Since the place was read.", lambda: max(0.0, self._place.unread)
        )
        asked: tuple[Callable[..., Any], ...] = (
            *(self.take_seat, self.told, self.metrics, self.relayed, self.status),
            *(changes.prepare, changes.renew, changes.discard, changes.commit, changes.look_soon),
            *(changes.prepare_trial, changes.go_on, changes.end_trial, changes.trial, changes.tried),
        )
        self._asked = {method.__name__: method for method in asked}
        self._thread = threading.Thread(target=self._run, name="weightswap-keeper", daemon=True)
        changes.look()

    @property
    def spec(self) -> Spec:
        """The latest deployment."""
        return self._weights.spec

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method returns by which others of the fleet ask this node."""
        return self._asked[method](*arguments)

    def start(self) -> None:
        """Look at the place from now on, in a thread."""
        self._thread.start()

    def take_seat(self, pid: int, spec: Spec) -> Seat:
        """A slot for a replica of this node, whose deployment counts if it is the latest.

        Raises Unsupported, and NoWeights where it would have nothing to serve, or only what is not desired.
        """
        self.changes.take(spec)
        if self._weights.revision == 0:
            self.changes.look()  # it may have waited for the deployment
        if self._weights.revision == 0:
            raise NoWeights(*(self._error or f"{self.spec.place}: no weights are desired yet").splitlines())
        return Seat(os.getpid(), self._memory.descriptors, self._seats.take(pid))

    def told(self, pid: int, text: str, spec: Spec) -> None:
        """A replica of this node has said what it has counted, as Prometheus reads it, and its deployment."""
        if pid in self._seats.processes:
            self._metrics.tell(pid, text)
        self.changes.take(spec)

    def metrics(self) -> str:
        """What was counted on this node."""
        return self._metrics.text()

    def relayed(self, method: str, *arguments: Any) -> Any:
        """What this node's part of the relay returns."""
        return getattr(self._relay, method)(*arguments)

    def status(self) -> NodeStatus:
        """How it stands."""
        reconciler, trial = self.changes.reconciler, self.changes.trial()
        state = reconciler.state
        return NodeStatus(
            node=self.node,
            spec=self.spec,
            keeper=os.getpid(),
            weights_id=self.model.weights_id,
            generation=self.model.generation,
            revision=self._weights.revision,
            since=self.model.history[-1].committed_at if self.model.history else None,
            read=state.revision if state else 0,
            reachable=reconciler.reachable and not self._silence,
            preparing=self.changes.preparing,
            trying=trial.weights.weights_id if trial else "",
            replicas=self._seats.processes,
            error=self._error,
        )

    @property
    def _silence(self) -> str:
        return self._place.silence(self.spec.interval)

    @property
    def _error(self) -> str:
        reconciler = self.changes.reconciler
        if reconciler.reachable and (silence := self._silence):
            return silence
        error = reconciler.last_error
        return text_of(error) if error is not None else ""

    def close(self) -> None:
        """End. Replicas serve on what they have."""
        self.changes.stopped.set()
        self.changes.bell.set()
        if self._thread.is_alive():
            self._thread.join()
        self.changes.close()
        self._metrics.close()
        self.model.close()
        self._seats.close()
        self._memory.close()

    def _run(self) -> None:
        while not self.changes.stopped.is_set():
            self.changes.bell.wait(self.spec.interval)
            self.changes.bell.clear()
            self._seats.sweep()
            self._metrics.keep(self._seats.processes)
            if self._relay is not None:
                self._relay.sweep(time.monotonic())
            try:
                self.changes.look()
            except Exception:
                _log.exception("%s: a look at %s failed", self.node, self.spec.place)
