"""What a fleet's processes say to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from blake3 import blake3

from weightswap_runtime.desired.document import DesiredWeights
from weightswap_server.settings import Settings


class Spec(NamedTuple):
    """What a fleet serves: an artifact, under a name, and the place of its desired state.

    since: when it was deployed, in seconds since the epoch; of two deployments of one name the later one counts.
    verify: as for `Model.stage`. interval: seconds between two looks at the place. model: what requests call it.
    """

    fleet: str
    artifact: str
    graph_id: str
    place: str
    model: str
    since: float
    verify: str = "goldens"
    require_signature: str | None = None
    interval: float = 1.0
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
    desired before, so that a node which has the weights in memory need not read it.
    """

    id: str
    revision: int
    source: str
    weights: DesiredWeights
    lease: float
    proven: bool = False


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

    error: why it does not serve what is desired, or cannot read the place; empty if all is well.
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
    replicas: tuple[int, ...]
    error: str


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
