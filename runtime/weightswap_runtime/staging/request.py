"""The options of a swap, and the result of a staging."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from weightswap_runtime.errors import GraphMismatch, UnexpectedWeights, Unsupported, check_timeout
from weightswap_runtime.format.delta import DeltaStamp
from weightswap_runtime.format.goldens import Mode, check_mode
from weightswap_runtime.format.identity import Allowed, Identity, Nonfinite, newly_nonfinite, refuse_nonfinite
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import KEYS, NAMES, UNAMBIGUOUS, Keys, Readings
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, HostPatch
from weightswap_runtime.memory.host import IN_PLACE, StagedIn
from weightswap_runtime.sources.location import Location
from weightswap_runtime.tensors import DIGEST, tensor_digest
from weightswap_runtime.threads import WorkerThreads

if TYPE_CHECKING:
    from .transforms import Transforms


LEASE_TIMEOUT = 60.0  # seconds
Busy = Literal["refuse", "wait"]
Kind = Literal["full", "partial", "delta", "rollback"]
Admit = Callable[[Location, str], None]
"""A callback: takes a path or URL and the weights id that the file claims; raises a SwapError to refuse it."""
READINGS: dict[str | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}


class BaseFile(NamedTuple):
    """File that leads to the base of a delta: a full set, or an earlier delta. `weights_id` is what it results in."""

    path: str | os.PathLike[str]
    weights_id: str


class SwapRequest(NamedTuple):
    """Request of a caller to stage a file.

    `only` are patterns of the FQNs to stage; empty means all. `ignore` are patterns of names in the file that are
    treated as absent. `allow_nonfinite` says which weights may have NaN or infinities that the served ones have not:
    all, none, or some by name; None means all, without a statement by the caller. `by` is the author of the request.
    `rate_limit` is in bytes per second. `busy` says what to do while another staging is open. `timeout`, in seconds,
    limits the waits for that staging and for leases; None means no limit. `onto` are the files to read first for a
    delta whose base is not served: a full set, then deltas.
    """

    path: str | os.PathLike[str]
    keys: Keys | None = None
    only: tuple[str, ...] = ()
    expect: str | None = None
    allow_other_graph: bool = False
    verify: Mode = "goldens"
    allow_nonfinite: Allowed = None
    by: str = ""
    rate_limit: float | None = None
    busy: Busy = "refuse"
    timeout: float | None = LEASE_TIMEOUT
    ignore: tuple[str, ...] = ()
    onto: tuple[BaseFile, ...] = ()

    @property
    def patience(self) -> float | None:
        """Seconds to wait for another staging; None means not to wait."""
        return patience(self.busy, self.timeout)

    def check(self) -> None:
        """Raise Unsupported for invalid values."""
        if not isinstance(self.keys, str | None) or self.keys not in READINGS:
            raise Unsupported(f"keys={self.keys!r}: expected {', '.join(map(repr, READINGS))}")
        if self.expect is not None and not (isinstance(self.expect, str) and DIGEST.fullmatch(self.expect)):
            raise Unsupported(f"expect={self.expect!r}: a weights id has 64 hexadecimal digits")
        check_mode(self.verify)
        check_busy(self.busy)
        check_timeout(self.timeout)


def check_busy(busy: str) -> None:
    """Raise Unsupported for an invalid value of `busy=`."""
    if busy not in ("refuse", "wait"):
        raise Unsupported(f'busy={busy!r}: expected "refuse" or "wait"')


def patience(busy: Busy, timeout: float | None) -> float | None:
    """Return the seconds to wait for another staging; None means not to wait."""
    if busy == "refuse":
        return None
    return math.inf if timeout is None else timeout


class Staging(NamedTuple):
    """Resources of one staging.

    `manifest` is that of the graph for which the file is staged. `replaces` is the identity of the served weights; None
    if there are none yet. `open_transforms` raises ArtifactError, and MissingExtra without torch.
    """

    request: SwapRequest
    manifest: Manifest
    replaces: Identity | None
    open_transforms: Callable[[], Transforms]
    workers: WorkerThreads
    job: Job


class Contents(NamedTuple):
    """Result of a staging.

    `seconds_staged` is the time of reading and hashing, `seconds_verified` that of comparing. `verified` is the mode in
    which goldens were verified. `nonfinite` are the weights with NaN or infinities that the served ones have not.
    `base` is the weights id that a delta starts from.
    """

    identity: Identity
    kind: Kind
    source: str
    ignored: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds_staged: float = 0.0
    seconds_verified: float = 0.0
    verified: str = "none"
    only: tuple[str, ...] = ()
    staged_in: StagedIn = IN_PLACE
    nonfinite: Mapping[str, Nonfinite] = MappingProxyType({})
    base: str = ""

    def proven(self, verified: str, seconds: float) -> Contents:
        """Return the same contents after goldens were verified, which took `seconds`."""
        return self._replace(verified=verified, seconds_verified=self.seconds_verified + seconds)


class Base(NamedTuple):
    """Weights over which a part or a delta is laid: the arena that holds them, and their identity."""

    arena: Arena
    identity: Identity


class StagedChange(NamedTuple):
    """Verified full set of weights, expressed as changes of the live arena."""

    contents: Contents
    patch: HostPatch


DAMAGED = "The file is damaged: copy it again, or pack its checkpoint again."


def check_graph(graph_id: str, manifest: Manifest, where: str, request: SwapRequest) -> None:
    """Raise GraphMismatch for a file that was packed for another graph."""
    if graph_id != manifest.graph_id and not request.allow_other_graph:
        raise GraphMismatch(
            f"{where}: packed for the graph {graph_id[:12]}, but this model has {manifest.graph_id[:12]}. "
            "Pack the checkpoint for this one. Its tensors fit: if both graphs compute them alike from checkpoints, "
            "allow_other_graph=True takes them as they are."
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


def check_finite(identity: Identity, where: str, staging: Staging) -> Mapping[str, Nonfinite]:
    """Return the weights with a kind of non-finite value that they do not have in the served weights.

    Raises NonFiniteWeights if they are not allowed.
    """
    served = staging.replaces.nonfinite if staging.replaces else None
    nonfinite = newly_nonfinite(staging.manifest.weights, identity.nonfinite, served)
    refuse_nonfinite(nonfinite, staging.request.allow_nonfinite, where)
    return nonfinite
