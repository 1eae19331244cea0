"""Documents that a fleet's processes send to each other."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from blake3 import blake3

from weightswap_runtime.desired.document import DesiredWeights
from weightswap_runtime.errors import Unsupported
from weightswap_server.canary.judging import DEFAULT_ABORT, CanaryPlan, check_plan
from weightswap_server.settings import Settings

TRIAL_LEASE = 30.0  # seconds


class Spec(NamedTuple):
    """What a fleet serves: an artifact, under a name, and the place of its desired state.

    since: when it was deployed, in seconds since the epoch; of two deployments of one name the later one counts.
    verify, allow_nonfinite: as for `Model.watch`. interval: seconds between two looks at the place. relay: one node
    reads a URL for all. model: what requests call it.
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
        """Of what shares memory: replicas of another graph, or of another place, have keepers of their own."""
        return blake3(f"{self.graph_id}\n{self.place}".encode()).hexdigest()[:12]


class Order(NamedTuple):
    """What all nodes of a fleet are to serve together, once all of them can.

    id: of this change. revision: that of the place which it follows on. lease: seconds after which a node that was told
    nothing more looks at the place itself, and gives the weights up unless they are desired. proven: the source was
    desired before, so that a node which has the weights in memory need not read it. reader: the node that reads a URL
    for all; empty: each for itself.
    """

    id: str
    revision: int
    source: str
    weights: DesiredWeights
    lease: float
    proven: bool = False
    reader: str = ""


class FleetPlan(NamedTuple):
    """How weights are tried before all nodes serve them.

    share: of the requests of each node; with of="nodes", of the nodes, which answer all of theirs so. steps: one share
    after another, each for `step_seconds`; after the last one the weights are promoted, where there is no rule for
    that. shadow, tolerance, promote_if, abort_if: as of a server's canary, over what all replicas measure.
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
        """What is measured and judged, of all shares."""
        return CanaryPlan(self.share, self.shadow, self.tolerance, self.promote_if, self.abort_if)

    def check(self) -> None:
        """Raise Unsupported for what cannot be meant."""
        check_plan(self.judged)
        if self.of not in ("requests", "nodes"):
            raise Unsupported(f"of={self.of!r}: expected 'requests' or 'nodes'")
        if self.steps and self.share:
            raise Unsupported("share and steps: give one of them")
        if not all(0 <= step <= 1 for step in self.steps):
            raise Unsupported(f"steps={self.steps}: expected shares from 0 to 1")
        if not 0 < self.step_seconds < math.inf:
            raise Unsupported(f"step_seconds={self.step_seconds}: expected a number of seconds")

    def share_at(self, elapsed: float) -> float:
        """That after so many seconds."""
        if not self.steps:
            return self.share
        return self.steps[min(max(0, int(elapsed / self.step_seconds)), len(self.steps) - 1)]

    def is_through(self, elapsed: float) -> bool:
        """Whether its last step is over, and nothing more is asked for."""
        return bool(self.steps) and not self.promote_if and elapsed >= len(self.steps) * self.step_seconds


class TrialOrder(NamedTuple):
    """What all nodes are to try. id, source, lease, reader: as of an `Order`; weights.since: when it was begun.

    The next controller begins within the lease, or the nodes give it up.
    """

    id: str
    source: str
    weights: DesiredWeights
    plan: FleetPlan
    lease: float = TRIAL_LEASE
    reader: str = ""


class TrialReport(NamedTuple):
    """A trial of a fleet.

    shares: of its requests, by node. values: what rules are about. promote_held: for how many seconds the rule of
    promotion has held; skipped: answers that were not compared. outcome: empty while it goes on, then "promoted",
    "aborted", or "ended" where the nodes have given it up; reason: why.
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
    """A node has the weights of an order, and they are verified. resident: they were still in its memory."""

    seconds: float
    resident: bool
    verified: str


class Committed(NamedTuple):
    """A node serves what was decided. at: when, in seconds since the epoch. seconds: how long calls were held."""

    at: float
    generation: int
    seconds: float


class NodeStatus(NamedTuple):
    """A node. revision: of what it serves; since: when that began, in seconds since the epoch; read: the revision of
    the place, when it was last read; replicas: their processes.

    preparing, trying: the weights of an order, and on trial; empty if there are none. error: why it does not serve what
    is desired, or cannot read the place; empty if all is well. Of a node that does not answer, which has no number of a
    process, error says that, and the rest is not known.
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

    @classmethod
    def unknown(cls, node: str, spec: Spec, error: str) -> NodeStatus:
        """Of a node that does not answer."""
        return cls(node, spec, 0, None, None, 0, None, 0, False, "", "", (), error)


class NodeReceipt(NamedTuple):
    """How a node took part in a change. committed_at: None where it has read the decision in the place itself."""

    seconds_staged: float
    resident: bool
    verified: str
    committed_at: float | None
    generation: int | None


class FleetReceipt(NamedTuple):
    """A change of a whole fleet.

    kind: "swap", "publish", "rollback", or "none" where the weights were desired already. seconds_staged: until all
    nodes were ready; seconds_committed: from the decision until all nodes served; skew: seconds between the first
    node's commit and the last one's, by their clocks. nodes: by name. late: nodes that did not say in time that they
    serve it, and why; they do as soon as they read the place.
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
    """What a replica needs to serve its node's memory: where the descriptors are found, and its slot."""

    keeper: int
    descriptors: tuple[int, ...]
    slot: int
