"""The keeper of a node: it owns the memory that the node's replicas serve, and takes part in the fleet's changes.

The place alone records a fleet's decisions, so a coordinator may die at any time.
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

from .changes import NodeChanges, NodePlace, NodeWeights
from .memory import NodeMemory, Seats
from .relay import Relay, Transfer

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
        """Serves the desired weights at once, if possible; `start` makes it follow the place.

        node: its unique name. transfer: of weights between nodes; None: each node reads for itself. again: this keeper
        replaces one that has died, so `spec` may be of an old deployment. In that case, or if it finds replicas with
        its memory, which it serves on, it changes nothing until a replica has sent its deployment.
        Raises ArtifactError, MissingExtra, OutOfMemory and Unsupported.
        """
        self.node = node
        artifact = Artifact.open(spec.artifact)
        name = f"weightswap.{spec.fleet}.{spec.key}.{node}"  # of its memory, by which a later keeper finds it
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
        self._metrics.add_gauge("weightswap_fleet_revision", "The served revision.", lambda: self._weights.revision)
        self._metrics.add_gauge(
            "weightswap_fleet_unread_seconds", "Seconds since the place was read.", lambda: max(0.0, self._place.unread)
        )
        methods: tuple[Callable[..., Any], ...] = (
            *(self.take_seat, self.told, self.metrics, self.relayed, self.status),
            *(changes.prepare, changes.renew, changes.discard, changes.commit, changes.look_soon),
            *(changes.prepare_trial, changes.go_on, changes.end_trial, changes.trial, changes.tried),
        )
        self._methods = {method.__name__: method for method in methods}
        self._thread = threading.Thread(target=self._run, name="weightswap-keeper", daemon=True)
        changes.look()

    @property
    def spec(self) -> Spec:
        """The latest deployment."""
        return self._weights.spec

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods that other processes of the fleet may call."""
        return self._methods[method](*arguments)

    def start(self) -> None:
        """Start the thread that follows the place."""
        self._thread.start()

    def take_seat(self, pid: int, spec: Spec) -> Seat:
        """Give a replica of this node a slot, and take over its deployment if it is the latest.

        Raises Unsupported, and NoWeights if the node serves nothing, or not the desired weights.
        """
        self.changes.take(spec)
        if self._weights.revision == 0:
            self.changes.look()  # again, with the deployment
        if self._weights.revision == 0:
            raise NoWeights(*(self._error or f"{self.spec.place}: no weights are desired yet").splitlines())
        return Seat(os.getpid(), self._memory.descriptors, self._seats.take(pid))

    def told(self, pid: int, text: str, spec: Spec) -> None:
        """Take a replica's metrics, in Prometheus' text format, and its deployment."""
        if pid in self._seats.processes:
            self._metrics.update(pid, text)
        self.changes.take(spec)

    def metrics(self) -> str:
        """Return the metrics of this node."""
        return self._metrics.text()

    def relayed(self, method: str, *arguments: Any) -> Any:
        """Call a method of this node's relay."""
        return getattr(self._relay, method)(*arguments)

    def status(self) -> NodeStatus:
        """Return the status of this node."""
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
            refused=self._weights.refused,
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
        """End the keeper. Replicas go on serving the weights that they have."""
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
            self._metrics.end_others(self._seats.processes)
            if self._relay is not None:
                self._relay.sweep(time.monotonic())
            try:
                self.changes.look()
            except Exception:
                _log.exception("%s: could not follow %s", self.node, self.spec.place)
