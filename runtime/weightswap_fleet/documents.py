"""Messages between a fleet's processes, and receipts for its users."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from blake3 import blake3

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_server.canary import DEFAULT_ABORT, CanaryPlan, check_plan
from weightswap_server.settings import Settings

TRIAL_LEASE = 30.0  # seconds


class Spec(NamedTuple):
    """A deployment of a fleet: its artifact, its model's name in requests, and the place of its desired state.

    since: the time of the deployment, in seconds since the epoch; of two deployments of one fleet the later one counts.
    verify, allow_nonfinite: as for `Model.watch`. interval: seconds between two reads of the place. relay: one node
    reads a URL for all.
    """

    fleet: str
    artifact: str
    graph_id: str
    place: str
    model: str
    since: float
    verify: str = "goldens"
    allow_nonfinite: bool | tuple[str, ...] = False
    require_signature: tuple[str, ...] = ()
    interval: float = 1.0
    relay: bool = True
    op_libraries: tuple[str, ...] = ()
    settings: Settings = Settings()

    @property
    def key(self) -> str:
        """The key of the shared memory: replicas of another graph or place have keepers of their own."""
        return blake3(f"{self.graph_id}\n{self.place}".encode()).hexdigest()[:12]


class Order(NamedTuple):
    """A change of all nodes together, once all of them can make it.

    id: the change's. revision: that of the place, before the change. lease: seconds without a message after which a
    node reads the place itself, and discards the weights unless they are desired. proven: the source was desired
    before, so a node that has the weights in memory need not read it. reader: the node that reads a URL for all; empty:
    each reads.
    """

    id: str
    revision: int
    source: str
    weights: DesiredWeights
    lease: float
    proven: bool = False
    reader: str = ""


class FleetPlan(NamedTuple):
    """The plan of a trial of weights before all nodes serve them.

    share: of the requests of each node; with of="nodes", of the nodes, which then answer all of their requests so.
    steps: shares one after another, each for `step_seconds`; after the last one the weights are promoted, unless there
    is a rule for that. shadow, tolerance, promote_if, abort_if: as of a server's canary, over the measures of all
    replicas.
    """

    share: float = 0.0
    of: Literal["requests", "nodes"] = "requests"
    shadow: bool = False
    tolerance: float = 0.01
    promote_if: str = ""
    abort_if: str = DEFAULT_ABORT
    steps: tuple[float, ...] = ()
    step_seconds: float = 60.0

    @property
    def judged(self) -> CanaryPlan:
        """The plan of what is measured and judged, whatever the share."""
        return CanaryPlan(self.share, self.shadow, self.tolerance, self.promote_if, self.abort_if)

    def check(self) -> None:
        """Raise Unsupported for values out of range, and for wrong rules."""
        check_plan(self.judged)
        if self.of not in ("requests", "nodes"):
            raise Unsupported(f"of={self.of!r}: expected 'requests' or 'nodes'")
        if self.steps and self.share:
            raise Unsupported("share and steps: give only one of them")
        if not all(0 <= step <= 1 for step in self.steps):
            raise Unsupported(f"steps={self.steps}: expected shares from 0 to 1")
        if not 0 < self.step_seconds < math.inf:
            raise Unsupported(f"step_seconds={self.step_seconds}: expected a number of seconds")

    def share_at(self, elapsed: float) -> float:
        """Return the share after so many seconds."""
        if not self.steps:
            return self.share
        return self.steps[min(max(0, int(elapsed / self.step_seconds)), len(self.steps) - 1)]

    def is_through(self, elapsed: float) -> bool:
        """True if the last step is over, and no rule decides about the promotion."""
        return bool(self.steps) and not self.promote_if and elapsed >= len(self.steps) * self.step_seconds


class TrialOrder(NamedTuple):
    """A trial on all nodes. id, source, lease, reader: as of an `Order`; weights.since: the start of the trial.

    If the controller dies, the next one must start within the lease, or the nodes end the trial.
    """

    id: str
    source: str
    weights: DesiredWeights
    plan: FleetPlan
    lease: float = TRIAL_LEASE
    reader: str = ""


class TrialReport(NamedTuple):
    """A trial of a fleet.

    shares: of the requests of each node, by name. values: measures, by the names that rules use. promote_held: seconds
    for which the promotion rule has held; skipped: answers that were not compared. outcome: empty during the trial,
    then "promoted", "aborted", or "ended" if the nodes have given it up; reason: why.
    """

    weights_id: str
    source: str
    by: str
    why: str
    since: float
    plan: FleetPlan
    shares: dict[str, float]
    values: dict[str, float | None]
    promote_held: float
    skipped: int
    outcome: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as plain values."""
        return self._asdict() | {"plan": self.plan._asdict()}


class Prepared(NamedTuple):
    """The answer of a node that has the verified weights of an order. resident: they were still in its memory."""

    seconds: float
    resident: bool
    verified: str


class Committed(NamedTuple):
    """The answer of a node after its commit. at: its time, in seconds since the epoch. seconds: of the pause."""

    at: float
    generation: int
    seconds: float


class NodeStatus(NamedTuple):
    """The status of a node. keeper: the keeper's process id; 0: the node does not answer, and only `error` is known.

    revision: that of the served weights; since: the time of their commit, in seconds since the epoch; read: the place's
    revision when it was last read; replicas: their process ids. preparing, trying: weights ids of an order and a trial;
    empty if there are none. error: why it does not serve the desired weights, or cannot read the place, else empty.
    refused: why it has refused weights that it has not served since, by weights id.
    """

    node: str
    spec: Spec
    keeper: int
    weights_id: str | None
    generation: int | None
    revision: int
    since: float | None
    read: int
    reachable: bool
    preparing: str
    trying: str
    replicas: tuple[int, ...]
    error: str
    refused: dict[str, str]

    @classmethod
    def unknown(cls, node: str, spec: Spec, error: str) -> NodeStatus:
        """Return the status of a node that does not answer."""
        return cls(node, spec, 0, None, None, 0, None, 0, False, "", "", (), error, {})


class NodeReceipt(NamedTuple):
    """A node's part in a change. committed_at: None if it has read the decision in the place itself."""

    seconds_staged: float
    resident: bool
    verified: str
    committed_at: float | None
    generation: int | None


class FleetReceipt(NamedTuple):
    """A change of a whole fleet.

    kind: "swap", "publish", "rollback", or "none" if the weights were desired already. seconds_staged: until all nodes
    were ready; seconds_committed: from the decision until all nodes served the weights; skew: seconds between the first
    and the last node's commit, by their clocks. nodes: by name. late: nodes that did not confirm in time, and why; they
    follow as soon as they read the place.
    """

    kind: str
    revision: int
    weights_id: str
    previous_weights_id: str | None
    source: str
    by: str
    why: str
    seconds_staged: float
    seconds_committed: float
    skew: float
    nodes: dict[str, NodeReceipt]
    late: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as plain values."""
        return self._asdict() | {"nodes": {name: receipt._asdict() for name, receipt in self.nodes.items()}}


class Seat(NamedTuple):
    """A replica's access to its node's memory: the keeper's process, its file descriptors, and a slot."""

    keeper: int
    descriptors: tuple[int, ...]
    slot: int
