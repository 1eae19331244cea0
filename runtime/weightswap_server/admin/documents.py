"""Documents that the admin plane is asked with, and answers with, in JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from weightswap_runtime.tensors.digests import DIGEST
from weightswap_server.canary.judging import DEFAULT_ABORT
from weightswap_server.protocol.variant_text import NAME
from weightswap_server.service.processes import Process

_Text = Annotated[str, Meta(max_length=4096)]
_Why = Annotated[str, Meta(max_length=1000)]
_Source = Annotated[str, Meta(min_length=1, max_length=4096)]
_Id = Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]
_WeightsId = Annotated[str, Meta(pattern=f"^{DIGEST.pattern}$")] | None
_Name = Annotated[str, Meta(pattern=f"^{NAME}$")]
_Revision = Annotated[int, Meta(ge=0, le=(1 << 53))] | None
_Interval = Annotated[float, Meta(ge=0.01, le=86400)]


class Change(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every change may say: why, and which revision of a desired state has been seen."""

    why: _Why = ""
    revision: _Revision = None


class StageRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """source: a path, a URL, or `upload:NAME`. The others are those of `Model.stage`."""

    source: _Source
    expect: _WeightsId = None
    only: list[_Text] = []
    ignore: list[_Text] = []
    allow_other_graph: bool = False
    allow_nonfinite: bool | list[_Text] = False
    verify: Literal["goldens", "finite", "off"] = "goldens"
    rate_limit: Annotated[float, Meta(gt=0)] | None = None


class CommitRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """expect: the weights id that was looked at; another one that is staged by now is not committed."""

    expect: _WeightsId = None


class CanaryRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """As `CanaryPlan`. source: what is staged first; None: what is staged already."""

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
        """What is asked for first, where a source was named."""
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
    """to: the beginning of a weights id; None: what was served, or desired, before. hold: of a desired state."""

    to: _Id | None = None
    hold: bool = True


class AddVariantRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """source: as of `stage`, or a directory of PEFT's. name: as requests will say it. The others are those of
    `Model.add_variant`."""

    group: _Name
    name: _Name
    source: _Source
    base: _WeightsId = None
    expect: _WeightsId = None
    allow_nonfinite: bool = False
    rate_limit: Annotated[float, Meta(gt=0)] | None = None


class RemoveVariantRequest(Change, forbid_unknown_fields=True, kw_only=True):
    """As `Model.remove_variant`."""

    group: _Name
    name: _Name


class FollowRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """place: a directory, or the URL of one, with a desired.json."""

    place: _Source
    interval: _Interval = 5.0


class WatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """directory: a path, or the URL of a folder."""

    directory: _Source
    interval: _Interval = 5.0


class ServedWeights(Struct, kw_only=True):
    """What new calls get; `since` in seconds since the epoch. why: as an operator or the followed place said."""

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
    """How far a staging is; `phase` as in `Progress`."""

    phase: str
    bytes_done: int
    bytes_total: int


class StagedWeights(Struct, kw_only=True):
    """What an operator has staged, or is staging. `ready`: it can be committed, and the rest is known."""

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
    """A canary, what is measured of it and of the served weights, and for how long its rule has held, in seconds."""

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
    """What the followed place says; the fields are those of `FollowStatus`, and the hold's."""

    place: str
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
    """A directory whose new files are taken, and what of it was not."""

    directory: str
    error: str
    skipped: dict[str, str]
    waiting: dict[str, str]


class ModelStatus(Struct, kw_only=True):
    """All that is to be known of a model now. `following` and `watching` are None where it does neither.

    staging: the one that is under way, whoever asked for it. variants: weights ids of those that are resident, by group
    and name, the least recently used first.
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
    """The server, of the process `pid`, and its models; times in seconds since the epoch.

    processes: all that serve; with workers the first is the keeper, who answers here.
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
    """Something that changed nothing: `kind` is the error's class, `event` what was tried, as in `Event`."""

    time: float
    event: str
    source: str
    by: str
    phase: str
    kind: str
    error: str


class History(Struct, kw_only=True):
    """Commits (`SwapReceipt`, and `why`) and refusals, oldest first. desired, withdrawn: those of a followed place."""

    receipts: list[dict[str, Any]]
    refusals: list[Refusal]
    desired: list[dict[str, Any]]
    withdrawn: list[dict[str, Any]]


class Changed(Struct, kw_only=True):
    """What came of a change. receipt: of the commit, where there was one; `following`: what is desired now."""

    model: str
    receipt: dict[str, Any] | None
    status: ModelStatus


class Uploaded(Struct, kw_only=True):
    """A file that was uploaded; `source` is what `stage` and `swap` take. Sizes in bytes."""

    source: str
    size: int
    blake3: str


class Uploads(Struct, kw_only=True):
    """What lies in the directory of uploads, and how much it may hold, in bytes."""

    files: dict[str, int]
    limit: int


class AdminError(Struct, kw_only=True):
    """Why nothing was done; `kind` is the error's class."""

    error: str
    kind: str = ""


class LoadParameters(Struct, kw_only=True):
    """Of Triton's `load`: weights, or a JSON document with `weights` as the `config` that its clients send."""

    weights: _Source | None = None
    config: Annotated[str, Meta(max_length=1 << 16)] | None = None


class LoadRequest(Struct, kw_only=True):
    """Of Triton's `load`."""

    parameters: LoadParameters = field(default_factory=LoadParameters)


class IndexRequest(Struct, kw_only=True):
    """Of Triton's `index`. ready: only what can be called."""

    ready: bool = False
