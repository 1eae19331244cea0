"""The options of a swap, and the report of a staging."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from msgspec import Struct, field

from weightswap_runtime.errors import (
    GraphMismatch,
    UnexpectedWeights,
    Unsupported,
    check_timeout,
    lines_of,
)
from weightswap_runtime.format.delta import DeltaStamp
from weightswap_runtime.format.goldens import Mode, check_mode
from weightswap_runtime.format.identity import (
    Allowed,
    Identity,
    Nonfinite,
    as_allowed,
    newly_nonfinite,
    refuse_nonfinite,
)
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import KEYS, NAMES, UNAMBIGUOUS, Keys, Readings, check_whole, patterns
from weightswap_runtime.format.safetensors import Stamp, label_problem
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.jobs import Job, check_rate_limit
from weightswap_runtime.memory.device_memory import IN_PLACE, StagedIn
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Location, Url, printable
from weightswap_runtime.tensors import DIGEST, tensor_digest
from weightswap_runtime.threads import WorkerThreads

from .given import GivenWeights, Rows, as_given, with_rows

if TYPE_CHECKING:
    from .given import Given
    from .transforms import Transforms


LEASE_TIMEOUT = 60.0  # seconds
_MOST_OF_ANOTHER = 10  # printed problems of another graph's file, which may have as many as tensors
DAMAGED = "The file is damaged: copy it again, or pack its checkpoint again."
READINGS: dict[str | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}
PathLike = str | os.PathLike[str]
Patterns = str | Sequence[str]
Busy = Literal["refuse", "wait"]
Kind = Literal["full", "partial", "delta", "rollback"]
Admit = Callable[[Location, str], None]
"""A callback: takes a path or URL and the weights id that the file claims; raises a SwapError to refuse it."""


class WatchOptions(TypedDict, total=False):
    """The options that every swap has, also those of watchers and followers; `Model.stage` describes them."""

    ignore: Patterns
    keys: Keys | None
    allow_other_graph: bool
    verify: Mode
    allow_nonfinite: bool | Patterns | None
    by: str
    rate_limit: float | None
    timeout: float | None


class SwapOptions(WatchOptions, total=False):
    """The options of `Model.swap` and `Model.stage`."""

    labels: Mapping[str, str] | None
    only: Patterns | None
    expect: str | None
    busy: Busy
    rows: Rows | None
    base: str | None


# a file that leads to the base of a delta, a full set or an earlier delta, and the id of the weights that it results in
BaseFile = tuple[PathLike, str]


class SwapRequest(NamedTuple):
    """What a caller wants staged, with the options of `SwapOptions` in the form in which they are used."""

    source: PathLike | Url | GivenWeights
    keys: Keys | None = None
    only: tuple[str, ...] = ()  # patterns of FQNs; empty: all
    expect: str | None = None
    allow_other_graph: bool = False
    verify: Mode = "goldens"
    allow_nonfinite: Allowed = None
    by: str = ""
    rate_limit: float | None = None  # bytes per second
    busy: Busy = "refuse"
    timeout: float | None = LEASE_TIMEOUT  # seconds to wait for another staging, and for leases; None: no limit
    ignore: tuple[str, ...] = ()  # patterns of names in the file
    onto: tuple[BaseFile, ...] = ()  # files to read first for a delta whose base is not served: a full set, then deltas
    labels: Mapping[str, str] = MappingProxyType({})  # of weights from memory
    confirm: bool = False  # compare with memory once more at the end: its owner goes on meanwhile

    @classmethod
    def of(
        cls,
        weights: Given,
        options: Mapping[str, Any],
        manifest: Manifest,
        composed: tuple[str, ...],
        onto: Iterable[BaseFile] = (),
    ) -> SwapRequest:
        """Return the request that a user's options make. composed: the weights that are parts of quantised tensors.

        Work that the calling thread has enqueued on a device is done before tensors there are read.

        Raises Unsupported for invalid values, and TypeError for unknown options.
        """
        known = SwapOptions.__annotations__
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}; the options of a swap are {', '.join(known)}")
        given = dict(options)
        if given.get("only") is not None:
            given["only"] = patterns(given["only"])
            check_whole(manifest, given["only"], composed)
        else:
            given.pop("only", None)
        given["ignore"] = patterns(given["ignore"], "ignore") if given.get("ignore") else ()
        given["allow_nonfinite"] = as_allowed(given.get("allow_nonfinite"), manifest)
        given["labels"] = dict(given.get("labels") or {})
        source = _source_of(weights, given)
        if isinstance(source, GivenWeights):
            given["keys"] = given.get("keys") or source.keys
        request = cls(source, **given, onto=tuple((path, weights_id) for path, weights_id in onto))
        request.check()
        return request

    def check(self) -> None:
        """Raise Unsupported for invalid values."""
        if not isinstance(self.keys, str | None) or self.keys not in READINGS:
            raise Unsupported(f"keys={self.keys!r}: expected {', '.join(map(repr, READINGS))}")
        if self.expect is not None and not (isinstance(self.expect, str) and DIGEST.fullmatch(self.expect)):
            found = f", this has {len(self.expect)}" if isinstance(self.expect, str) else ""
            text = f"expect={self.expect!r}: a weights id has 64 hexadecimal digits{found}"
            raise Unsupported(f"{text}. `weightswap inspect FILE` shows that of a file")
        if self.labels and not isinstance(self.source, GivenWeights):
            raise Unsupported("labels: of weights from memory alone; a file has its own (pack(labels=))")
        check_labels(self.labels)
        if self.onto and isinstance(self.source, GivenWeights):
            raise Unsupported("onto: for deltas alone, not for weights from memory")
        check_mode(self.verify)
        check_busy(self.busy)
        check_timeout(self.timeout)
        check_rate_limit(self.rate_limit)

    @property
    def where(self) -> str:
        """The source as messages and events have it, without secrets."""
        return printable(self.source)

    def beside_owner(self) -> SwapRequest:
        """Return the request for a staging during which the owner of weights in memory goes on."""
        return self._replace(confirm=isinstance(self.source, GivenWeights) and self.source.can_change)

    def open(self, check: Check, most_header: int) -> WeightSet:
        """Open the weights; arguments and errors are those of `open_weights`. Raises WeightsMismatch for tensors."""
        if isinstance(self.source, GivenWeights):
            return self.source.open(check, most_header)
        return open_weights(self.source, check, most_header)

    @property
    def patience(self) -> float | None:
        """Seconds to wait for another staging; None: do not wait."""
        return patience(self.busy, self.timeout)


def _source_of(weights: Given, options: dict[str, Any]) -> PathLike | Url | GivenWeights:
    """Return what to read, by options that are taken out. Raises WeightFileError, Unsupported and WeightsMismatch."""
    rows, base = options.pop("rows", None), options.pop("base", None)
    if rows is None:
        if base is not None:
            raise Unsupported("base: the weights that rows= start from; without rows= all tensors are read")
        return as_given(weights)
    if options.get("only"):
        raise Unsupported("only: rows of some tables, and whatever else has changed, are given by rows= as a whole")
    if base is not None and not (isinstance(base, str) and DIGEST.fullmatch(base)):
        raise Unsupported(f"base={base!r:.100}: a weights id has 64 hexadecimal digits")
    return with_rows(weights, rows, base)


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise Unsupported for labels that are no texts, or too long."""
    if not all(isinstance(text, str) for item in labels.items() for text in item):
        raise Unsupported("labels: expected texts by name")
    if problem := label_problem(dict(labels)):
        raise Unsupported(f"labels: {problem}")


def check_busy(busy: str) -> None:
    """Raise Unsupported for an invalid value of `busy=`."""
    if busy not in ("refuse", "wait"):
        raise Unsupported(f'busy={busy!r}: expected "refuse" or "wait"')


def patience(busy: Busy, timeout: float | None) -> float | None:
    """Return the seconds to wait for another staging; None: do not wait."""
    if busy == "refuse":
        return None
    return math.inf if timeout is None else timeout


class Staging(NamedTuple):
    """What every step of one staging works with."""

    request: SwapRequest
    manifest: Manifest  # of the graph for which the file is staged
    replaces: Identity | None  # of the served weights; None if there are none yet
    open_transforms: Callable[[], Transforms]  # raises ArtifactError, and MissingExtra without torch
    trees: HashTrees
    workers: WorkerThreads
    job: Job


class StagingReport(Struct, frozen=True, kw_only=True):
    """What a staging has read and verified; the receipt of its commit has the same fields."""

    weights_id: str
    labels: dict[str, str]  # of a partial swap: those of the weights before it
    kind: Kind
    source: str  # the path, the URL without credentials, "rollback", or "memory", of a module with its class
    reloadable: bool = True  # False if the weights cannot be read again from `source`: a rollback, or memory
    base: str = ""  # the weights id that a delta starts from
    only: tuple[str, ...] = ()  # the patterns of a partial swap
    ignored: tuple[str, ...] = ()
    """Names of the source that are not weights: state, `_extra_state`, and matches of `ignore=`."""
    staged_in: StagedIn = IN_PLACE  # the memory from which a commit in place copies, and why that was chosen
    bytes_read: int = 0  # from the source
    verified: str = "none"
    """"goldens" if recorded outputs were reproduced, "finite" if outputs on recorded inputs were finite, "none" if
    there was nothing to try."""
    seconds_staged: float = 0.0  # reading and hashing
    seconds_verified: float = 0.0  # comparing, and running the goldens
    nonfinite: dict[str, Nonfinite] = field(default_factory=dict)
    """The weights with NaN or infinities where the weights before had none (for the first weights: all with NaN, and
    those with infinities that require a gradient)."""


def check_graph(
    graph_id: str, manifest: Manifest, where: str, request: SwapRequest, problems: Sequence[str] = ()
) -> None:
    """Raise GraphMismatch for a file that was packed for another graph. problems: of its tensors, which do not fit."""
    if graph_id == manifest.packed_for or request.allow_other_graph:
        return
    text = f"{where}: packed for another graph, {graph_id[:12]}; this model has {manifest.packed_for[:12]}"
    if problems:
        lines = [f"  - {line}" for line in lines_of(problems, _MOST_OF_ANOTHER)]
        raise GraphMismatch(f"{text}, and its tensors do not fit:", *lines, "Pack a checkpoint of this model for it.")
    raise GraphMismatch(
        f"{text}. Pack the checkpoint for this one. Its tensors fit: if both graphs compute them alike from "
        "checkpoints, allow_other_graph=True takes them as they are."
    )


def check_expected(weights_id: str, where: str, request: SwapRequest) -> None:
    """Raise UnexpectedWeights if the weights id is not the one that the caller expects."""
    if request.expect is not None and weights_id != request.expect:
        raise UnexpectedWeights(f"{where}: gives the weights {weights_id[:12]}, expected {request.expect[:12]}")


def digest_problems(stamp: Stamp | DeltaStamp | None, read: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Return a message for each tensor whose digest differs from the stamp's; `read` has the digests of its blocks."""
    if stamp is None:
        return []
    digests = {name: tensor_digest(blocks) for name, blocks in sorted(read.items())}
    return [
        f"{name}: the file records the digest {stamp.digests[name][:12]}, its bytes have {digest[:12]}"
        for name, digest in digests.items()
        if digest != stamp.digests[name]
    ]


def report_of(
    kind: Kind,
    identity: Identity,
    weights: WeightSet,
    size: int,
    staging: Staging,
    start: float,
    staged: float,
    ignored: tuple[str, ...] = (),
    base: str = "",
) -> StagingReport:
    """Return the report of a staging. size: the bytes that were read, from the time `start` to `staged`.

    Raises UnexpectedWeights, and NonFiniteWeights for what the served weights do not have, if that is not allowed.
    """
    check_expected(identity.weights_id, weights.where, staging.request)
    served = staging.replaces.nonfinite if staging.replaces else None
    nonfinite = newly_nonfinite(staging.manifest.weights, identity.nonfinite, served)
    refuse_nonfinite(nonfinite, staging.request.allow_nonfinite, weights.where)
    return StagingReport(
        weights_id=identity.weights_id,
        labels=dict(identity.labels),
        kind=kind,
        source=weights.where,
        reloadable=weights.location is not None,
        base=base,
        only=staging.request.only,
        ignored=ignored,
        bytes_read=size,
        nonfinite=nonfinite,
        seconds_staged=staged - start,
        seconds_verified=time.perf_counter() - staged,
    )
