"""Documents of the admin plane's requests and responses. Their docstrings are their descriptions in /openapi.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from weightswap_runtime.errors import reason_of
from weightswap_runtime.following.file_queue import refused_weights
from weightswap_runtime.following.watching import Follower, Watcher
from weightswap_runtime.live.receipt import Event, SwapReceipt
from weightswap_runtime.tensors import DIGEST
from weightswap_server.canary import DEFAULT_ABORT, measure_text
from weightswap_server.protocol import NAME, Process

_Text = Annotated[str, Meta(max_length=4096)]
_Why = Annotated[str, Meta(max_length=1000)]
_Source = Annotated[str, Meta(min_length=1, max_length=4096)]
_Id = Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]
_WeightsId = Annotated[str, Meta(pattern=f"^{DIGEST.pattern}$")] | None
_Name = Annotated[str, Meta(pattern=f"^{NAME}$")]
_Revision = Annotated[int, Meta(ge=0, le=(1 << 53))] | None
_Interval = Annotated[float, Meta(ge=0.01, le=86400)]


class Change(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of every change: the reason, and the revision of the desired state that the operator has seen."""

    why: _Why = ""
    revision: _Revision = None


class SendRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """A staging of the weights in a request's body. The fields are those of `Model.stage`."""

    expect: _WeightsId = None
    only: list[_Text] = []
    ignore: list[_Text] = []
    allow_other_graph: bool = False
    allow_nonfinite: bool | list[_Text] = False
    verify: Literal["goldens", "finite", "off"] = "goldens"
    rate_limit: Annotated[float, Meta(gt=0)] | None = None


class StageRequest(SendRequest, forbid_unknown_fields=True, kw_only=True):
    """A staging. source: a path, a URL, or `upload:NAME`. The other fields are those of `Model.stage`."""

    source: _Source


class CommitRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """A commit. expect: the weights id that the operator has seen; other staged weights are not committed."""

    expect: _WeightsId = None


class CanaryRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """A canary; fields as in `CanaryPlan`. source: weights to stage first; None: those staged already."""

    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    shadow: bool = False
    tolerance: Annotated[float, Meta(ge=0)] = 0.01
    promote_if: _Why = ""
    abort_if: _Why = DEFAULT_ABORT
    source: _Source | None = None
    expect: _WeightsId = None
    allow_other_graph: bool = False
    allow_nonfinite: bool | list[_Text] = False
    ignore: list[_Text] = []

    def staging(self, source: str) -> StageRequest:
        """Return the request that stages the source."""
        return StageRequest(
            source=source,
            expect=self.expect,
            allow_other_graph=self.allow_other_graph,
            allow_nonfinite=self.allow_nonfinite,
            ignore=self.ignore,
            why=self.why,
            revision=self.revision,
        )


class RollbackRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """A rollback. to: the beginning of a weights id; None: the previous weights. hold: hold the desired state, too."""

    to: _Id | None = None
    hold: bool = True


class AddVariantRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """A new variant. source: as for `stage`, or a PEFT directory. name: the one that requests use. The other fields are
    those of `Model.add_variant`."""

    group: _Name
    name: _Name
    source: _Source
    base: _WeightsId = None
    expect: _WeightsId = None
    allow_nonfinite: bool = False
    rate_limit: Annotated[float, Meta(gt=0)] | None = None


class RemoveVariantRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """A variant to remove; fields as in `Model.remove_variant`."""

    group: _Name
    name: _Name


class FollowRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A desired store to follow: a directory, or the URL of one, with a desired.json. interval: seconds between two
    reads."""

    desired_store: _Source
    interval: _Interval = 5.0


class WatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A directory to watch: a path, or the URL of a folder. interval: seconds between two polls."""

    directory: _Source
    interval: _Interval = 5.0


class ServedWeights(Struct, kw_only=True):
    """The weights of new calls; `since` in seconds since the epoch. why: from an operator or the followed desired
    store."""

    weights_id: str
    generation: int
    labels: dict[str, str]
    since: float
    by: str
    why: str
    source: str
    kind: str
    verified: str


class Staging(Struct, kw_only=True):
    """The progress of a staging; fields as in `Progress`."""

    phase: str
    bytes_done: int
    bytes_total: int


class StagedWeights(Struct, kw_only=True):
    """Weights that an operator has staged, or is staging. ready: they can be committed, and all fields are known."""

    source: str
    by: str
    why: str
    since: float
    ready: bool
    weights_id: str | None = None
    labels: dict[str, str] = {}
    kind: str = ""
    verified: str = ""
    nonfinite: list[str] = []


class CanaryStatus(Struct, kw_only=True):
    """A canary and its measures. promote_held: the seconds for which its rule has held. values: by measured name."""

    weights_id: str
    since: float
    share: float
    shadow: bool
    tolerance: float
    promote_if: str
    abort_if: str
    promote_held: float
    skipped: int
    values: dict[str, float | None]


class Desired(Struct, kw_only=True):
    """The desired state of the followed desired store; the fields are those of `FollowStatus` and of the hold."""

    desired_store: str
    revision: int | None
    desired: str | None
    agrees: bool
    reachable: bool
    on_hold: bool
    error: str
    held_by: str = ""
    held_why: str = ""
    held_since: float | None = None


class Watched(Struct, kw_only=True):
    """A watched directory, and the reasons of the files in it that were not taken, by name."""

    directory: str
    error: str
    skipped: dict[str, str]
    waiting: dict[str, str]


class ModelStatus(Struct, kw_only=True):
    """The state of a model. `following` and `watching` are None if it does not.

    staging: the running one, by anyone. variants: weights ids of resident variants, by group and name, the least
    recently used first.
    """

    name: str
    methods: list[str]
    ready: bool
    loaded: bool
    failed: bool
    graph_id: str
    engine: str
    device: str
    residency: str
    served: ServedWeights | None
    staged: StagedWeights | None
    staging: Staging | None
    canary: CanaryStatus | None
    following: Desired | None
    watching: Watched | None
    variants: dict[str, dict[str, str]]


class ServerStatus(Struct, kw_only=True):
    """The server and its models; times in seconds since the epoch. pid: the process that serves the admin plane.

    processes: all processes of the server; with workers, the first is the owner, which serves the admin plane.
    """

    version: str
    time: float
    pid: int
    started: float
    ready: bool
    stopping: bool
    models: list[ModelStatus]
    processes: list[Process]


class Refusal(Struct, kw_only=True):
    """An attempt that changed nothing. kind, reason: as in `AdminError`. event: as in `Event`.

    weights_id: the weights that were refused; empty if it is not known, or if another try may succeed. generation: the
    one that was served then; -1 if none was.
    """

    time: float
    event: str
    source: str
    by: str
    phase: str
    kind: str
    error: str
    reason: str = ""
    weights_id: str = ""
    generation: int = -1


class History(Struct, kw_only=True):
    """Commits (`SwapReceipt`, and `why`) and refusals, oldest first.

    desired, withdrawn: weights that the followed desired store desired before, or has withdrawn (`DesiredWeights`).
    `refused`: why this process has refused them; empty if it has not, or has served them since.
    """

    receipts: list[dict[str, Any]]
    refusals: list[Refusal]
    desired: list[dict[str, Any]]
    withdrawn: list[dict[str, Any]]


class Changed(Struct, kw_only=True):
    """The outcome of a change. receipt: of the commit, if there was one. canary: the weights id of the canary that was
    started, which a rule may have ended since. status: the model's, afterwards."""

    model: str
    receipt: dict[str, Any] | None
    canary: str | None
    status: ModelStatus


class Uploaded(Struct, kw_only=True):
    """An uploaded file. source: as `stage` and `swap` take it. size: in bytes."""

    source: str
    size: int
    blake3: str


class Uploads(Struct, kw_only=True):
    """The uploaded files, with their sizes, and the most that they may take together, in bytes."""

    files: dict[str, int]
    limit: int


class AdminError(Struct, kw_only=True):
    """The reason why nothing was done. kind: the error's class. reason: which of its cases, if it has several."""

    error: str
    kind: str = ""
    reason: str = ""


class LoadParameters(Struct, kw_only=True):
    """The parameters of Triton's `load`: weights, or as its clients send, a JSON document with them as `config`."""

    weights: _Source | None = None
    config: Annotated[str, Meta(max_length=1 << 16)] | None = None


class LoadRequest(Struct, kw_only=True):
    """The request of Triton's `load`."""

    parameters: LoadParameters = field(default_factory=LoadParameters)


class IndexRequest(Struct, kw_only=True):
    """The request of Triton's `index`. ready: list only models that can be called."""

    ready: bool = False


def served_weights(last: SwapReceipt, why: str) -> ServedWeights:
    return ServedWeights(
        weights_id=last.weights_id,
        generation=last.generation,
        labels=dict(last.labels),
        since=last.committed_at,
        by=last.by,
        why=why,
        source=last.source,
        kind=last.kind,
        verified=last.verified,
    )


def following(follower: Follower) -> Desired:
    status = follower.status.as_dict()
    del status["served"]
    desired, state = Desired(**status), follower.desired
    if state is not None and state.hold is not None:
        desired.held_by, desired.held_why, desired.held_since = state.hold.by, state.hold.why, state.hold.since
    return desired


def watched(watcher: Watcher) -> Watched:
    error = watcher.last_error
    return Watched(
        directory=watcher.directory,
        error=str(error) if error else "",
        skipped={name: str(why) for name, why in watcher.skipped.items()},
        waiting={name: str(why) for name, why in watcher.waiting.items()},
    )


def refusal_of(event: Event) -> Refusal:
    return Refusal(
        time=event.time,
        event=event.kind,
        source=event.source,
        by=event.by,
        phase=event.phase,
        kind=type(event.error).__name__ if event.error else "",
        error=str(event.error) if event.error else "",
        reason=reason_of(event.error),
        weights_id=refused_weights(event),
    )


def aborted_canary(source: str, by: str, rule: str, values: Mapping[str, float | None]) -> Refusal:
    """Return the refusal of a canary that its rule has aborted, with its measures."""
    measured = ", ".join(f"{name} {measure_text(name, value)}" for name, value in values.items() if value is not None)
    return Refusal(
        time=time.time(),
        event="canary aborted",
        source=source,
        by=by,
        phase="canary",
        kind="",
        error=f"{rule}: {measured}",
    )
