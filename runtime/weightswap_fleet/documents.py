"""The messages between a fleet's processes, the methods that carry them, and the receipts and errors for its users.

WeightswapError
`-- FleetError
    |-- FleetRefused     a node cannot take the weights, so no node has changed
    |-- FleetUndecided   it is unknown if the change was written; all nodes follow the desired store
    |-- UnknownFleet     no fleet of that name is deployed
    `-- StaleReplica     a replica serves an older revision than its client has seen
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from blake3 import blake3

from weightswap_runtime.errors import MOST_OF_A_PROBLEM, Unsupported, WeightswapError, brief, plural, text_of
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_server.canary import DEFAULT_ABORT, CanaryPlan, Measured, check_plan
from weightswap_server.settings import Settings

TRIAL_LEASE = 30.0  # seconds; if the coordinator dies, the next one must start within them, or the nodes end the trial


class DeploymentSpec(NamedTuple):
    """A deployment of a fleet: what all its nodes shall run."""

    fleet: str
    artifact: str  # a path
    graph_id: str
    desired_store: str  # of the desired state
    model: str  # its name in requests
    since: float  # time of the deployment, in seconds since the epoch; of two of one fleet the later one counts
    verify: str = "goldens"  # this and the next one as for `Model.watch`
    allow_nonfinite: bool | tuple[str, ...] = False
    require_signature: tuple[str, ...] = ()  # paths of public keys
    interval: float = 1.0  # seconds between two reads of the desired store
    relay: bool = True  # one node reads a URL for all
    op_libraries: tuple[str, ...] = ()
    settings: Settings = Settings()
    ranks: int = 1  # processes that have the model together

    @property
    def key(self) -> str:
        """The key of the shared memory: replicas of another graph or desired store have agents of their own."""
        return blake3(f"{self.graph_id}\n{self.desired_store}".encode()).hexdigest()[:12]

    @property
    def admission(self) -> tuple[object, ...]:
        """What decides which weights are refused."""
        return self.verify, self.allow_nonfinite, self.require_signature


class FleetPlan(NamedTuple):
    """The plan of a trial of weights before all nodes serve them."""

    share: float = 0.0  # of the requests of each node
    of: Literal["requests", "nodes"] = "requests"  # "nodes": `share` of the nodes answer all of their requests so
    shadow: bool = False  # this and the next three as for a server's canary, over the measures of all replicas
    tolerance: float = 0.01
    promote_if: str = ""
    abort_if: str = DEFAULT_ABORT
    steps: tuple[float, ...] = ()  # shares one after another; then the weights are promoted, unless `promote_if` is set
    step_seconds: float = 60.0

    @property
    def canary_plan(self) -> CanaryPlan:
        """The plan of what is measured and judged, whatever the share."""
        return CanaryPlan(self.share, self.shadow, self.tolerance, self.promote_if, self.abort_if)

    def check(self) -> None:
        """Raise Unsupported for values out of range, and for wrong rules."""
        check_plan(self.canary_plan)
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


class PrepareRequest(NamedTuple):
    """A change of all nodes together, once all of them can make it, or a trial on them."""

    id: str
    revision: int  # of the desired store, before the change; 0: a trial's, which does not change it
    source: str
    weights: DesiredWeights  # their `since` is the start of a trial
    # seconds without a message after which a node reads the desired store, and discards what is not desired there
    lease: float
    is_rollback: bool = False  # goes ahead of all that is not decided; weights that are still in memory are not read
    reader: str = ""  # the node that reads a URL for all; empty: each reads
    plan: FleetPlan = FleetPlan()  # of a trial; without a meaning for a change


class NodeReceipt(NamedTuple):
    """A node's part in a change. Of one that has only prepared it, or a trial, the last two are not known yet."""

    seconds_staged: float
    resident: bool  # the weights were still in its memory
    verified: str
    committed_at: float | None = None  # in seconds since the epoch; None if it has read the decision itself
    generation: int | None = None


class NodeStatus(NamedTuple):
    """The status of a node, or of a replica with several ranks, which counts as one.

    Of one that does not answer, only `node`, `spec` and `error` are known.
    """

    node: str
    spec: DeploymentSpec
    agent: int  # the process id of the agent; 0: the node does not answer
    weights_id: str | None
    generation: int | None
    revision: int  # that of the served weights
    since: float | None  # time of their commit, in seconds since the epoch
    read: int  # the desired store's revision when it was last read
    reachable: bool  # the desired store could be read
    preparing: str  # the weights id of a change; empty without one
    trying: str  # the weights id on trial; empty without one
    replicas: tuple[int, ...]  # their process ids
    error: str  # why it does not serve the desired weights, or cannot read the desired store; else empty
    refused: dict[str, str]  # why it has refused weights that it has not served since, by weights id
    ranks: tuple[int, ...] = ()  # the process ids of all ranks of a replica that has its model on several

    @classmethod
    def unknown(cls, node: str, spec: DeploymentSpec, error: str) -> NodeStatus:
        """Return the status of a node that does not answer."""
        return cls(node, spec, 0, None, None, 0, None, 0, False, "", "", (), error, {})


class NodeMethods(Protocol):
    """What other processes of a fleet may ask of a node's agent: the coordinator, and the node's replicas."""

    def attach(self, pid: int, spec: DeploymentSpec) -> tuple[int, tuple[int, ...], int]: ...
    def report(self, pid: int, metrics: str, spec: DeploymentSpec) -> None: ...
    def add_measures(self, text: str) -> None: ...
    def status(self) -> NodeStatus: ...
    def metrics(self) -> str: ...
    def reconcile_soon(self) -> None: ...

    def prepare(self, request: PrepareRequest) -> NodeReceipt: ...
    def renew(self, change_id: str) -> bool: ...
    def commit(self, change_id: str, revision: int) -> tuple[float, int]: ...
    def discard(self, change_id: str) -> None: ...

    def prepare_trial(self, request: PrepareRequest) -> NodeReceipt: ...
    def continue_trial(self, trial_id: str, share: float) -> Measured: ...
    def trial(self) -> tuple[PrepareRequest, bool] | None: ...


class FleetReceipt(NamedTuple):
    """A change of a whole fleet."""

    kind: str  # "swap", "publish", "rollback", or "none" if the weights were desired already
    revision: int
    weights_id: str
    previous_weights_id: str | None
    source: str
    by: str
    why: str
    seconds_staged: float  # until all nodes were ready
    seconds_committed: float  # from the decision until all nodes served the weights
    skew: float  # seconds between the first and the last node's commit, by their clocks
    nodes: dict[str, NodeReceipt]  # by name
    late: dict[str, str]  # why nodes did not confirm in time; they follow as soon as they read the desired store

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as plain values."""
        return self._asdict() | {"nodes": {name: receipt._asdict() for name, receipt in self.nodes.items()}}


class TrialReport(NamedTuple):
    """A trial of a fleet."""

    weights_id: str
    source: str
    by: str
    why: str
    since: float  # its start, in seconds since the epoch
    plan: FleetPlan
    shares: dict[str, float]  # of the requests of each node, by its name
    values: dict[str, float | None]  # measures, by the names that rules use
    promote_held: float  # seconds for which the promotion rule has held
    skipped: int  # answers that were not compared
    outcome: str  # empty during the trial; then "promoted", "aborted", or "ended" if the nodes have given it up
    reason: str  # of the outcome

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as plain values."""
        return self._asdict() | {"plan": self.plan._asdict()}


class FleetError(WeightswapError):
    """An error of a fleet. Each node serves the same weights as before, or those that the desired store wants."""


class FleetRefused(FleetError):
    """A change that not all nodes could take, so that no node has changed.

    reasons: the errors, by the nodes' names. problems: the same as sentences.
    """

    def __init__(self, where: str, reasons: Mapping[str, BaseException]) -> None:
        self.where = brief(where)
        self.reasons = {brief(node): error for node, error in reasons.items()}
        self.problems = tuple(
            brief(f"{node}: {type(error).__name__}: {_in_one_line(text_of(error))}", MOST_OF_A_PROBLEM)
            for node, error in self.reasons.items()
        )
        lines = [f"  - {problem}" for problem in self.problems]
        super().__init__(f"{where}: no node has changed, because {plural(len(lines), 'node')} cannot take it", *lines)


def _in_one_line(text: str) -> str:
    return "; ".join(line.removeprefix("  - ") for line in text.splitlines())


class FleetUndecided(FleetError):
    """A change of which the desired store did not say if it was written. The nodes read the desired store, and follow
    it."""


class UnknownFleet(FleetError):
    """A name of which no fleet is deployed here."""


class StaleReplica(FleetError):
    """A replica with older weights than its client has seen; the same request may be sent again."""
